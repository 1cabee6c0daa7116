"""Injects one fault after another into a real run, and compares it with an undisturbed run."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conf.registries import LAUNCHERS
from conf.schema import Config
from conf.training_rules import LOSS_TOLERANCE, NORM_TOLERANCE, relative_difference
from conf.validate import unsupported
from flows import pretrain
from flows.drill import arena as small_disk
from flows.drill.arena import Arena, NotRecovered, NotTried, Servers
from flows.drill.faults import Seen, prepare
from flows.drill.pool import FAULTS, Fault, why_not
from flows.runtime.driver import Signals
from hlatctl.report.build import build
from hlatctl.run.errors import ConfigError, LaunchError, suggest
from hlatctl.run.journal import DRILL_WRITER, Event, JournalWriter
from hlatctl.run.paths import RunPaths
from hlatctl.units import host_names

#: Names of the runs in a drill's folder.
DRILLED, UNDISTURBED, SMALL_DISK = "drilled", "undisturbed", "small-disk"
#: What a fault names that needs MLflow's and Prefect's servers.
_NEEDS_SERVERS = "flows.drill.faults:no_tracking"
#: Checkpoints that fit on a small disk in addition to those that the run keeps.
_SMALL_DISK_SPARE = 3
#: Room for the journal and the logs.
_SMALL_DISK_REST_BYTES = 16 << 20


@dataclasses.dataclass
class Trial:
    """One fault, from the step before it to the last step before the next one.

    Args:
        losses_equal: these steps have exactly the undisturbed run's losses and gradient norms.
        largest: largest relative difference of a loss from that run's; None: no step was compared.
    """

    fault: str
    arena: Arena
    first_step: int
    last_step: int = 0
    seen: Seen | None = None
    failure: str = ""
    skipped: str = ""
    losses_equal: bool | None = None
    largest: float | None = None


def new_folder(runs_dir: Path) -> Path:
    """Return a new runs folder for a drill, separate from all other runs, caches and databases."""
    return runs_dir / f"drill-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_names(faults: list[str]) -> None:
    """Check that all names are names of faults.

    Raises:
        ConfigError: one isn't.
    """
    for name in faults:
        if name not in FAULTS:
            raise ConfigError(
                f"--fault={name}: no such fault",
                hint=suggest(name, list(FAULTS), otherwise="`hlatctl drill --list` shows all"),
            )


def not_injected(config: Config, faults: Sequence[str]) -> dict[str, str]:
    """Return why some of the faults can't be injected, by their names.

    Raises:
        ConfigError: the configuration can't be drilled, or none of the faults can be injected.
    """
    for error in unsupported(config):
        raise error
    if not LAUNCHERS[config.cluster.launcher].drill:
        raise ConfigError(
            f"cluster.launcher={config.cluster.launcher}: a drill disturbs real processes",
            hint="hlatctl drill cluster=local, or cluster=slurm",
        )
    skipped = {name: why for name in faults if (why := why_not(name, config))}
    if skipped.keys() == set(faults):
        name, why = next(iter(skipped.items()))
        raise ConfigError(f"--fault={name}: can't be injected, {why}", hint="choose other faults with --fault")
    return skipped


def exercise(
    config: Config, folder: Path, faults: Sequence[str], *, argv: list[str], say: Callable[[str], None]
) -> RunPaths:
    """Drill a configuration and return the drilled run, whose journal and report have the outcome of every fault.

    Args:
        config: configuration of a run that is longer than the drill.
        folder: a runs folder for this drill.
        faults: names from ``FAULTS``, in any order.
        argv: the command line, recorded as provenance.
        say: called with messages about the progress.

    Raises:
        ConfigError: the configuration can't be drilled.
        HlatctlError: the drilled run did not start, or the undisturbed one failed.
    """
    skipped = not_injected(config, faults)
    if "flip_memory" in faults and "flip_memory" not in skipped:
        every = config.recovery.corruption_check_steps or 2 * config.checkpoint.every_steps
        recovery = dataclasses.replace(config.recovery, corruption_check_steps=every)
        config = dataclasses.replace(config, recovery=recovery)
    if any(FAULTS[name].inside for name in faults):
        env = {**config.backend.env, **prepare(folder)}
        config = dataclasses.replace(config, backend=dataclasses.replace(config.backend, env=env))
    servers = Servers(folder, say)
    tracking = dataclasses.replace(config.tracking, mlflow_uri=servers.mlflow_uri, mirrors=[])
    config = dataclasses.replace(config, runs_dir=str(folder), tracking=tracking)
    run = pretrain.create(config, argv=argv, run_id=DRILLED)
    with Signals().kept(), ExitStack() as stack:
        journal = stack.enter_context(JournalWriter(run, DRILL_WRITER))
        stack.callback(servers.stop)
        _Drill(config, argv, journal, servers, say).inject(run, faults, skipped)
    build(run)
    return run


@dataclasses.dataclass(frozen=True)
class _Drill:
    config: Config
    argv: list[str]
    journal: JournalWriter
    servers: Servers
    say: Callable[[str], None]

    def inject(self, run: RunPaths, faults: Sequence[str], skipped: dict[str, str]) -> None:
        if self.config.tracking.enabled and not self._start_servers():
            skipped |= {name: "the servers did not start" for name in faults if FAULTS[name].skip == _NEEDS_SERVERS}
        wanted = [name for name in FAULTS if name in faults and name not in skipped]
        if not wanted:
            raise LaunchError("no fault can be injected: MLflow's and Prefect's servers did not start")
        arena = Arena(run, self.journal)
        self.say(f"run {run.run_id} in {run.root}")
        with _running(arena):
            trials = [self._try(arena, name) for name in wanted if not FAULTS[name].small_disk]
        trials += [self._try_on_small_disk(name, arena) for name in wanted if FAULTS[name].small_disk]
        undisturbed = self._undisturbed(max(trial.last_step for trial in trials))
        compare(undisturbed.events, trials, exactly=self.config.backend.device == "cpu")
        _journal(self.journal, trials, skipped)

    def _start_servers(self) -> bool:
        """Start MLflow's and Prefect's servers and return whether they started. A drill continues without them."""
        try:
            self.servers.start()
        except LaunchError as error:
            self.servers.stop()
            self.say(f"{error.message}, {error.hint}; the drill continues without them")
            return False
        return True

    def _try_on_small_disk(self, fault: str, drilled: Arena) -> Trial:
        """Inject a fault into a separate run, on a disk with room for few more checkpoints than the run keeps."""
        sizes = [int(event["bytes"]) for event in drilled.events if event["kind"] == "checkpoint_written"]
        size_bytes = max(sizes) * (self.config.checkpoint.keep + _SMALL_DISK_SPARE) + _SMALL_DISK_REST_BYTES
        arena = Arena(pretrain.create(self.config, argv=self.argv, run_id=SMALL_DISK), self.journal)
        with small_disk.under_small_disk(arena.run.root, size_bytes), _running(arena):
            return self._try(arena, fault)

    def _undisturbed(self, steps: int) -> Arena:
        self.say(f"running the same {steps:,} steps undisturbed, for comparison")
        self.servers.stop()  # nothing reads what they would get of this run, which has their processor time instead
        alone = dataclasses.replace(self.config, tracking=dataclasses.replace(self.config.tracking, enabled=False))
        arena = Arena(pretrain.create(alone, argv=self.argv, run_id=UNDISTURBED), self.journal)
        with _running(arena):
            arena.wait_until(f"step {steps}", lambda: arena.state.step >= steps, patience_s=float("inf"))
        self.journal.append("drill_baseline", steps=steps, cold_start_s=arena.cold_start_s)
        return arena

    def _try(self, arena: Arena, name: str) -> Trial:
        """Inject one fault. A run that doesn't recover is resumed before the next fault, as a person would do."""
        trial = Trial(name, arena, arena.state.step)
        try:
            arena.under_way()
            trial.first_step = arena.state.step
            arena.trying, fault, mark = name, FAULTS[name], len(arena.events)
            trial.seen = FAULTS.part(name)(arena, self.servers, **fault.options)
            trial.failure = taken_for(fault, arena.events[mark:])
            arena.under_way()
            mistaken = f"; MISTAKEN: {trial.failure}" if trial.failure else ""
            self.say(f"{fault.title}: {describe(trial.seen)}{mistaken}")
        except NotTried as error:
            trial.skipped = str(error)
        except (NotRecovered, LaunchError) as error:
            trial.failure = error.message
            self.say(f"{FAULTS[name].title}: NOT RECOVERED: {error.message}")
            arena.revive()
        trial.last_step = arena.state.step
        return trial


