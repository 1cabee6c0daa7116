"""Which launcher a configuration names, and a flow's context with it: the one place that knows all of them."""

from __future__ import annotations

import conf.load
from conf.schema import Config
from flows.launch.base import Launcher
from flows.launch.local import LocalLauncher
from flows.runtime.context import FlowContext, World, is_mock
from flows.runtime.observer import Observer
from hlatctl.run.journal import FLOW_WRITER
from hlatctl.run.paths import RunPaths


def launcher_for(config: Config) -> Launcher:
    """The launcher that ``cluster.launcher`` names; a simulated one that plays no jobs, only describes them."""
    if is_mock(config):
        from flows.simulation.mock import MockLauncher

        return MockLauncher(config)
    if config.cluster.launcher == "slurm":
        from flows.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(config.cluster)
    return LocalLauncher()


def open_context(
    run: RunPaths,
    observer: Observer | None = None,
    *,
    config: Config | None = None,
    writer: str = FLOW_WRITER,
    heeds_stop: bool = True,
    world: World | None = None,
) -> FlowContext:
    """A flow's context on the cluster of its run's configuration.

    Args:
        run: the run directory.
        observer: whoever watches.
        config: in place of the run's own.
        writer: of the journal; a flow beside the one that drives the run has its own.
        heeds_stop: a request to stop the run ends this flow's jobs.
        world: of a simulation whose driver has died, to continue in; none: a new one.
    """
    config = config or conf.load.load(run.config)
    if world is None and is_mock(config):
        from flows.simulation.world import World as Simulated

        world = Simulated(run, config)
    launcher = world.launcher() if world else launcher_for(config)
    return FlowContext(run, config, launcher, observer, writer=writer, heeds_stop=heeds_stop, world=world)
