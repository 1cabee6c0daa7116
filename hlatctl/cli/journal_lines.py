"""The lines that `hlatctl logs` shows of a run's journal: stages, every tenth step, checkpoints, evaluations.

A run of 2 M steps has 200,000 step lines. The first read starts in the last MiB of each journal file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hlatctl.run.host import host_names
from hlatctl.run.journal import Event, JournalTail, number, train_writer
from hlatctl.run.labels import in_words as in_words_of_tags
from hlatctl.run.paths import RunPaths
from hlatctl.run.reading import DAMAGED
from hlatctl.run.scores import in_words
from hlatctl.run.step_metrics import texts
from hlatctl.units import count, duration, one_line, queued, size, utc

#: Steps between two lines, as torchtitan's `log_freq`.
EVERY_STEPS = 10
#: Lines of one task of an evaluation.
_PARTS_OF_A_TASK = 10
#: Bytes at the end of each journal file that the first read covers.
_RECENT_BYTES = 1 << 20


class JournalLines:
    """Reads new events of a run's journal as lines of text.

    Args:
        run: the run directory.
        rank: read only the events of this training process; None: all events.
    """

    def __init__(self, run: RunPaths, rank: int | None = None) -> None:
        self._tail = JournalTail(run, _recent(run))
        self._writer = None if rank is None else train_writer(rank)
        self._shown_step: int | None = None
        self._shown_part: tuple[str, int] = ("", 0)

    def read_new(self) -> Iterator[str]:
        """Yield the lines of the events since the last call, in order of time."""
        for event in self._tail.read_new():
            if self._writer not in (None, event["writer"]):
                continue
            try:
                text = self._text(event)
                line = f"{utc(event['time_unix_s'])}  {text}"
            except DAMAGED:
                continue  # `hlatctl status` reports events without their fields
            if text:
                yield one_line(line)

    def _text(self, event: Event) -> str:
        kind = event["kind"]
        if kind == "train_started":
            self._shown_step = None
        if (kind == "step" and not self._is_time(int(event["step"]))) or (
            kind == "eval_progress" and not self._is_new_part(event)
        ):
            return ""
        return TEXTS[kind](event) if kind in TEXTS else ""

    def _is_time(self, step: int) -> bool:
        """Return whether a step gets a line: an attempt's first one does, then every tenth."""
        last = self._shown_step
        if last is not None and step // EVERY_STEPS <= last // EVERY_STEPS:
            return False
        self._shown_step = step
        return True

    def _is_new_part(self, event: Event) -> bool:
        part = str(event["task"]), _PARTS_OF_A_TASK * int(event["done"]) // max(1, int(event["total"]))
        shown, self._shown_part = self._shown_part, part
        return part != shown


def _recent(run: RunPaths) -> dict[str, int]:
    """Return the offset in each journal file at which reading begins."""
    offsets = {}
    for path in run.journal.glob("*.jsonl"):
        begin = path.stat().st_size - _RECENT_BYTES
        if begin > 0:
            with path.open("rb") as file:
                file.seek(begin)
                offsets[path.stem] = begin + len(file.readline(_RECENT_BYTES))
    return offsets


def _step(event: Event) -> str:
    return f"step {event['step']}: {', '.join(texts(event))}"


def _at(event: Event) -> str:
    tokens = int(event["milestone_tokens"])
    return f"evaluation at {count(tokens)} tokens" if tokens else "evaluation"


def _message(event: Event) -> str:
    return f"{event['kind']}: {event['message']}"


def _attempt_ended(event: Event) -> str:
    why = f"; {event['why']}" if event.get("why") else ""
    return f"attempt {event['attempt']}: ended at step {event['step']} ({event['evidence']}){why}"


def _queued(event: Event) -> str:
    return f"job {event['job']}: {queued(event.get('reason') or '', event.get('expected_start_unix_s'))}"


def _nonfinite(event: Event) -> str:
    return (
        f"step {event['step']}: loss {event['loss']}, gradient norm {event['grad_norm']}, not finite: {event['action']}"
    )


def _tracking_back(event: Event) -> str:
    missed = "messages are sent" if event["what"] == "notify" else f"{event['events']} missing events copied"
    return f"{event['what']} answers again, {missed}"


def _run_finished(event: Event) -> str:
    why = f" ({event['message']})" if event.get("message") else ""
    return f"run {event['outcome']} at step {event['step']}{why}"


def _labels(event: Event) -> str:
    parts = [f"name {event['name']}" if event.get("name") else "no name" if "name" in event else ""]
    parts += [in_words_of_tags(event["tags"]), *(f"without {key}" for key in event["untag"]), event["note"]]
    return ", ".join(filter(None, parts))


def _config_amended(event: Event) -> str:
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in event["changes"].items())
    when = "" if event.get("at_step") is None else f" after step {event['at_step']}"
    why = f": {event['why']}" if event.get("why") else ""
    return f"amendment {event['number']}{when} by {event['by']}: {changes}{why}"


def _drill_outcome(event: Event) -> str:
    outcome = event["failure"] or (f"skipped, {event['skipped']}" if event["skipped"] else "recovered")
    return f"drill: {event['title']}: {outcome}"


