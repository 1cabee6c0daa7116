"""How faults are injected into a run, one function each, which also observes detection and recovery.

``flows.drill.pool`` names them. Every function undoes its damage, except for what the run must repair itself.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from flows.drill import arena as small_disk
from flows.drill.arena import Arena, NotRecovered, NotTried, Servers, last_rank
from hlatctl.run import files, processes
from hlatctl.run.checkpoint import MANIFEST, steps_in
from hlatctl.run.journal import Event, heartbeat, train_writer
from hlatctl.run.lease import driver_pid
from hlatctl.run.pace import median_step_s
from hlatctl.run.processes import Identity, send

#: A slowed process alternates between running and pausing for these times.
_RUNS_S, _PAUSES_S = 0.02, 0.1
#: Steps of training while the trackers are down.
_STEPS_WHILE_DOWN = 40
#: Steps that training must make with a fault that doesn't end it.
_STEPS_WITH_FAULT = 10
#: The folder in a drill's folder with what runs inside ranks, and the file with the next statement.
PLANTED, _ORDER = "planted", "order.py"
_SITECUSTOMIZE = '''"""Runs order.py, next to this file, in the main thread when a drill sends SIGUSR2."""
import pathlib
import signal

signal.signal(signal.SIGUSR2, lambda *_: exec((pathlib.Path(__file__).parent / "order.py").read_text(), {}))
'''
#: Maximum size of a damaged file: it is kept in memory, to restore it.
_MAX_DAMAGED_BYTES = 1 << 30
#: Matches text, but no offsets or headers, which are full of zeros.
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{64,}")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a run reacted to a fault.

    Args:
        detected_as: the fault's name in the journal.
        detected_s: seconds from the fault to that event.
        recovered_s: seconds from the fault to the next optimizer step, or until what was lost is restored; None:
            training continued and nothing was lost.
        lost_steps: number of optimizer steps that were repeated.
    """

    detected_as: str
    detected_s: float
    recovered_s: float | None
    lost_steps: int = 0

    @classmethod
    def between(cls, injected_s: float, noticed: Event, recovered: Event | None, lost_steps: int = 0) -> Seen:
        """Return the result, with the times from a fault to the events that show its detection and the recovery."""
        return cls(
            detected_as=_name(noticed),
            detected_s=noticed["time_unix_s"] - injected_s,
            recovered_s=recovered["time_unix_s"] - injected_s if recovered else None,
            lost_steps=lost_steps,
        )


def kill_process(arena: Arena, _: Servers) -> Seen:
    """Send SIGKILL to one training process."""
    return _restarted(arena, "kill_process", _killer(arena), "attempt_ended")


def stop_process(arena: Arena, _: Servers) -> Seen:
    """Send SIGSTOP to one training process: nothing fails, and no step follows."""
    return _restarted(arena, "stop_process", lambda: arena.reach.rank(arena.job, signal.SIGSTOP), "hang")


def preempt(arena: Arena, _: Servers) -> Seen:
    """Send SIGTERM to the job, as a scheduler does to reclaim the nodes."""
    return _restarted(arena, "preempt", lambda: arena.reach.preempt(arena.job), "attempt_ended")


def kill_program(arena: Arena, _: Servers) -> Seen:
    """Send SIGKILL to the program of the last node, which writes no record of its end."""
    return _restarted(arena, "kill_program", lambda: arena.reach.program(arena.job, signal.SIGKILL), "attempt_ended")


def cancel(arena: Arena, _: Servers) -> Seen:
    """Cancel the job as an administrator does. If that stops the run, resume it, as a person would do."""
    job = arena.job

    def resume() -> None:
        arena.wait_until("the run's end, or another attempt", lambda: _undriven(arena) or arena.job != job)
        arena.revive()

    arena.may_end()
    return _restarted(arena, "cancel", lambda: arena.reach.cancel(job), "attempt_ended", resume)


