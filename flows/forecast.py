"""Many courses of one run, and what each came to: the flow as it is, without Prefect, MLflow and reports."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from conf.schema import Config
from flows import pretrain
from flows.runtime.clock import Clock
from hlatctl.report import timeline
from hlatctl.report.forecast import Simulation
from hlatctl.report.goodput import measure_goodput
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from hlatctl.run.scratch import private_folder

#: A thousand small files are made and deleted in a second: on a disk that takes longer than all the rest.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def variants(config: Config) -> dict[str, Config]:
    """The run as it is configured, and with one thing changed at a time."""
    every, rehearsal = config.checkpoint.every_steps, config.rehearsal

    def saving(steps: int) -> Config:
        return replace(config, checkpoint=replace(config.checkpoint, every_steps=steps))

    found = {"as configured": config}
    for steps in (max(1, every // 4), every * 4):
        found[f"checkpoint.every_steps={steps}"] = saving(steps)
    if config.cluster.nodes > 1:
        for spare in sorted({0, rehearsal.spare_nodes + 2} - {rehearsal.spare_nodes}):
            found[f"rehearsal.spare_nodes={spare}"] = replace(config, rehearsal=replace(rehearsal, spare_nodes=spare))
    slow_s = rehearsal.start_s * 4
    found[f"rehearsal.start_s={slow_s:g}"] = replace(config, rehearsal=replace(rehearsal, start_s=slow_s))
    found["recovery.enabled=false"] = replace(config, recovery=replace(config.recovery, enabled=False))
    return found


def play_all(config: Config, seeds: int, told: Callable[[str], None]) -> dict[str, list[Simulation]]:
    """Play every variant once for each of so many seeds, beginning with the configured one, on all cores.

    Args:
        config: of the run.
        seeds: how many.
        told: hears of each variant that begins.
    """
    numbers = range(config.rehearsal.seed, config.rehearsal.seed + seeds)
    workers = min(seeds, os.cpu_count() or 1)
    found: dict[str, list[Simulation]] = {}
    with ExitStack() as stack:
        spread: Callable[..., Iterable[Simulation]] = map
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            spread = stack.enter_context(ProcessPoolExecutor(workers, mp_context=spawn)).map
        for name, variant in variants(config).items():
            told(name)
            found[name] = list(spread(play, [variant] * seeds, numbers))
    return found


def play(config: Config, seed: int) -> Simulation:
    """Play one course, in a folder that is deleted after it."""
    with private_folder("forecast", within=_IN_MEMORY) as own:
        played = _bare(config, seed, os.fspath(own.path))
        run = pretrain.create(played, argv=[], run_id=f"seed-{seed}")
        message = ""
        try:
            pretrain.drive(run, caller_of=lambda ctx: _BareCaller(run, ctx.clock))
        except HlatctlError as error:
            message = error.message
        found = measure_goodput(read_events(run), played)
    return Simulation(
        seed=seed,
        message=message,
        wall_s=found.wall_s,
        uptime_fraction=found.uptime_fraction or 0.0,
        goodput_fraction=found.ettr_fraction or 0.0,
        lost_s=found.seconds.get(timeline.LOST, 0.0),
        failures=sum(found.checkpointing.failures.values()),
        cost_usd=found.cost_usd,
    )


def _bare(config: Config, seed: int, folder: str) -> Config:
    """The run as it is played: nothing is shown and no failure is staged, those that happen are drawn."""
    return replace(
        config,
        runs_dir=folder,
        cluster=replace(config.cluster, launcher="mock"),
        tracking=replace(config.tracking, enabled=False),
        rehearsal=replace(config.rehearsal, seed=seed, step_events=1, shows_recovery=False),
    )


class _BareCaller(pretrain.PlainCaller):
    """Leaves out the stages that are for people."""

    def __init__(self, run: RunPaths, clock: Clock) -> None:
        super().__init__(clock)
        self._run = run

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        """Call the stage, unless it is one of these."""
        if name == "provenance":
            files.write_json(self._run.provenance, {"simulated": True})
        elif name != "report":
            return stage()
        return None