#: Kinds without a line: a checkpoint has one line when it is committed, ``rank_times`` come every 20 steps, and spikes
#: are statistics: an unusual gradient norm is an alarm.
WITHOUT_LINE = (
    "checkpoint_written",
    "checkpoint_verified",
    "checkpoint_survived",
    "rank_times",
    "gradient_spike",
    "gradient_spike_ended",
)
TEXTS: dict[str, Callable[[Event], str]] = {
    "run_created": lambda e: f"run {e['run_id']}: created",
    "head_started": lambda e: f"driver started: process {e['pid']} on {e['host']}",
    "stage_started": lambda e: f"stage {e['stage']}: started",
    "stage_finished": lambda e: f"stage {e['stage']}: finished in {duration(e['wall_s'])}",
    "stage_skipped": lambda e: f"stage {e['stage']}: skipped, {e['why']}",
    "stage_failed": lambda e: f"stage {e['stage']}: failed, {e['message']}",
    "attempt_started": lambda e: f"attempt {e['attempt']}: started",
    "attempt_attached": lambda e: f"attempt {e['attempt']}: still running, re-attached",
    "attempt_ended": _attempt_ended,
    "train_started": lambda e: f"attempt {e['attempt']}: training starts from step {e['resumed_from_step']}",
    "initial_weights": lambda e: f"initial weights: {e['path']}",
    "compile_cache": lambda e: f"compile cache: {e['hits']} hits, {e['misses']} misses",
    "step": _step,
    "nonfinite": _nonfinite,
    "checkpoint_committed": lambda e: f"checkpoint of step {e['step']}: written",
    "checkpoint_skipped": lambda e: f"checkpoint of step {e['step']}: skipped, {e['reason']}",
    "checkpoint_rejected": lambda e: f"checkpoint of step {e['step']}: rejected, {e['reason']}",
    "checkpoint_deleted": lambda e: f"checkpoint of step {e['step']}: deleted",
    "checkpoint_mirrored": lambda e: f"checkpoint of step {e['step']}: copied to {e['url']}",
    "checkpoint_fetched": lambda e: f"checkpoint of step {e['step']}: fetched from {e['url']}",
    "mirror_waiting": lambda e: f"checkpoint of step {e['step']}: waiting until it is copied to {e['url']}",
    "train_stopped": lambda e: f"attempt {e['attempt']}: training ended at step {e['step']} ({e['reason']})",
    "milestone": lambda e: f"{_at(e)}: pending, checkpoint of step {e['step']}",
    "eval_taken": lambda e: f"{_at(e)}: taken from the queue",
    "eval_started": lambda e: f"{_at(e)}: started",
    "eval_task_started": lambda e: f"{_at(e)}: {e['task']}",
    "eval_progress": lambda e: f"{_at(e)}: {e['task']}, {e['done']:,} of {e['total']:,} requests",
    "eval_task_finished": lambda e: f"{_at(e)}: {e['task']} finished: {in_words(e['scores'])}",
    "eval_finished": lambda e: f"{_at(e)}: finished: {in_words(e['scores'])}",
    "eval_failed": lambda e: f"{_at(e)}: failed, {e['message']}",
    "eval_stopped": lambda e: f"{_at(e)}: interrupted, pending again",
    "job_queued": _queued,
    "job_started": lambda e: f"job {e['job']}: runs on {host_names(e['hosts'])}",
    "job_left_queue": lambda e: f"job {e['job']}: left the queue",
    "scheduler_away": lambda e: f"job {e['job']}: the scheduler does not answer",
    "scheduler_back": lambda e: f"job {e['job']}: the scheduler answers again",
    "hang": lambda e: f"attempt {e['attempt']}: hung, {e['evidence']}" + (f"; {p}" if (p := e.get("path")) else ""),
    "stop_requested": lambda e: f"stop requested by {e['by']}",
    "amended": lambda e: f"{e['key']} amended to {e['value']} by {e['by']}: {e['why']}",
    "labelled": lambda e: f"labelled by {e['by']}: {_labels(e)}",
    "archived": lambda e: f"archived by {e['by']}: {size(number(e, 'bytes'))} of checkpoints removed",
    "config_amended": _config_amended,
    "amendment_applied": lambda e: f"amendment {e['number']}: in force after step {e['step']}",
    "profile_requested": lambda e: f"profile {e['number']}: {e['steps']} steps asked for by {e['by']}",
    "profiled": lambda e: f"profile {e['number']}: steps {e['first_step']} to {e['step']}, {size(e['bytes'])}",
    "profile_failed": lambda e: f"profile {e['number']}: failed, {e['message']}",
    "failure_simulated": lambda e: f"simulated failure: {e['failure']} on {e['host']}",
    "tracking_back": _tracking_back,
    "fault_injected": lambda e: f"drill: {e['fault']} injected into run {e['run_id']}",
    "drill_outcome": _drill_outcome,
    "drill_baseline": lambda e: f"drill: {e['steps']} steps without faults, to compare with",
    "run_finished": _run_finished,
    "eval_contract_replaced": lambda e: f"{_at(e)}: {e['message']}",
    **dict.fromkeys(
        ("warning", "alarm", "straggler", "environment_collision", "tracking_lost", "eval_rejected"), _message
    ),
}
