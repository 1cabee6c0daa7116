"""Creates the launcher that a configuration names, and a flow's context with it."""

from __future__ import annotations

from conf.of_run import of_run
from conf.schema import Config
from flows.launch.base import Launcher
from flows.launch.local import LocalLauncher
from flows.runtime.context import FlowContext, Simulation, is_simulated
from flows.runtime.driver import Observer
from hlatctl.run.journal import FLOW_WRITER
from hlatctl.run.paths import RunPaths


def launcher_for(config: Config) -> Launcher:
    """Return the launcher that ``cluster.launcher`` names. The simulated one only renders jobs."""
    if is_simulated(config):
        from flows.simulation.cluster import SimulatedLauncher

        return SimulatedLauncher(config)
    if config.cluster.launcher == "slurm":
        from flows.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(config.cluster)
    if config.cluster.launcher == "kubernetes":
        from flows.launch.kubernetes.launcher import KubernetesLauncher

        return KubernetesLauncher(config.cluster)
    return LocalLauncher()


def open_context(
    run: RunPaths,
    observer: Observer | None = None,
    *,
    config: Config | None = None,
    writer: str = FLOW_WRITER,
    heeds_stop: bool = True,
    simulation: Simulation | None = None,
) -> FlowContext:
    """Return a flow's context on the cluster of its configuration.

    Args:
        config: configuration to use instead of the run's.
        writer: writer of the journal; a flow that runs alongside the run's driver has its own.
        heeds_stop: a request to stop the run ends this flow's jobs.
        simulation: the simulated cluster of the previous driver; None: a new one if the run is simulated.
    """
    config = config or of_run(run)
    if simulation is None and is_simulated(config):
        from flows.simulation.cluster import SimulatedCluster
        from flows.simulation.jobs import SCRIPTS

        simulation = SimulatedCluster(run, config, SCRIPTS)
    launcher = simulation.launcher() if simulation else launcher_for(config)
    return FlowContext(run, config, launcher, observer, writer=writer, heeds_stop=heeds_stop, simulation=simulation)
