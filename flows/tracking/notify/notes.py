"""Decides which events of a journal deserve a message, and writes its text. Pure.

The text of an event can come from a log, so a line is made printable, short, and free of recognized secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hlatctl.run.evaluations import in_words
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import Event
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import NO_SPARE_NODE
from hlatctl.units import count, host_names, one_line, utc

#: Maximum characters of a line of a message, and of a title.
_LINE_CHARS, _TITLE_CHARS = 400, 120
#: Characters of a text that are read: the time to find secrets grows with their square.
_READ_CHARS = 2000
#: Maximum characters of a summary; it can contain an earlier summary.
_BODY_CHARS = 6000
#: Maximum lines of a summary of many messages.
_SUMMARY_LINES = 15
#: Kinds that are never delayed.
URGENT = ("failed", "needs_person", "budget", "finished")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message to send.

    Args:
        kind: a kind of ``notify.on``, or ``digest`` or ``test``.
        title, body: plain text; the title is one line.
        time_unix_s: time of the event.
    """

    kind: str
    title: str
    body: str
    time_unix_s: float


@dataclass(frozen=True, kw_only=True)
class Note:
    """What an event means to a person.

    Args:
        kind: a kind of ``notify.on``.
        title: what happened, in a few words.
        happened, decided, asked, command: lines of the message; empty: none.
        key: equal for notes with the same content; at least a day passes between two of them.
    """

    kind: str
    title: str
    key: str
    happened: str = ""
    decided: str = ""
    asked: str = ""
    command: str = ""

    def message(self, run: RunPaths, time_unix_s: float, numbers: Iterable[str] = ()) -> Message:
        """Return the message about a run, with lines about its progress."""
        lines = [
            ("What happened", self.happened),
            ("What was decided", self.decided),
            ("What is asked of you", self.asked),
            ("Command", self.command),
        ]
        texts = [f"{name}: {shown(text)}" for name, text in lines if text]
        where = [f"Time: {utc(time_unix_s)}", f"Folder: {shown(str(run.root))}"]
        return Message(
            kind=self.kind,
            title=shown(f"{run.run_id}: {self.title}", _TITLE_CHARS),
            body="\n".join([*texts, *map(shown, numbers), *where]),
            time_unix_s=time_unix_s,
        )


def shown(text: str, most: int = _LINE_CHARS) -> str:
    """Return a text as one short printable line, without recognized secrets."""
    if len(text) > _READ_CHARS:  # the last word may be the beginning of a secret
        text = text[:_READ_CHARS].rpartition(" ")[0] + " …"
    line = one_line(hide(text)).strip()
    return line if len(line) <= most else f"{line[: most - 1]}…"


def note_of(event: Event, run: RunPaths) -> Note | None:
    """Return what an event means to a person; None: it deserves no message, or is damaged."""
    of = _OF.get(event["kind"])
    try:
        return of(event, run) if of else None
    except DAMAGED:
        return None


def driver_gone(pid: int, run: RunPaths) -> Note:
    """Return the note about a driver that died without a successor."""
    return Note(
        kind="needs_person",
        title="its driver died",
        key=f"driver {pid}",
        happened=f"process {pid}, which drove the run, is gone; a training job may still run",
        asked="resume the run: failures are not handled until then",
        command=_resume(run),
    )


def summary(run_id: str, messages: list[Message]) -> Message:
    """Return one message that replaces many. An urgent one comes first, in full."""
    urgent = [message for message in messages if message.kind in URGENT]
    newest = messages[-_SUMMARY_LINES:]
    left_out = len(messages) - len(newest)
    lines = [
        *([f"{urgent[-1].title}\n{urgent[-1].body}\n"] if urgent else []),
        *([f"{left_out} earlier messages are left out"] if left_out else []),
        *(f"{utc(message.time_unix_s)}  {message.title}" for message in newest),
    ]
    first = urgent[-1] if urgent else replace(messages[-1], title=run_id)
    title = shown(f"{first.title} (summary of {len(messages)} messages)", _TITLE_CHARS)
    return replace(first, title=title, body="\n".join(lines)[:_BODY_CHARS])


