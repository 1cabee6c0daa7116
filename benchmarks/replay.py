"""Goodput of a real run with faults, and of a simulation of the same faults with times measured in another run.

Two runs train a small model on this machine, each for ``HLATCTL_BENCH_MINUTES`` (15) with its own random faults: killed
processes, stopped processes and pre-emptions. Each is then simulated with the faults of its own journal, and the times
of the other run. ``HLATCTL_BENCH_FOLDER`` names a folder in which such runs are kept, or found and not trained again.

With ``HLATCTL_BENCH_SLURM=1`` they train on two nodes of a Slurm on this machine (``tests.slurm.lab``). The faults are
then killed processes and cut nodes. Needs root and Slurm.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from conf import simulation
from conf.compose import compose
from conf.of_run import of_run
from conf.schema import Config, PastFailure, SimulationConfig
from conf.schema.simulation import FailureKind
from flows import pretrain
from flows.drill import faults
from flows.drill.arena import Arena, Servers
from flows.drill.pool import FAULTS
from hlatctl.report.goodput import Goodput, label, measure_goodput
from hlatctl.report.simulation_profile import profile
from hlatctl.run.errors import HlatctlError
from hlatctl.run.events import RECOVERY_PHASES
from hlatctl.run.fold import fold
from hlatctl.run.journal import DRILL_WRITER, Event, JournalWriter, read_events
from hlatctl.run.paths import RunPaths
from tests.e2e.conftest import LIMIT
from tests.slurm.lab import Lab, running, why_not

_MINUTES = float(os.environ.get("HLATCTL_BENCH_MINUTES", "15"))
_FOLDER = os.environ.get("HLATCTL_BENCH_FOLDER")
_GOAL_POINTS = 1.0
#: Simulations of a run, with the faults a part of a checkpoint interval later each time.
_SHIFTS = 8
#: Long steps against the time between two, and recoveries that the machine can make in a minute.
_OVERRIDES = (
    "experiment=drill tracking=none backend.compile=false recovery.hang_floor_s=20 cluster=local cluster.nodes=1 "
    "cluster.processes_per_node=2"
)
#: Nodes of the Slurm, one for each expected fault: one that was cut doesn't come back into a job of Slurm's, and one
#: whose process was killed is avoided while there are others.
_LAB_NODES = 32
_ON_SLURM = f"cluster=slurm cluster.nodes=2 cluster.processes_per_node=1 cluster.spare_nodes={_LAB_NODES - 2} {LIMIT}"
#: Seconds between two faults: at least, and on average in addition to that.
_LEAST_S, _MEAN_S = 20.0, 40.0
#: Faults with their weights, and what a simulation calls them.
_WEIGHTS = {"kill_process": 6, "stop_process": 2, "preempt": 2}
_WEIGHTS_ON_SLURM = {"kill_process": 6, "lost_node": 3}
_KINDS: dict[str, FailureKind] = {
    "kill_process": "process",
    "stop_process": "hang",
    "preempt": "upgrade",
    "lost_node": "node",
}


def run() -> None:
    """Print both goodputs of each run, and the seconds by category."""
    on_slurm = bool(os.environ.get("HLATCTL_BENCH_SLURM"))
    if on_slurm and (reason := why_not()):
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as temporary:
        folder = Path(_FOLDER or temporary).absolute()
        runs = [_trained(folder, name, seed, on_slurm) for seed, name in enumerate(("first", "second"), start=1)]
        for run_, other in (runs, runs[::-1]):
            _compare(run_, other, Path(temporary))


def _trained(folder: Path, name: str, seed: int, on_slurm: bool) -> RunPaths:
    run_ = RunPaths(folder / name)
    if run_.config.is_file():
        return run_
    with running(_LAB_NODES) if on_slurm else nullcontext() as lab:
        return _train(folder, name, seed, lab)


def _train(folder: Path, name: str, seed: int, lab: Lab | None) -> RunPaths:
    config = compose([*_OVERRIDES.split(), *(_ON_SLURM.split() if lab else ()), f"runs_dir={folder}"])
    run_ = pretrain.create(config, argv=[], run_id=name)
    with JournalWriter(run_, DRILL_WRITER) as journal:
        arena = Arena(run_, journal)
        try:
            arena.start()
            _break(arena, Servers(folder, print), random.Random(seed), lab)
        finally:
            arena.stop()
    return run_


def _break(arena: Arena, servers: Servers, numbers: random.Random, lab: Lab | None) -> None:
    weights = _WEIGHTS_ON_SLURM if lab else _WEIGHTS
    began_unix_s = arena.state.attempts[0].started_unix_s
    end_unix_s = began_unix_s + 60 * _MINUTES
    while (due_unix_s := time.time() + _LEAST_S + numbers.expovariate(1 / _MEAN_S)) < end_unix_s - _LEAST_S:
        time.sleep(due_unix_s - time.time())
        arena.under_way()
        fault = numbers.choices(list(weights), list(weights.values()))[0]
        arena.trying = fault
        if lab and fault == "lost_node":
            seen = faults.ended(arena, partial(lab.cut, arena.attempt.hosts[-1]))
        else:
            seen = FAULTS.part(fault)(arena, servers, **FAULTS[fault].options)
        print(
            f"  after {time.time() - began_unix_s:5.0f} s: {fault}, recovered after {seen.recovered_s:.1f} s, "
            f"load {os.getloadavg()[0]:.0f}",
            flush=True,
        )
        for host in lab.dark() if lab else ():
            if lab and lab.state_of(host).startswith("down"):  # Slurm knows of the cut
                lab.boot(host)
    time.sleep(max(0.0, end_unix_s - time.time()))


def _compare(run_: RunPaths, other: RunPaths, temporary: Path) -> None:
    config, events = of_run(run_), read_events(run_)
    began_unix_s = _training_began(events)
    end_unix_s = next(event["time_unix_s"] for event in events if event["kind"] == "stop_requested")
    faults = [event for event in events if event["kind"] == "fault_injected"]
    at_s = [event["time_unix_s"] - began_unix_s for event in faults]
    measured, wall_s = _settings(other), end_unix_s - began_unix_s
    period_s = config.checkpoint.every_steps * float(measured.step_s or 0.0)
    guesses = []
    for number in range(_SHIFTS):
        later_s = period_s * number / _SHIFTS  # where in the interval between two checkpoints a fault comes is chance
        history = [
            PastFailure(after_s=after_s + later_s, kind=_KINDS[event["fault"]], node=config.cluster.nodes - 1)
            for after_s, event in zip(at_s, faults, strict=True)
        ]
        simulated = _simulate(config, replace(measured, history=history), wall_s + period_s, temporary)
        guesses.append(_goodput(simulated, config, wall_s))
    real = _goodput(events, config, wall_s)
    print(f"{run_.run_id}: {len(faults)} faults in {wall_s / 60:.1f} min, simulated with times of {other.run_id}")
    shares = [100 * (guess.ettr_fraction or 0.0) for guess in guesses]
    mean, spread, share = statistics.mean(shares), statistics.stdev(shares), 100 * (real.ettr_fraction or 0.0)
    print(f"  goodput: real {share:.2f} %, simulated {mean:.2f} % (from {min(shares):.2f} to {max(shares):.2f})")
    print(f"  difference {abs(share - mean):.2f} points (goal {_GOAL_POINTS:g}), chance {spread:.2f}")
    for category in dict.fromkeys([*real.seconds, *guesses[0].seconds]):
        guess_s = statistics.mean(guess.seconds.get(category, 0.0) for guess in guesses)
        print(f"  {label(category):24} {real.seconds.get(category, 0.0):7.1f} s real {guess_s:7.1f} s simulated")
    _print_parts({"real": real.recoveries, "simulated": [each for guess in guesses for each in guess.recoveries]})


def _print_parts(recoveries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the mean parts of recoveries by cause."""
    for cause in sorted({str(each["cause"]) for found in recoveries.values() for each in found}):
        for name, found in recoveries.items():
            alike = [each for each in found if each["cause"] == cause]
            parts = [
                f"{part.removesuffix('_s')} {statistics.mean(float(each[part] or 0.0) for each in alike):.2f}"
                for part in RECOVERY_PHASES
                if alike
            ]
            print(f"  {cause:10} {name:9} {len(alike):3} times, s: {', '.join(parts)}", flush=True)


