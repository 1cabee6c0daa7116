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
)
_NUMBERS = (
    "loss",
    "grad_norm",
    "param_norm",
    "lr",
    "step_s",
    "data_wait_s",
    "tokens_per_s",
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
    "key",
    "fault",
    "title",
    "what",
    "manifest_sha256",
    "evaluates",
    "job",
)
_LISTS = ("argv", "tasks", "overrides", "axes", "amended_skips", "left_out_hosts", "hosts", "blamed_hosts")
_OBJECTS = ("handle", "scores", "point", "settings")
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(_WHOLE, int),
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_LISTS, list),
    **dict.fromkeys(_OBJECTS, dict),
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
    "amended": ("key", "value"),
    "job_queued": ("job",),
    "job_started": ("job",),
    "job_left_queue": ("job",),
    "drill_outcome": ("fault", "title", "failure", "skipped"),
}


def is_event(value: Any) -> bool:
    """Return whether a value is an event: it has the fields of its kind, and each has its type."""
    if not isinstance(value, dict):
        return False
    time_unix_s, kind = value.get("time_unix_s"), value.get("kind")
    if not (isinstance(kind, str) and _is(value.get("seq"), int) and _is(value.get("attempt"), int)):
        return False
    if not isinstance(time_unix_s, int | float) or not abs(time_unix_s) <= _LAST_UNIX_S:
        return False
    if any(value.get(name) is None for name in _NEEDED.get(kind, ())):
        return False
    as_text = _AS_TEXT if kind == "nonfinite" else ()
    return all(_is(item, str) if name in as_text else _is_of_its_type(name, item) for name, item in value.items())


def _is_of_its_type(name: str, value: Any) -> bool:
    expected = _TYPES.get(name)
    if expected is None or value is None:
        return True
    if name == "scores":
        return isinstance(value, dict) and all(_is_score(score) for score in value.values())
    return _is(value, expected) or (name in _NUMBERS and value in _NOT_FINITE)


def _is_score(value: Any) -> bool:
    return isinstance(value, dict) and _is_of_its_type("ratio", value.get("value"))


def _is(value: Any, expected: type | tuple[type, ...]) -> bool:
    return isinstance(value, expected) and not isinstance(value, bool)
