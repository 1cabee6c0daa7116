"""Many courses of one run, and what each came to: the flow as it is, without Prefect, MLflow and reports."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from conf.schema import Config
from flows import pretrain
from flows.clock import Clock
from hlatctl.report import timeline
from hlatctl.report.ledger import ledger
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths

#: A thousand small files are made and deleted in a second: on a disk that takes longer than all the rest.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True, kw_only=True)
class Course:
    """What one course of a run came to.

    Args:
        seed: it was drawn with.
        finished: it reached its last step; if not, ``message`` says why.
        wall_s: from the run's creation to its end.
        uptime_fraction, goodput_fraction: as `hlatctl goodput` has them.
        lost_s: steps that had to be done again.
        failures: attempts that ended without a last checkpoint.
    """

    seed: int
    finished: bool
    message: str
    wall_s: float
    uptime_fraction: float
    goodput_fraction: float
    lost_s: float
    failures: int
    cost_usd: float | None


def courses(config: Config, seeds: Sequence[int]) -> list[Course]:
    """Play a run once for each seed, on all cores."""
    workers = min(len(seeds), os.cpu_count() or 1)
    if workers <= 1:
        return [play(config, seed) for seed in seeds]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(play, [config] * len(seeds), seeds))


def play(config: Config, seed: int) -> Course:
    """Play one course, in a folder that is deleted after it."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-forecast-", dir=_IN_MEMORY) as folder:
        played = _bare(config, seed, folder)
        run = pretrain.create(played, argv=[], run_id=f"seed-{seed}")
        message = ""
        try:
            pretrain.drive(run, caller_of=lambda ctx: _BareCaller(run, ctx.clock))
        except HlatctlError as error:
            message = error.message
        found = ledger(read_events(run), played)
    return Course(
        seed=seed, finished=not message, message=message, wall_s=found.wall_s,
        uptime_fraction=found.uptime_fraction or 0.0, goodput_fraction=found.ettr_fraction or 0.0,
        lost_s=found.seconds.get(timeline.LOST, 0.0), failures=sum(found.checkpointing.failures.values()),
        cost_usd=found.cost_usd,
    )  # fmt: skip


def _bare(config: Config, seed: int, folder: str) -> Config:
    """The run as it is played: nothing is shown and no failure is staged, those that happen are drawn."""
    return replace(
        config, runs_dir=folder, cluster=replace(config.cluster, launcher="mock"),
        tracking=replace(config.tracking, enabled=False),
        rehearsal=replace(config.rehearsal, seed=seed, step_events=1, shows_recovery=False),
    )  # fmt: skip


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