def taken_for(fault: Fault, events: Sequence[Event]) -> str:
    """Return how the cause or the node that was found differs from the fault's; empty: it doesn't.

    Faults are planted in the last rank, so all nodes but the last one are healthy.
    """
    ends = [event for event in events if event["kind"] == "attempt_ended"]
    cause = fault.expects.cause
    if not cause or not ends:
        return ""
    end = next((end for end in ends if end["cause"] == cause), None)
    if end is None:
        return f"its cause is {cause}, and it was taken for {ends[0]['cause']} ({ends[0]['evidence']})"
    hosts = end.get("hosts") or []
    healthy = sorted(set(end.get("blamed_hosts") or []).intersection(hosts[:-1]))
    return f"{host_names(healthy)} was blamed, and the fault was on {hosts[-1]}" if healthy else ""


@contextmanager
def _running(arena: Arena) -> Iterator[None]:
    try:
        arena.start()
        yield
    finally:
        arena.stop()


def describe(seen: Seen) -> str:
    """Return what was observed, in a few words."""
    after = "training continued" if seen.recovered_s is None else f"recovered after {seen.recovered_s:.1f} s"
    lost = f", {seen.lost_steps} steps repeated" if seen.lost_steps else ""
    return f"{seen.detected_as} after {seen.detected_s:.1f} s, {after}{lost}"