def bad_data(arena: Arena, _: Servers) -> Seen:
    """Replace the text of the prepared corpus with invalid bytes until the attempt has failed."""
    corpus = [Path(entry["path"]) for entry in files.read_json(arena.run.dataset)["files"]]
    if not corpus:
        raise NotTried("the corpus is used where it lies, and a drill doesn't damage a person's files")
    size_bytes = sum(path.stat().st_size for path in corpus)
    if size_bytes > _MAX_DAMAGED_BYTES:
        raise NotTried(f"the prepared corpus has {size_bytes:,} bytes, too many to damage and restore")
    whole = [path.read_bytes() for path in corpus]

    def damage() -> None:
        for path, content in zip(corpus, whole, strict=True):
            _overwrite(path, _TEXT.sub(lambda text: b"\xff" * len(text[0]), content))

    def restore() -> None:
        for path, content in zip(corpus, whole, strict=True):
            _overwrite(path, content)

    return _restarted(arena, "bad_data", damage, "attempt_ended", before_next=restore)


def flip_bytes(arena: Arena, _: Servers) -> Seen:
    """Kill a process, and flip bytes of the newest checkpoint before it is read."""

    def damage() -> None:
        folder = _newest_checkpoint(arena)
        shard = max((path for path in folder.iterdir() if path.name != MANIFEST), key=lambda path: path.stat().st_size)
        with shard.open("r+b") as file:
            middle = file.seek(shard.stat().st_size // 2)
            flipped = bytes(byte ^ 0xFF for byte in file.read(8))
            file.seek(middle)
            file.write(flipped)

    return _restarted(arena, "flip_bytes", _killer(arena), "checkpoint_rejected", before_next=damage)


def cut_manifest(arena: Arena, _: Servers) -> Seen:
    """Kill a process, and cut the newest checkpoint's manifest in half before it is read."""

    def damage() -> None:
        manifest = _newest_checkpoint(arena) / MANIFEST
        os.truncate(manifest, manifest.stat().st_size // 2)

    return _restarted(arena, "cut_manifest", _killer(arena), "checkpoint_rejected", before_next=damage)


def slow_process(arena: Arena, _: Servers) -> Seen:
    """Slow one process down until the journal names it."""
    attempt = arena.attempt.number
    with _slowed(last_rank(arena.job)) as begin:
        injected_s, mark = arena.inject("slow_process", begin)
        last = arena.config.world_size - 1  # on a busy machine other processes may be slow too
        named = arena.wait_for_event(
            "the slow process's name", mark, lambda e: e["kind"] == "straggler" and e["rank"] == last
        )
    _require_same(arena, attempt)
    return Seen.between(injected_s, named, None)


def flip_memory(arena: Arena, _: Servers) -> Seen:
    """Flip a bit in the memory of one training process, which computes wrong numbers from then on."""
    process, model = last_rank(arena.job), arena.config.model
    width = model.qk_rope_head_dim if model.kv_lora_rank else model.head_width
    seen = _restarted(arena, "flip_memory", lambda: _flip_bit(process, width), "corruption_suspected")
    suspected = next(event for event in reversed(arena.events) if event["kind"] == "corruption_suspected")
    if arena.config.world_size - 1 not in suspected["ranks"]:
        raise NotRecovered(f"the check suspected other processes: {suspected['message']}")
    return seen


def inside(arena: Arena, _: Servers, *, statement: str, continues: bool = False) -> Seen:
    """Have the main thread of the last rank run a statement between two of its own (``prepare``)."""
    order = arena.run.root.parent / PLANTED / _ORDER
    files.write_text(order, statement)

    def run() -> None:
        arena.reach.rank(arena.job, signal.SIGUSR2)

    return continued(arena, run) if continues else ended(arena, run)


def signalled(arena: Arena, _: Servers, *, name: str) -> Seen:
    """Send a signal to one training process."""
    return ended(arena, lambda: arena.reach.rank(arena.job, signal.Signals[name]))


def cut_shard(arena: Arena, _: Servers) -> Seen:
    """Kill a process, and cut the largest file of the newest checkpoint in half before it is read."""

    def damage() -> None:
        files_of = [path for path in _newest_checkpoint(arena).iterdir() if path.name != MANIFEST]
        shard = max(files_of, key=lambda path: path.stat().st_size)
        os.truncate(shard, shard.stat().st_size // 2)

    return _restarted(arena, "cut_shard", _killer(arena), "checkpoint_rejected", before_next=damage)


def missing_corpus(arena: Arena, _: Servers) -> Seen:
    """Kill a process, and move the prepared corpus away, until the next attempt has failed."""
    corpus = [Path(entry["path"]) for entry in files.read_json(arena.run.dataset)["files"]]
    if not corpus:
        raise NotTried("the corpus is used where it lies, and a drill doesn't move a person's files")

    def restore() -> None:
        for path in corpus:
            path.with_name(f"{path.name}.away").rename(path)

    def damage() -> None:
        for path in corpus:
            path.rename(path.with_name(f"{path.name}.away"))
        _killer(arena)()

    return ended(arena, damage, attempts=2, then=restore)


def prepare(folder: Path) -> dict[str, str]:
    """Prepare a drill's folder for statements inside ranks; return the variables of its jobs.

    Python imports ``sitecustomize`` when it starts. The module waits for a signal, whose handler runs the statement in
    the main thread. The trainer itself has no code for drills.
    """
    planted = folder / PLANTED
    planted.mkdir(parents=True)
    files.write_text(planted / "sitecustomize.py", _SITECUSTOMIZE)
    path = processes.child_environment()["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join([os.fspath(planted), path])}


def ended(
    arena: Arena, action: Callable[[], object], *, attempts: int = 1, then: Callable[[], None] | None = None
) -> Seen:
    """Inject a fault that ends attempts, call ``then``, and wait for a step; resume a run that stops for a person."""
    broken = arena.attempt
    arena.may_end()
    injected_s, mark = arena.inject(arena.trying, action)
    last = broken.number + attempts - 1
    ended = arena.wait_for_event(
        "the attempt's end", mark, lambda e: e["kind"] == "attempt_ended" and e["attempt"] == last
    )
    if then:
        then()
    if ended["decision"] == "stop":
        arena.wait_until("the run's end", lambda: _undriven(arena))
        arena.revive()
    step = arena.wait_for_event(
        "a step of another attempt", mark, lambda e: e["kind"] == "step" and e["attempt"] > last
    )
    return Seen.between(injected_s, ended, step, broken.last_step - (arena.attempt.resumed_from_step or 0))


def continued(arena: Arena, action: Callable[[], object]) -> Seen:
    """Inject a fault that must not end the attempt, and wait for further steps."""
    attempt = arena.attempt.number
    injected_s, mark = arena.inject(arena.trying, action)
    goal = arena.state.step + _STEPS_WITH_FAULT
    arena.wait_until("steps with the fault", lambda: arena.state.step >= goal)
    _require_same(arena, attempt)
    step = arena.wait_for_event("a step", mark, _kind("step"))
    return Seen.between(injected_s, step, None)


def trackers_down(arena: Arena, servers: Servers) -> Seen:
    """Kill MLflow's and Prefect's servers and restart them: training continues, and MLflow gets the missing entries."""
    attempt = arena.attempt.number
    injected_s, mark = arena.inject("trackers_down", servers.kill)
    lost = arena.wait_for_event(
        "the loss of MLflow", mark, lambda e: e["kind"] == "tracking_lost" and e["what"] == "mlflow"
    )
    goal = arena.state.step + _STEPS_WHILE_DOWN
    arena.wait_until("steps without MLflow and Prefect", lambda: arena.state.step >= goal)
    servers.start()
    arena.wait_until("the missed steps in MLflow", lambda: servers.last_step(arena.run) >= goal)
    _require_same(arena, attempt)
    back = arena.wait_for_event("MLflow's return", mark, _kind("tracking_back"))
    return Seen.between(injected_s, lost, back)


def kill_driver(arena: Arena, _: Servers) -> Seen:
    """Send SIGKILL to the driver; another driver takes over, and training continues."""
    attempt, driver = arena.attempt.number, arena.driver()
    injected_s, mark = arena.inject("kill_head", lambda: send(driver, signal.SIGKILL))
    arena.wait_until("the driver's end", lambda: _undriven(arena))
    detected_s = time.time() - injected_s
    arena.drive()
    attached = arena.wait_for_event("re-attachment", mark, _kind("attempt_attached"))
    before = arena.state.step
    arena.wait_until("steps under the new driver", lambda: arena.state.step > before)
    _require_same(arena, attempt)
    return Seen(detected_as="interrupted", detected_s=detected_s, recovered_s=attached["time_unix_s"] - injected_s)


def fill_disk(arena: Arena, _: Servers) -> Seen:
    """Fill the run's disk completely, for longer than a hang may last and until a checkpoint is due."""
    attempt, newest, ballast = arena.attempt.number, max(arena.state.checkpoints), arena.run.root / "ballast"
    injected_s, mark = arena.inject("fill_disk", lambda: small_disk.fill_disk(ballast))
    try:
        arena.wait_until("training on a full disk", _outlives(arena, ballast, injected_s))
        if newest not in steps_in(arena.run.checkpoints):
            raise NotRecovered(f"the full disk cost the checkpoint of step {newest}")
    finally:
        ballast.unlink()
    freed = len(arena.events)
    alarm = arena.wait_for_event("an alarm", mark, lambda e: e["kind"] == "alarm" and e["what"] == "disk_full")
    saved = arena.wait_for_event("a checkpoint after that", freed, _kind("checkpoint_committed"))
    _require_same(arena, attempt)
    steps = {event["step"] for event in arena.events[mark:] if event["kind"] == "step"}
    journalled = {step for step in range(min(steps), max(steps) + 1) if step % arena.attempt.log_freq == 0}
    missing = sorted(journalled - steps)
    if missing:
        raise NotRecovered(f"the full disk cost the events of steps {missing}")
    return Seen.between(injected_s, alarm, saved)


def _outlives(arena: Arena, ballast: Path, injected_s: float) -> Callable[[], bool]:
    """Return a function that says whether training has outlived the hang limit and a save on the full disk."""
    median_s = median_step_s(arena.state.steps.values()) or 0.0
    recovery, beats = arena.config.recovery, set[int]()
    limit_s = max(recovery.hang_floor_s, recovery.hang_factor * median_s)

    def lives() -> bool:
        small_disk.fill_disk(ballast)  # old checkpoints may have been deleted
        beats.add(heartbeat(arena.run, train_writer(0)))
        return len(beats) > 2 * arena.config.checkpoint.every_steps and time.time() - injected_s > limit_s

    return lives


def _restarted(
    arena: Arena,
    fault: str,
    action: Callable[[], object],
    notice: str,
    then: Callable[[], None] | None = None,
    *,
    before_next: Callable[[], None] | None = None,
) -> Seen:
    """Inject a fault that ends an attempt, wait for its end, call ``then``, and wait for a step of the next attempt.

    Args:
        before_next: called between the attempt's end and the next attempt, for which the driver waits.
    """
    broken = arena.attempt
    if before_next:
        with arena.driver_waits():
            injected_s, mark = arena.inject(fault, action)
            try:
                arena.wait_until("the end of the attempt's job", arena.job_has_ended)
            finally:
                before_next()
    else:
        injected_s, mark = arena.inject(fault, action)
    try:
        arena.wait_for_event("the attempt's end", mark, _kind("attempt_ended"))
    finally:
        if then:
            then()
    step = arena.wait_for_event(
        "a step of another attempt", mark, lambda e: e["kind"] == "step" and e["attempt"] > broken.number
    )
    noticed = arena.wait_for_event(notice, mark, _kind(notice))
    return Seen.between(injected_s, noticed, step, broken.last_step - (arena.attempt.resumed_from_step or 0))


def _kind(kind: str) -> Callable[[Event], bool]:
    return lambda event: event["kind"] == kind


def _name(event: Event) -> str:
    if event["kind"] == "checkpoint_rejected":
        return f"checkpoint rejected ({event['reason'].replace(event['path'] + '/', '')})"
    if event["kind"] == "corruption_suspected":
        return f"corruption (rank {' or '.join(map(str, event['ranks']))})"
    if event["kind"] == "straggler":
        return f"straggler (rank {event['rank']})"
    return str(event.get("cause") or event.get("what") or event["kind"]).replace("_", " ")


def _require_same(arena: Arena, attempt: int) -> None:
    if arena.attempt.number != attempt:
        raise NotRecovered(f"training was restarted (attempt {arena.attempt.number}), which was not necessary")


def _undriven(arena: Arena) -> bool:
    return driver_pid(arena.run) is None


def _killer(arena: Arena) -> Callable[[], object]:
    return lambda: arena.reach.rank(arena.job, signal.SIGKILL)


def _newest_checkpoint(arena: Arena) -> Path:
    """Return the newest checkpoint on the disk; the journal may not contain it yet."""
    return arena.run.checkpoint(max(steps_in(arena.run.checkpoints)))


def _flip_bit(process: Identity, head_width: int) -> None:
    """Flip a bit of the second row of the model's tables of cosines, which the layers read. Linux only.

    The first row has cosines of 0, in torchtitan's tables with sines, after each number or after all. The second one
    begins with the cosine of 1, whose last bits depend on the library.
    """
    one, zero = (re.escape(struct.pack("<f", number)) for number in (1.0, 0.0))
    rows = b"(?:%b(?:%b)?|%b)" % (one * head_width, zero * head_width, (one + zero) * (head_width // 2))
    table = re.compile(rows + rb"[\x3e-\x42]\x51(\x0a)\x3f")
    places, folder = list[int](), Path("/proc") / str(process.pid)
    try:
        with (folder / "mem").open("r+b", buffering=0) as memory:
            for area in (folder / "maps").read_text(encoding="utf-8").splitlines():
                addresses, access, _offset, _device, inode, *_name = area.split()
                start, stop = (int(address, 16) for address in addresses.split("-"))
                if access.startswith("rw") and inode == "0":
                    with suppress(OSError):  # some areas can't be read
                        memory.seek(start)
                        places += [start + match.start(1) for match in table.finditer(memory.read(stop - start))]
            for place in places:  # also copies that the process has freed
                memory.seek(place)
                memory.write(b"\x2a")
    except OSError as error:
        raise NotTried(f"the memory of a process can't be changed ({error.strerror})") from None
    if not places:
        raise NotTried("the model's tables of cosines were not found in the memory of a process")


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite a file in place, so that processes that have mapped it see the change."""
    with path.open("r+b") as file:
        file.write(content)


@contextmanager
def _slowed(process: Identity) -> Iterator[Callable[[], None]]:
    """Yield a function that slows a process down; after the block the process runs at full speed again."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_RUNS_S) and send(process, signal.SIGSTOP):
            over.wait(_PAUSES_S)
            send(process, signal.SIGCONT)

    thread = threading.Thread(target=work, name="slow", daemon=True)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.is_alive():
            thread.join()


def no_slowest_one(config: Config) -> str:
    """Return why no process can be found to be slow; empty if one can.

    See ``trainer.step.monitor.RankTimes``: what a process waits for within a step counts as its own work.
    """
    if config.cluster.jobs_run != "here":
        return "a process of another machine can't be slowed evenly from here"
    if config.world_size < 2:
        return "with one process there is no slowest one"
    if config.parallel.data_parallel == "fsdp":
        return "with parallel.data_parallel=fsdp only the speeds of devices are compared, which pauses don't change"
    if config.data_parallel_size < 2:
        return "in this layout all processes wait for the slow one within a step, so none is the slowest"
    return ""


def unchecked(config: Config) -> str:
    """Return why no check would find wrong numbers in memory that a drill can change; empty if one does."""
    if "recovery.corruption_check_steps" in config.backend.kind.ignores:
        return f"backend.name={config.backend.name} doesn't check for wrong numbers"
    if config.cluster.jobs_run != "here" or config.backend.device != "cpu" or not Path("/proc/self/mem").exists():
        return "only the memory of this machine's own processors can be changed, on Linux"
    parallel = config.parallel
    # Processes that exchange tokens with each other's experts are one replica (``trainer.torchtitan.process``).
    processes = parallel.tensor_parallel_size * parallel.context_parallel_size
    replicas = config.data_parallel_size * processes // max(parallel.expert_parallel_size, processes)
    return "" if replicas > 1 else "with one replica there is nothing to compare with"


def two_tiers(config: Config) -> str:
    """Return why a damaged checkpoint would not be read; empty if it is."""
    return "the copy in checkpoint.fast_dir would be read instead" if config.checkpoint.fast_dir else ""


def no_tracking(config: Config) -> str:
    """Return why MLflow's and Prefect's servers can't be killed; empty if they can."""
    return "" if config.tracking.enabled else "tracking.enabled=false"


def no_small_disk(config: Config) -> str:
    """Return why the run can't be put on a small disk; empty if it can."""
    if config.cluster.jobs_run != "here":
        return "the nodes of a cluster would not see the small disk, which is in this machine's memory"
    return small_disk.why_no_small_disk()


def no_scheduler(config: Config) -> str:
    """Return why nothing can be done to the run's jobs through a scheduler; empty if it can."""
    cluster = config.cluster
    return f"cluster.launcher={cluster.launcher} has no scheduler" if cluster.jobs_run == "here" else ""
