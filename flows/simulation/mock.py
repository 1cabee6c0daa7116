"""The launcher of a dry run: jobs are scripts that run on a virtual clock.

What a job writes in the run directory has the form of the real files. The cluster is ``flows.simulation.world``.
"""

from __future__ import annotations

import os
from pathlib import Path

from conf.schema import Config
from flows.launch.base import Allocation, Handle, Job, Plan, Status
from flows.launch.local import LocalLauncher
from flows.simulation.process import Fault, Process
from flows.simulation.scripts import script_of
from flows.simulation.world import TRAIN, World, exit_file, hosts_of
from hlatctl.run.errors import LaunchError

_POLL_S = 0.5


class MockLauncher:
    """Simulates jobs instead of running them.

    Args:
        config: of the run.
        world: the simulated cluster; None: jobs can't be submitted.
    """

    name = "mock"
    weighs_jobs = False
    keeps_nodes = False

    def __init__(self, config: Config, world: World | None = None) -> None:
        self._config, self._world = config, world
        self._driver = world.driver if world else 0
        self._hosts = hosts_of(config)

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts of the simulated cluster."""
        return self._hosts

    def render(self, job: Job) -> Plan:
        """Return the text that the local launcher would submit."""
        return LocalLauncher().render(job)

    def handle(self, plan: Plan) -> Handle:
        """Return the job's launch folder and name."""
        return Handle(launcher=self.name, name=plan.job.name, launch_dir=os.fspath(plan.job.launch_dir))

    def submit(self, plan: Plan) -> Handle:
        """Start the simulated job.

        Raises:
            LaunchError: there is no simulated cluster.
        """
        if self._world is None:
            raise LaunchError(f"job {plan.job.name}: cluster.launcher=mock simulates jobs only inside a flow")
        handle = self.handle(plan)
        plan.script_path.parent.mkdir(parents=True, exist_ok=True)
        plan.script_path.write_text(plan.script, encoding="utf-8")
        for old in (exit_file(handle.launch_dir, handle.name), plan.job.error_file, plan.job.log):
            old.unlink(missing_ok=True)
        self._world.start(plan.job, script_of(self._world, plan.job))
        return handle

    def status(self, handle: Handle) -> Status:
        """Return running while it runs here; then the state by its exit code, or lost without one."""
        process = self._process(handle)
        if process and process.alive:
            return Status(state="running")
        try:
            code = int(exit_file(handle.launch_dir, handle.name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Status(state="lost")
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask training to stop, and end any job after ``grace_s``."""
        process, world = self._process(handle), self._world
        if not (process and process.alive and world) or self._driver != world.driver:  # a dead driver cancels nothing
            return
        if grace_s and handle.name == TRAIN:
            process.inject(Fault("stop"))
            deadline_s = world.clock.now_unix_s() + grace_s
            while process.alive and world.clock.now_unix_s() < deadline_s:
                world.clock.sleep(_POLL_S)
        process.kill()

    def allocation(self, job: Job) -> Allocation | None:
        """Return None: no nodes are kept."""
        return None

    def release(self, run_dir: Path) -> None:
        """Do nothing."""

    def dump_stacks(self, handle: Handle) -> str:
        """Do nothing: there are no processes."""
        return "a simulated job has no stacks"

    def oom_kills(self) -> int | None:
        """Return None: there is no kernel."""
        return None

    def _process(self, handle: Handle) -> Process | None:
        return self._world.process(handle.launch_dir, handle.name) if self._world else None