def _resume(run: RunPaths) -> str:
    return f"hlatctl resume {run.run_id}"


def _run_finished(event: Event, run: RunPaths) -> Note | None:
    outcome, step = str(event["outcome"]), event.get("step")
    key = f"{outcome} {event['time_unix_s']}"
    why = str(event.get("message") or "")
    if outcome == "finished":
        return Note(
            kind="finished", title=f"finished at step {step}", key=key, command=f"hlatctl show {run.run_id}",
            happened=f"training and evaluations are done; report: {run.report / 'index.html'}",
        )  # fmt: skip
    if outcome == "stopped":
        return Note(
            kind="stopped", title=f"stopped at step {step}", key=key, happened=why, decided="it can be resumed",
            command=_resume(run),
        )  # fmt: skip
    if outcome != "failed":
        return None
    return Note(
        kind="failed",
        title=f"failed at step {step}",
        key=key,
        happened=why,
        decided="the run has ended, because a restart can't fix this",
        asked=str(event.get("hint") or "fix the cause, then resume the run"),
        command=_resume(run),
    )


def _attempt_ended(event: Event, run: RunPaths) -> Note | None:
    if event.get("decision") not in ("walk_back", "skip_data"):
        return None
    what = "without a batch" if event["decision"] == "skip_data" else "from an earlier checkpoint"
    return Note(
        kind="walked_back",
        title=f"training restarts {what}",
        key=f"walked_back {event['attempt']} {event['time_unix_s']}",
        happened=f"attempt {event['attempt']} ended at step {event['step']}: {event['evidence']}",
        decided=str(event.get("why") or ""),
        command=f"hlatctl status {run.run_id}",
    )


def _attempt_started(event: Event, run: RunPaths) -> Note | None:
    hosts = [str(host) for host in event.get("left_out_hosts") or []]
    if not hosts:
        return None
    return Note(
        kind="node_left_out",
        title=f"trains without {host_names(hosts)}",
        key=f"node_left_out {','.join(sorted(hosts))}",
        happened=f"{host_names(hosts)}: failed too often, or failed a preflight",
        decided=f"attempt {event['attempt']} uses other nodes",
        asked="repair the node; a passed preflight, or time, brings it back",
        command=f"hlatctl show {run.run_id}",
    )


#: Alarms about the loss or the gradient norm of a step.
_SPIKES = ("gradient_norm", "update_skipped")


def _alarm(event: Event, run: RunPaths) -> Note:
    what, step = str(event.get("what") or "alarm"), event.get("step")
    if what == "disk_full":
        return Note(
            kind="needs_person",
            title="the disk is full",
            key="disk_full",
            happened=f"step {step}: {event['message']}",
            decided="training continues without new checkpoints",
            asked="free space; the run uses it by itself",
            command=f"df -h {run.root}",
        )
    if what == "budget":
        return Note(
            kind="budget",
            title="its budget is nearly used up",
            key=f"budget {event['message']}",
            happened=str(event["message"]),
            decided="training continues until then",
            asked="raise the budget if the run is to finish",
            command=f"hlatctl amend {run.run_id} {str(event['message']).partition('=')[0]}=VALUE",
        )
    return Note(
        kind="loss_spike" if what in _SPIKES else "alarm",
        title=f"alarm {what.replace('_', ' ')} at step {step}",
        key=f"alarm {what}",
        happened=str(event["message"]),
        decided="training continues",
        command=f"hlatctl logs {run.run_id}",
    )


def _hang(event: Event, run: RunPaths) -> Note:
    return Note(
        kind="stall",
        title="training makes no progress",
        key=f"stall {event['time_unix_s']}",
        happened=str(event["evidence"]),
        decided="the attempt is ended; a restart follows, unless the run has restarted too often",
        command=f"hlatctl status {run.run_id}",
    )