def compare(undisturbed: Sequence[Event], trials: Sequence[Trial], *, exactly: bool) -> None:
    """Check that every step from a fault to the next one has the undisturbed run's numbers.

    An engine that journals few steps journals others of an attempt that began at another step: those are left out. A
    CPU computes them ``exactly``. Other devices add in an order that changes, as attention's backward pass does.
    Steps that a check for corruption has rejected are left out.
    """
    expected = {event["step"]: event for event in undisturbed if event["kind"] == "step"}
    for trial in trials:
        lost = trial.seen.lost_steps if trial.seen else 0
        window = range(trial.first_step - lost + 1, trial.last_step + 1)
        wrong = {event["attempt"] for event in trial.arena.events if event["kind"] == "corruption_suspected"}
        steps = [
            event
            for event in trial.arena.events
            if event["kind"] == "step"
            and event["step"] in window
            and not (event["step"] > trial.first_step and event["attempt"] in wrong)
        ]
        pairs = [(event, expected[event["step"]]) for event in steps if event["step"] in expected]
        loss, norm = (
            max((relative_difference(ours[key], theirs[key]) for ours, theirs in pairs), default=math.inf)
            for key in ("loss", "grad_norm")
        )
        trial.losses_equal, trial.largest = loss == norm == 0.0, loss if pairs else None
        holds = trial.losses_equal if exactly else loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
        if trial.seen and not holds:
            trial.failure = "its losses differ from the undisturbed run's"
            if not exactly:
                trial.failure += f" by more than rounding ({loss:.2g}, and {norm:.2g} of a gradient norm)"


def _journal(journal: JournalWriter, trials: list[Trial], skipped: dict[str, str]) -> None:
    for trial in trials:
        seen = dataclasses.asdict(trial.seen) if trial.seen else {}
        journal.append(
            "drill_outcome",
            fault=trial.fault,
            title=FAULTS[trial.fault].title,
            failure=trial.failure,
            skipped=trial.skipped,
            losses_equal=trial.losses_equal,
            largest=trial.largest,
            **seen,
        )
    for name, why in skipped.items():
        journal.append("drill_outcome", fault=name, title=FAULTS[name].title, failure="", skipped=why)
