"""The types of the fields of events. Events with a field of another type are damaged.

A field has the same type in every kind of event. ``hlatctl.run.fold`` interprets events.

A job that a scheduler runs has these events besides those of its attempt or stage:

- ``job_queued`` (``job``, ``reason``, ``expected_start_unix_s`` or None): it waits; again when the reason changes.
- ``job_started`` (``job``, ``hosts``): it runs, on these hosts.
- ``job_left_queue`` (``job``): it ended, or was given up, before it was seen to run.
- ``scheduler_away``, ``scheduler_back`` (``job``): the scheduler does not answer, and answers again.

``attempt_ended`` names the attempt's ``hosts`` and its ``blamed_hosts`` where the launcher knows them.
"""

from __future__ import annotations

from typing import Any

from hlatctl.run.step_metrics import BY_NAME

#: Field of an event written after a clock was set back: the time that orders it.
AFTER = "after_unix_s"
#: 9999-12-31, the last day that can be shown.
_LAST_UNIX_S = 253_402_300_799.0
_WHOLE = (
    "step",
    "tokens",
    "batch",
    "milestone_tokens",
    "resumed_from_step",
    "max_checkpoint_step",
    "length_steps",
    "rank",
    "trial",
    "arm",
    "arms",
    "trials",
    "done",
    "total",
    "bytes",
    "hits",
    "misses",
    "oom_kills",
    "seed",
    "exit_code",
    "pid",
    "number",
    "at_step",
    "newest_step",
    "config_number",
    "first_step",
)
_NUMBERS = (
    *BY_NAME,
    "wall_s",
    "stall_s",
    "mean",
    "peak_grad_norm",
    "ratio",
    "peak_flops_per_s",
    "process_hours",
    "saved_process_hours",
    "cold_start_s",
    "recovered_s",
    "detected_s",
    "expected_start_unix_s",
)
_TEXTS = (
    "stage",
    "fingerprint",
    "why",
    "message",
    "reason",
    "cause",
    "code",
    "evidence",
    "decision",
    "signature",
    "outcome",
    "run_id",
    "sweep_id",
    "sweep",
    "task",
    "contract",
    "host",
    "path",
    "url",
    "key",
    "fault",
    "title",
    "what",
    "manifest_sha256",
    "evaluates",
    "job",
    "note",
    "token",
    "driver",
)
_HOSTS = ("left_out_hosts", "rejected_hosts", "hosts", "blamed_hosts")
_LISTS = ("argv", "tasks", "overrides", "axes", "added_skips", "untag", "ranks", *_HOSTS)
_OBJECTS = ("handle", "scores", "point", "settings", "changes", "tags", "imported")
#: The exact types of each field's values, as JSON gives them: ``True`` is not a number.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_WHOLE, (int,)),
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(_TEXTS, (str,)),
    **dict.fromkeys(_LISTS, (list,)),
    **dict.fromkeys(_OBJECTS, (dict,)),
}
#: The journal's text for floats that JSON doesn't have.
_NOT_FINITE = ("nan", "inf", "-inf")
#: Fields that are text in ``nonfinite`` events, because each may be NaN.
_AS_TEXT = ("loss", "grad_norm")
#: Fields that an event of a kind must have.
_NEEDED = {
    "step": ("step",),
    "gradient_spike": ("step",),
    "checkpoint_committed": ("step",),
    "eval_finished": ("step", "milestone_tokens"),
    "data_changed": ("key", "value"),
    "config_amended": ("number", "changes"),
    "amendment_applied": ("number", "step"),
    "profile_requested": ("number", "steps", "ranks"),
    "profiled": ("number", "first_step", "step", "bytes"),
    "profile_failed": ("number",),
    "job_queued": ("job",),
    "job_started": ("job",),
    "job_left_queue": ("job",),
    "drill_outcome": ("fault", "title", "failure", "skipped"),
}


def is_event(value: Any) -> bool:
    """Return whether a value from JSON is an event: it has the fields of its kind, and each has its type."""
    if type(value) is not dict:
        return False
    time_unix_s, kind = value.get("time_unix_s"), value.get("kind")
    if type(kind) is not str or type(value.get("seq")) is not int or type(value.get("attempt")) is not int:
        return False
    for unix_s in (time_unix_s, value.get(AFTER, 0.0)):
        if not isinstance(unix_s, float | int) or not abs(unix_s) <= _LAST_UNIX_S:
            return False
    if any(value.get(name) is None for name in _NEEDED.get(kind, ())):
        return False
    if kind == "nonfinite" and not all(type(value[name]) is str for name in _AS_TEXT if name in value):
        return False
    for name, item in value.items():  # once for each field of millions of events
        expected = _TYPES.get(name)
        if expected is not None and type(item) not in expected and not _may_be(kind, name, item):
            return False
    return all(map(_is_score, (value.get("scores") or {}).values()))


def _may_be(kind: str, name: str, value: Any) -> bool:
    as_text = kind == "nonfinite" and name in _AS_TEXT
    return value is None or as_text or (name in _NUMBERS and value in _NOT_FINITE)


def _is_score(value: Any) -> bool:
    if type(value) is not dict:
        return False
    number = value.get("value")
    return number is None or type(number) in (int, float) or number in _NOT_FINITE
