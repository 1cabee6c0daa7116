"""What a drill does to a run, a function each: the blow, what it was noticed as, and how the run got over it.

``FAULTS`` is their order. Every function leaves the run as it was, but for what the run itself has to mend.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from flows.drill import small_disk
from flows.drill.arena import Arena, NotRecovered, NotTried
from flows.drill.tracking import Servers
from hlatctl.run import files
from hlatctl.run.journal import Event, heartbeat, train_writer
from hlatctl.run.lease import driver_pid
from hlatctl.run.manifest import MANIFEST, steps_in
from hlatctl.run.pace import median_step_s
from hlatctl.run.processes import Identity, send

#: A slowed process runs for the first of these and stands still for the second, again and again.
_RUNS_S, _STANDS_S = 0.02, 0.1
#: Steps that training has to make while the trackers are down.
_STEPS_WHILE_DOWN = 40
#: What is damaged is read and written back whole.
_MAX_DAMAGED_BYTES = 1 << 30
#: Text, and neither offsets nor headers, which are full of zeros.
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{64,}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a run met a fault.

    Args:
        detected_as: what the journal calls it.
        detected_s: from the fault to that event.
        recovered_s: from the fault to the next optimizer step, or until what was lost is back; None: training never
            stood still and nothing had to come back.
        lost_steps: optimizer steps done again.
    """

    detected_as: str
    detected_s: float
    recovered_s: float | None
    lost_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that breaks.

    Args:
        title: for people.
        meet: does it to a run that is under way, and sees the run through it.
        skip: why it can't be done with a configuration; empty if it can.
        small_disk: it needs a run of its own whose directory lies on a small disk.
    """

    title: str
    meet: Callable[[Arena, Servers], Seen]
    skip: Callable[[Config], str] = lambda config: ""
    small_disk: bool = False


def kill_process(arena: Arena, _: Servers) -> Seen:
    """SIGKILL to one training process."""
    return _restarted(arena, "kill_process", _killer(arena), "attempt_ended")


def stop_process(arena: Arena, _: Servers) -> Seen:
    """A training process that stands still: nothing fails, and nothing goes on."""
    rank = arena.process()
    return _restarted(arena, "stop_process", lambda: send(rank, signal.SIGSTOP), "hang")


def preempt(arena: Arena, _: Servers) -> Seen:
    """SIGTERM to the job's program on the node, as a scheduler sends it that wants its nodes back."""
    job = arena.job()
    return _restarted(arena, "preempt", lambda: send(job, signal.SIGTERM), "attempt_ended")


def bad_data(arena: Arena, _: Servers) -> Seen:
    """The prepared corpus turns to bytes that are no text, until the attempt has ended of it."""
    corpus = [Path(entry["path"]) for entry in files.read_json(arena.run.dataset)["files"]]
    size_bytes = sum(path.stat().st_size for path in corpus)
    if size_bytes > _MAX_DAMAGED_BYTES:
        raise NotTried(f"the prepared corpus has {size_bytes:,} bytes, too many to damage and restore")
    whole = [path.read_bytes() for path in corpus]

    def damage() -> None:
        for path, content in zip(corpus, whole, strict=True):
            _overwrite(path, _TEXT.sub(lambda found: b"\xff" * len(found[0]), content))

    def restore() -> None:
        for path, content in zip(corpus, whole, strict=True):
            _overwrite(path, content)

    return _restarted(arena, "bad_data", damage, "attempt_ended", restore)