def _straggler(event: Event, run: RunPaths) -> Note:
    return Note(
        kind="straggler",
        title=f"rank {event['rank']} on {event.get('host') or 'its host'} is slow",
        key=f"straggler {event.get('host')}",
        happened=str(event["message"]),
        command=f"hlatctl status {run.run_id}",
    )


def _node_notice(event: Event, run: RunPaths) -> Note:
    leaves = event.get("ends_unix_s") is not None
    return Note(
        kind="alarm",
        title=f"{host_names(event['hosts'])} {'taken back' if leaves else 'may be taken back'}",
        key=f"node_notice {event['what']} {event['hosts'][0]}",
        happened=str(event["message"]),
        decided="training saves a checkpoint and restarts" if leaves else "training continues",
        command=f"hlatctl status {run.run_id}",
    )


def _corruption(event: Event, run: RunPaths) -> Note:
    return Note(
        kind="alarm",
        title=f"wrong numbers after step {event['step']}",
        key=f"corruption {event['step']} {event.get('ranks')}",
        happened=str(event["message"]),
        decided="the attempt ends, and the run returns to its newest checkpoint up to the last good check",
        asked="test the named devices",
        command=f"hlatctl status {run.run_id}",
    )


def _job_queued(event: Event, run: RunPaths) -> Note | None:
    if event.get("code") != NO_SPARE_NODE:
        return None  # waiting in a scheduler's queue needs no action
    return Note(
        kind="needs_person",
        title="waits for a node to be repaired",
        key=f"no_spare_node {event['reason']}",
        happened=str(event["reason"]),
        decided="the run waits, and measures the nodes again",
        asked="repair a node, or resume the run with fewer",
        command=f"hlatctl status {run.run_id}",
    )


def _eval_failed(event: Event, run: RunPaths) -> Note | None:
    if not event.get("final", True):
        return None
    tokens = int(event["milestone_tokens"])
    return Note(
        kind="needs_person",
        title=f"the evaluation at {count(tokens)} tokens failed",
        key=f"eval_failed {tokens} {event['time_unix_s']}",
        happened=str(event["message"]),
        decided="training continues; there is no further try",
        asked="fix the cause, then evaluate again",
        command=f"hlatctl eval {run.run_id}",
    )


def _eval_finished(event: Event, run: RunPaths) -> Note:
    tokens = int(event["milestone_tokens"])
    skipped, scores, contract = event.get("skipped") or {}, event.get("scores") or {}, str(event.get("contract"))
    missing = f"; skipped: {', '.join(map(str, skipped))}" if skipped else ""
    return Note(
        kind="milestone",
        title=f"scores at {count(tokens)} tokens" if tokens else "scores",
        key=f"milestone {tokens} {contract}" + (f" {len(scores)}" if contract.isdecimal() else ""),
        happened=(in_words(scores) or "no score") + missing,
        command=f"hlatctl compare {run.run_id}",
    )


def _config_amended(event: Event, run: RunPaths) -> Note:
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in event["changes"].items())
    why = f" ({event['why']})" if event.get("why") else ""
    return Note(
        kind="amended",
        title=f"amendment {event['number']}",
        key=f"amended {event['number']}",
        happened=f"{event.get('by') or 'somebody'} changed {changes}{why}",
        command=f"hlatctl show {run.run_id}",
    )


_OF: dict[str, Callable[[Event, RunPaths], Note | None]] = {
    "run_finished": _run_finished,
    "attempt_ended": _attempt_ended,
    "attempt_started": _attempt_started,
    "alarm": _alarm,
    "hang": _hang,
    "straggler": _straggler,
    "node_notice": _node_notice,
    "corruption_suspected": _corruption,
    "job_queued": _job_queued,
    "eval_failed": _eval_failed,
    "eval_finished": _eval_finished,
    "config_amended": _config_amended,
}