def _settings(run_: RunPaths) -> SimulationConfig:
    """Return what was measured in a run, as its profile has it."""
    events = read_events(run_)
    found: dict[str, Any] = profile(events, of_run(run_), fold(events))
    found.pop("failures")
    _, settings = simulation.split([f"simulation.{key}={value}" for key, value in found.items()])
    return replace(settings, step_events=None, shows_recovery=False, compile_s=0.0, warm_cache_s=0.0)


def _simulate(config: Config, settings: SimulationConfig, wall_s: float, folder: Path) -> list[Event]:
    """Return the journal of a simulation that is longer than the run."""
    steps = int(wall_s / (settings.step_s or 1.0)) + 1
    shorter = replace(
        config,
        runs_dir=os.fspath(folder / "simulated"),
        cluster=replace(config.cluster, launcher="simulated"),
        train=replace(config.train, max_steps=steps),
    )
    run_ = pretrain.create(shorter, argv=[], simulated=settings)
    try:
        pretrain.drive(run_, caller_of=lambda ctx: _NoReport(ctx.clock))
    except HlatctlError as error:
        print(f"  the simulation ended early: {error.message}")
    events = read_events(run_)
    shutil.rmtree(run_.root)
    return events


class _NoReport(pretrain.PlainCaller):
    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        return stage() if name != "report" else None


def _training_began(events: list[Event]) -> float:
    return float(next(event["time_unix_s"] for event in events if event["kind"] == "attempt_started"))


def _goodput(events: list[Event], config: Config, wall_s: float) -> Goodput:
    """Return the goodput of the first seconds of training."""
    until_unix_s = _training_began(events) + wall_s
    first = [event for event in events if event["time_unix_s"] <= until_unix_s]
    return measure_goodput(first, config, fold(first))


if __name__ == "__main__":
    run()