def flip_bytes(arena: Arena, _: Servers) -> Seen:
    """A process dies, and bytes of the newest checkpoint flip before it is read."""

    def damage() -> None:
        folder = _newest_checkpoint(arena)
        shard = max((path for path in folder.iterdir() if path.name != MANIFEST), key=lambda path: path.stat().st_size)
        with shard.open("r+b") as file:
            middle = file.seek(shard.stat().st_size // 2)
            flipped = bytes(byte ^ 0xFF for byte in file.read(8))
            file.seek(middle)
            file.write(flipped)

    return _restarted(arena, "flip_bytes", _killer(arena), "checkpoint_rejected", damage)


def cut_manifest(arena: Arena, _: Servers) -> Seen:
    """A process dies, and the newest checkpoint's manifest loses its second half before it is read."""

    def damage() -> None:
        manifest = _newest_checkpoint(arena) / MANIFEST
        os.truncate(manifest, manifest.stat().st_size // 2)

    return _restarted(arena, "cut_manifest", _killer(arena), "checkpoint_rejected", damage)


def slow_process(arena: Arena, _: Servers) -> Seen:
    """One process gets only a part of the time, until it is named."""
    attempt = arena.attempt.number
    with _slowed(arena.process()) as begin:
        struck_s, mark = arena.strike("slow_process", begin)
        last = arena.config.world_size - 1  # on a busy machine others may be slow besides
        named = arena.wait_for_event(
            "the slow process's name", mark, lambda e: e["kind"] == "straggler" and e["rank"] == last
        )
    _still(arena, attempt)
    return Seen(detected_as=_name(named), detected_s=named["time_unix_s"] - struck_s, recovered_s=None)


def trackers_down(arena: Arena, servers: Servers) -> Seen:
    """MLflow's and Prefect's servers die; training goes on; when they are back, MLflow gets what it has missed."""
    attempt = arena.attempt.number
    struck_s, mark = arena.strike("trackers_down", servers.kill)
    lost = arena.wait_for_event(
        "the loss of MLflow", mark, lambda e: e["kind"] == "tracking_lost" and e["what"] == "mlflow"
    )
    goal = arena.state.step + _STEPS_WHILE_DOWN
    arena.wait_until("steps without MLflow and Prefect", lambda: arena.state.step >= goal)
    servers.start()
    arena.wait_until("the missed steps in MLflow", lambda: servers.last_step(arena.run) >= goal)
    _still(arena, attempt)
    back = arena.wait_for_event("MLflow's return", mark, _kind("tracking_back"))
    return Seen(
        detected_as=_name(lost), detected_s=lost["time_unix_s"] - struck_s, recovered_s=back["time_unix_s"] - struck_s
    )


def kill_head(arena: Arena, _: Servers) -> Seen:
    """SIGKILL to the head process; another one takes over, and training has not noticed."""
    attempt, head = arena.attempt.number, arena.head()
    struck_s, mark = arena.strike("kill_head", lambda: send(head, signal.SIGKILL))
    arena.wait_until("the head's end", lambda: driver_pid(arena.run) is None)
    detected_s = time.time() - struck_s
    arena.drive()
    attached = arena.wait_for_event("re-attachment", mark, _kind("attempt_attached"))
    before = arena.state.step
    arena.wait_until("steps under the new head", lambda: arena.state.step > before)
    _still(arena, attempt)
    return Seen(detected_as="interrupted", detected_s=detected_s, recovered_s=attached["time_unix_s"] - struck_s)


def fill_disk(arena: Arena, _: Servers) -> Seen:
    """The run's disk fills up to the last byte, for longer than a hang may last and until a save was due."""
    attempt, newest, ballast = arena.attempt.number, max(arena.state.checkpoints), arena.run.root / "ballast"
    struck_s, mark = arena.strike("fill_disk", lambda: small_disk.fill(ballast))
    try:
        arena.wait_until("training on a full disk", _outlives(arena, ballast, struck_s))
        if newest not in steps_in(arena.run.checkpoints):
            raise NotRecovered(f"the full disk cost the checkpoint of step {newest}")
    finally:
        ballast.unlink()
    freed = len(arena.events)
    alarm = arena.wait_for_event("an alarm", mark, lambda e: e["kind"] == "alarm" and e["what"] == "disk_full")
    saved = arena.wait_for_event("a checkpoint after that", freed, _kind("checkpoint_committed"))
    _still(arena, attempt)
    steps = {event["step"] for event in arena.events[mark:] if event["kind"] == "step"}
    missing = sorted(set(range(min(steps), max(steps) + 1)) - steps)
    if missing:
        raise NotRecovered(f"the full disk cost the events of steps {missing}")
    return Seen(
        detected_as=_name(alarm),
        detected_s=alarm["time_unix_s"] - struck_s,
        recovered_s=saved["time_unix_s"] - struck_s,
    )


def _outlives(arena: Arena, ballast: Path, struck_s: float) -> Callable[[], bool]:
    """Whether training has lived on a full disk for longer than a hang may last, and through a save."""
    median_s = median_step_s(arena.state.steps.values()) or 0.0
    recovery, beats = arena.config.recovery, set[int]()
    limit_s = max(recovery.hang_floor_s, recovery.hang_factor * median_s)

    def lives() -> bool:
        small_disk.fill(ballast)  # old checkpoints may have been deleted
        beats.add(heartbeat(arena.run, train_writer(0)))
        return len(beats) > 2 * arena.config.checkpoint.every_steps and time.time() - struck_s > limit_s

    return lives


def _restarted(
    arena: Arena, fault: str, blow: Callable[[], object], notice: str, then: Callable[[], None] | None = None
) -> Seen:
    """A fault that ends an attempt: see its end noticed, do what else is to be done, and see the next make a step."""
    broken = arena.attempt
    struck_s, mark = arena.strike(fault, blow)
    try:
        arena.wait_for_event("the attempt's end", mark, _kind("attempt_ended"))
    finally:
        if then:
            then()
    step = arena.wait_for_event(
        "a step of another attempt", mark, lambda e: e["kind"] == "step" and e["attempt"] > broken.number
    )
    noticed = arena.wait_for_event(notice, mark, _kind(notice))
    return Seen(
        detected_as=_name(noticed),
        detected_s=noticed["time_unix_s"] - struck_s,
        recovered_s=step["time_unix_s"] - struck_s,
        lost_steps=broken.last_step - (arena.attempt.resumed_from_step or 0),
    )


def _kind(kind: str) -> Callable[[Event], bool]:
    return lambda event: event["kind"] == kind


def _name(event: Event) -> str:
    """What an event calls a fault."""
    if event["kind"] == "checkpoint_rejected":
        return f"checkpoint rejected ({event['reason'].replace(event['path'] + '/', '')})"
    if event["kind"] == "straggler":
        return f"straggler (rank {event['rank']})"
    return str(event.get("cause") or event.get("what") or event["kind"]).replace("_", " ")


def _still(arena: Arena, attempt: int) -> None:
    """Training must not have been restarted."""
    if arena.attempt.number != attempt:
        raise NotRecovered(f"training was restarted (attempt {arena.attempt.number}), which it need not have been")


def _killer(arena: Arena) -> Callable[[], object]:
    rank = arena.process()
    return lambda: send(rank, signal.SIGKILL)


def _newest_checkpoint(arena: Arena) -> Path:
    """On the disk: the journal may not have got to it."""
    return arena.run.checkpoint(max(steps_in(arena.run.checkpoints)))


def _overwrite(path: Path, content: bytes) -> None:
    """In place: whoever has mapped the file sees it."""
    with path.open("r+b") as file:
        file.write(content)


@contextmanager
def _slowed(process: Identity) -> Iterator[Callable[[], None]]:
    """A process that can be slowed by the function given, and is left running at full speed."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_RUNS_S) and send(process, signal.SIGSTOP):
            over.wait(_STANDS_S)
            send(process, signal.SIGCONT)

    thread = threading.Thread(target=work, name="slow", daemon=True)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


def _one_process(config: Config) -> str:
    alone = config.cluster.processes_per_node * config.cluster.nodes < 2
    return "with one process none is slower than the others" if alone else ""


def _two_tiers(config: Config) -> str:
    return "the copy in checkpoint.fast_dir would be read instead" if config.checkpoint.fast_dir else ""


def no_tracking(config: Config) -> str:
    """Why MLflow's and Prefect's servers can't be taken down; empty if they can."""
    return "" if config.tracking.enabled else "tracking.enabled=false"


def _no_small_disk(_: Config) -> str:
    return small_disk.why_unavailable()


FAULTS: dict[str, Fault] = {
    "kill_process": Fault(title="kill -9 of a process", meet=kill_process),
    "stop_process": Fault(title="SIGSTOP of a process", meet=stop_process),
    "slow_process": Fault(title="a process slowed down", meet=slow_process, skip=_one_process),
    "preempt": Fault(title="SIGTERM to the job", meet=preempt),
    "bad_data": Fault(title="the loader can't read its data", meet=bad_data),
    "flip_bytes": Fault(title="bytes of the newest checkpoint flipped", meet=flip_bytes, skip=_two_tiers),
    "cut_manifest": Fault(title="the newest manifest cut in half", meet=cut_manifest, skip=_two_tiers),
    "trackers_down": Fault(title="MLflow and Prefect down for a while", meet=trackers_down, skip=no_tracking),
    "kill_head": Fault(title="kill -9 of the head", meet=kill_head),
    "fill_disk": Fault(title="the disk full", meet=fill_disk, skip=_no_small_disk, small_disk=True),
}
