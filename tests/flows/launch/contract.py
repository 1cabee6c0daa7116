"""What every launcher must do: the same tests for each, which a launcher's test file runs by a subclass."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.launch.base import Handle, Job, Launcher, Status
from hlatctl.node import record
from hlatctl.run.errors import DISK_FULL, StorageError
from tests.waiting import WAIT_S, wait_for

ENDS = "raise SystemExit({code})"
SLEEPS = "import time; print('started', flush=True); time.sleep(600)"
STOPS = (
    "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('started', flush=True)\ntime.sleep(600)"
)
DEAF = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('started', flush=True)\ntime.sleep(600)"
PRINTS_STACKS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
def wait_here():
    print("started", flush=True)
    time.sleep(600)
wait_here()
"""
#: One node fails once another one has written a record. The others wait.
FAILS = """
import os, sys, time
print("started", flush=True)
while os.environ["NODE_RANK"] != sys.argv[1] or not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
sys.exit(17)
"""
EVIL = "'; touch pwned; $(touch pwned) `touch pwned` \" \\ %j\nnext line"


def python_job(folder: Path, code: str, *, nodes: int = 1, **env: str) -> Job:
    """A job that runs Python code on each of its nodes."""
    return Job(
        name="try",
        run_dir=folder,
        argv=("-c", code),
        launch_dir=folder / "launch",
        log_dir=folder / "logs",
        env=env,
        each_node=nodes > 1,
        nodes=nodes,
    )


def fails(job: Job, node: int, *, after: tuple[str, int]) -> Job:
    """A job one of whose nodes fails with code 17 once another one has written a record."""
    kind, other = after
    path = record(job.launch_dir / job.name, kind, other)
    return dataclasses.replace(job, argv=("-c", FAILS, str(node), os.fspath(path)))


def submit(launcher: Launcher, job: Job) -> Handle:
    return launcher.submit(launcher.render(job))


def end_of(launcher: Launcher, handle: Handle) -> Status:
    wait_for(lambda: launcher.status(handle).ended)
    return launcher.status(handle)


class Contract:
    """What every launcher must do, also one that only simulates.

    A subclass says how to get a launcher and what its jobs run.
    """

    def launcher(self) -> Launcher:
        """A launcher as another process of this user would have."""
        raise NotImplementedError

    def job(self, folder: Path, code: str) -> Job:
        raise NotImplementedError

    def runs(self, handle: Handle, job: Job) -> None:
        """Wait until a job's command runs on all of its nodes."""
        wait_for(lambda: job.log.read_text().count("started") == job.nodes)
        wait_for(lambda: self.launcher().status(handle).state == "running")

    def test_a_job_is_found_by_its_handle_until_it_ends_and_again_when_it_is_repeated(self, tmp_path: Path) -> None:
        launcher, job = self.launcher(), self.job(tmp_path, ENDS.format(code=0))
        plan = launcher.render(job)
        assert not job.launch_dir.exists(), "rendering changes nothing"
        unknown = launcher.handle(plan)
        assert launcher.status(unknown) == Status(state="lost")
        launcher.cancel(unknown, grace_s=1)
        assert launcher.dump_stacks(unknown)
        assert launcher.status(unknown) == Status(state="lost"), "asking changes nothing"

        handle = Handle.from_json(launcher.submit(plan).to_json())
        assert handle == unknown
        assert plan.script_path.read_text() == plan.script
        status = end_of(self.launcher(), handle)
        assert (status.state, status.exit_code, status.verdict) == ("succeeded", 0, "")
        assert job.log.is_file()
        assert set(status.hosts) <= set(launcher.hosts(job.nodes))
        launcher.cancel(handle, grace_s=1)
        assert launcher.status(handle) == status, "cancelling an ended job changes nothing"

        again = submit(launcher, self.job(tmp_path, ENDS.format(code=17)))
        assert again == handle
        status = end_of(self.launcher(), handle)
        assert (status.state, status.exit_code) == ("failed", 17), f"the first job's end is not the second's: {status}"

    def test_a_job_that_is_ended_at_once_has_no_end_of_its_own(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, DEAF)
        handle = submit(self.launcher(), job)
        self.runs(handle, job)
        self.launcher().cancel(handle, grace_s=0)
        status = self.launcher().status(handle)
        assert status.ended
        assert status.state != "succeeded"


