"""Simulates a run many times, with the real flow but without Prefect, MLflow and reports."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from conf.schema import Config, SimulationConfig
from flows import pretrain
from flows.launch.base import launcher_for
from flows.runtime.driver import Clock
from hlatctl.report import goodput as measured
from hlatctl.report.forecast import Simulation, losses
from hlatctl.report.goodput import measure_goodput
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.files import private_folder
from hlatctl.run.fold import fold
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths

#: Shared memory, because creating and deleting a thousand small files a second on a disk would dominate the run time.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def with_stops(config: Config, settings: SimulationConfig, now_unix_s: float) -> SimulationConfig:
    """Return the settings of the simulated cluster with the time limit and the maintenance of the configured one.

    Only where the settings don't have their own.
    """
    stops = launcher_for(config).stops(config)
    if settings.time_limit_s is None and stops.after_s is not None:
        settings = replace(settings, time_limit_s=float(stops.after_s))
    if settings.maintenance_after_s is None and stops.maintenance_unix_s:
        begin_s, end_s = stops.maintenance_unix_s
        settings = replace(settings, maintenance_after_s=begin_s - now_unix_s, maintenance_s=end_s - begin_s)
    return settings


def variants(config: Config, settings: SimulationConfig) -> dict[str, tuple[Config, SimulationConfig]]:
    """Return the configured run on its simulated cluster, and variants by name; each variant changes one setting."""
    every, cluster = config.checkpoint.every_steps, config.cluster
    by_name = {"as configured": (config, settings)}
    for steps in (max(1, every // 4), every * 4):
        saving = replace(config, checkpoint=replace(config.checkpoint, every_steps=steps))
        by_name[f"checkpoint.every_steps={steps}"] = (saving, settings)
    if cluster.nodes > 1:
        group, now = ("cluster", cluster.spare_nodes) if cluster.spare_nodes else ("simulation", settings.spare_nodes)
        without = replace(config, cluster=replace(cluster, spare_nodes=0))
        for spare in sorted({0, now + 2} - {now}):
            by_name[f"{group}.spare_nodes={spare}"] = (without, replace(settings, spare_nodes=spare))
    slow_s = settings.start_s * 4
    by_name[f"simulation.start_s={slow_s:g}"] = (config, replace(settings, start_s=slow_s))
    by_name["recovery.enabled=false"] = (replace(config, recovery=replace(config.recovery, enabled=False)), settings)
    return by_name


def play_all(
    config: Config, settings: SimulationConfig, seeds: int, say: Callable[[str], None]
) -> dict[str, list[Simulation]]:
    """Simulate every variant once per seed, on all cores.

    Args:
        config: the run's configuration.
        settings: of the simulated cluster; its seed is the first seed.
        seeds: number of simulations per variant.
        say: called with the name of each variant before it is simulated.

    Returns:
        The simulations by variant, ordered by seed; the configured run comes first.
    """
    workers = min(seeds, os.cpu_count() or 1)
    played: dict[str, list[Simulation]] = {}
    with ExitStack() as stack:
        spread: Callable[..., Iterable[Simulation]] = map
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_end_with_parent)
            spread = stack.enter_context(pool).map
        for name, (variant, cluster) in variants(config, settings).items():
            say(name)
            seeded = [replace(cluster, seed=cluster.seed + number) for number in range(seeds)]
            played[name] = list(spread(play, [variant] * seeds, seeded))
    return played


def _end_with_parent() -> None:
    """End this worker process as soon as its parent is gone: a killed parent can't shut its pool down."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def play(config: Config, settings: SimulationConfig) -> Simulation:
    """Simulate a run once, in a folder that is deleted afterwards. Failures follow their rates; none is staged."""
    with private_folder("forecast", within=_IN_MEMORY) as own:
        played = _bare(config, os.fspath(own.path))
        bare = replace(settings, step_events=1, shows_recovery=False)
        run = pretrain.create(played, argv=[], run_id=f"seed-{settings.seed}", simulated=bare)
        message = ""
        try:
            pretrain.drive(run, caller_of=lambda ctx: _BareCaller(run, ctx.clock))
        except HlatctlError as error:
            message = error.message
        events = read_events(run)
        state = fold(events)
        goodput = measure_goodput(events, played, state)
    return Simulation(
        seed=settings.seed,
        message=message,
        wall_s=goodput.wall_s,
        uptime_fraction=goodput.uptime_fraction or 0.0,
        goodput_fraction=goodput.ettr_fraction or 0.0,
        lost_s=goodput.seconds.get(measured.LOST, 0.0),
        failures=sum(goodput.checkpointing.failures.values()),
        cost_usd=goodput.cost_usd,
        steps=state.step,
        seconds=goodput.seconds,
        losses=losses(state, goodput.seconds.get(measured.LOST, 0.0)),
    )


def _bare(config: Config, folder: str) -> Config:
    return replace(
        config,
        runs_dir=folder,
        cluster=replace(config.cluster, launcher="simulated"),
        tracking=replace(config.tracking, enabled=False),
    )


class _BareCaller(pretrain.PlainCaller):
    def __init__(self, run: RunPaths, clock: Clock) -> None:
        super().__init__(clock)
        self._run = run

    def call(self, name: str, stage: Callable[[], Any]) -> Any:
        if name == "provenance":
            files.write_json(self._run.provenance, {"simulated": True})
        elif name != "report":
            return stage()
        return None