class ProcessContract(Contract):
    """What every launcher must do that starts processes."""

    def dies_while_it_submits(self) -> str:
        """Python code that makes ``launcher``, whose ``submit`` kills its process when the job is about to run."""
        raise NotImplementedError

    def test_a_stop_reaches_the_command_whose_own_end_counts(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, STOPS)
        handle = submit(self.launcher(), job)
        self.runs(handle, job)
        self.launcher().cancel(handle, grace_s=WAIT_S)
        assert self.launcher().status(handle).state == "succeeded"

    def test_a_job_outlives_the_driver_that_died_while_it_submitted_it(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, SLEEPS)
        driver = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path, PosixPath
from flows.launch.base import Job
{self.dies_while_it_submits()}
job = {job!r}
launcher.submit(launcher.render(job))
os.kill(os.getpid(), 9)
"""
        died = subprocess.run([sys.executable, "-c", driver], check=False, capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        handle = self.launcher().handle(self.launcher().render(job))
        self.runs(handle, job)
        self.launcher().cancel(handle, grace_s=0)
        assert self.launcher().status(handle).ended

    def test_processes_print_their_stacks_and_continue(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, PRINTS_STACKS)
        handle = submit(self.launcher(), job)
        self.runs(handle, job)
        assert "asked to" in self.launcher().dump_stacks(handle)
        wait_for(lambda: job.log.read_text().count("in wait_here") == job.nodes)
        assert self.launcher().status(handle).state == "running"
        self.launcher().cancel(handle, grace_s=0)

    def test_values_never_become_syntax_of_a_shell_or_of_the_scheduler(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        code = "import os, sys; print(os.environ['EVIL'] == sys.argv[1])"
        job = self.job(tmp_path / "a $(touch pwned)'\"%j#`b`|c", code)
        job = dataclasses.replace(job, argv=(*job.argv, EVIL), env={**job.env, "EVIL": EVIL})
        handle = submit(self.launcher(), job)
        assert end_of(self.launcher(), handle).state == "succeeded"
        assert job.log.read_text() == "True\n" * job.nodes
        assert not list(tmp_path.rglob("pwned"))
        self.launcher().cancel(handle, grace_s=0)
        assert self.launcher().status(handle).state == "succeeded"

    def test_a_full_disk_has_its_code_so_that_the_flow_waits_for_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("hlatctl.run.files.write_text", full)
        with pytest.raises(StorageError) as caught:
            submit(self.launcher(), self.job(tmp_path, SLEEPS))
        assert caught.value.code == DISK_FULL


class ClusterContract(ProcessContract):
    """What every launcher must do whose jobs run on nodes of a scheduler. Its jobs have two nodes."""

    def cancel_from_outside(self, handle: Handle) -> None:
        """Cancel a job as an administrator does."""
        raise NotImplementedError

    def test_the_node_that_fails_first_is_blamed_with_its_code(self, tmp_path: Path) -> None:
        job = fails(self.job(tmp_path, ""), 1, after=("pid", 0))
        status = end_of(self.launcher(), submit(self.launcher(), job))
        assert (status.state, status.exit_code, status.verdict) == ("failed", 17, "")
        assert len(status.hosts) == 2
        assert status.blamed_hosts == status.hosts[1:]

    def test_a_job_that_is_cancelled_from_outside_is_no_nodes_failure(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, SLEEPS)
        handle = submit(self.launcher(), job)
        self.runs(handle, job)
        self.cancel_from_outside(handle)
        status = end_of(self.launcher(), handle)
        assert (status.verdict, status.blamed_hosts) == ("cancelled", ())
