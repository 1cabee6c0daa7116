"""The Slurm launcher against a real Slurm: every end of a job is named, with the host to blame."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, SlurmConfig
from flows.launch.base import Handle, Job, Status
from flows.launch.slurm import script
from flows.launch.slurm.launcher import SlurmLauncher
from hlatctl.run.errors import DISK_FULL, LaunchError, StorageError
from tests.slurm.lab import Lab, wait_for

pytestmark = pytest.mark.processes

SLEEPS = "import time; print('started', flush=True); time.sleep(600)"


def cluster(**settings: object) -> ClusterConfig:
    return ClusterConfig(launcher="slurm", nodes=2, slurm=SlurmConfig(**settings))  # type: ignore[arg-type]


def job(folder: Path, code: str, *, nodes: int = 2) -> Job:
    place = folder / f"run-{uuid.uuid4().hex[:6]}"
    return Job(
        name="try",
        run_dir=place,
        argv=("-c", code),
        launch_dir=place / "launch",
        log_dir=place / "logs",
        each_node=True,
        nodes=nodes,
        env={"PYTHONUNBUFFERED": "1"},
    )


@pytest.fixture
def launcher(lab: Lab) -> SlurmLauncher:
    wait_for(lambda: all(lab.state_of(node) == "idle" for node in lab.nodes))
    return SlurmLauncher(cluster())


def submit(launcher: SlurmLauncher, what: Job) -> Handle:
    return launcher.submit(launcher.render(what))


def end_of(launcher: SlurmLauncher, handle: Handle) -> Status:
    wait_for(lambda: launcher.status(handle).ended)
    return launcher.status(handle)


def runs(launcher: SlurmLauncher, handle: Handle, what: Job) -> None:
    """Wait until the job's command runs on all of its nodes."""
    wait_for(lambda: what.log.read_text().count("started") == what.nodes)
    wait_for(lambda: launcher.status(handle).state == "running")


def test_a_job_runs_on_each_of_its_nodes_and_another_driver_finds_its_end(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    what = job(tmp_path, "import os; print('on', os.environ['HLATCTL_NODE_NAME'])")
    assert launcher.status(launcher.handle(launcher.render(what))).state == "lost"
    handle = submit(launcher, what)
    status = end_of(SlurmLauncher(cluster()), handle)
    assert (status.state, status.exit_code, len(status.hosts)) == ("succeeded", 0, 2)
    assert sorted(what.log.read_text().split("\n"))[1:] == [f"on {host}" for host in sorted(status.hosts)]
    launcher.cancel(handle, grace_s=1)
    assert launcher.status(handle) == status, "cancelling an ended job changes nothing"


def test_the_first_node_to_fail_is_blamed_with_its_code(launcher: SlurmLauncher, tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.environ['NODE_RANK'] == '1': sys.exit(17)\ntime.sleep(600)"
    status = end_of(launcher, submit(launcher, job(tmp_path, code)))
    assert (status.state, status.exit_code) == ("failed", 17)
    assert status.blamed_hosts == status.hosts[1:]


def test_a_job_that_no_node_is_free_for_is_queued_with_the_reason(launcher: SlurmLauncher, tmp_path: Path) -> None:
    first = job(tmp_path, SLEEPS, nodes=4)
    holding = submit(SlurmLauncher(cluster()), first)
    runs(launcher, holding, first)
    waiting = submit(launcher, job(tmp_path, SLEEPS, nodes=4))
    wait_for(lambda: launcher.status(waiting).state == "queued")
    wait_for(lambda: launcher.status(waiting).reason in ("Resources", "Priority"))
    launcher.cancel(waiting, grace_s=1)
    assert launcher.status(waiting).ended
    launcher.cancel(holding, grace_s=0)
    assert launcher.status(holding).ended


def test_a_stop_reaches_the_command_and_its_own_end_counts(launcher: SlurmLauncher, tmp_path: Path) -> None:
    code = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('started')\ntime.sleep(600)"
    what = job(tmp_path, code)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    launcher.cancel(handle, grace_s=60)
    assert launcher.status(handle).state == "succeeded"


def test_a_power_cut_blames_the_node_that_was_cut(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    what = job(tmp_path, SLEEPS)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    lab.cut("n2")
    status = end_of(launcher, handle)
    lab.boot("n2")
    assert (status.verdict, status.blamed_hosts) == ("node_failed", ("n2",))


def test_what_an_administrator_cancels_is_no_nodes_failure(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    what = job(tmp_path, SLEEPS)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    lab.command("scancel", f"--name={script.job_name(handle.launch_dir, handle.name)}")
    assert end_of(launcher, handle).verdict == "cancelled"


def test_nothing_is_concluded_while_the_scheduler_is_away(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    what = job(tmp_path, SLEEPS)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    lab.stop_controller()
    wait_for(lambda: launcher.status(handle).state == "unknown")
    lab.start_controller()
    wait_for(lambda: launcher.status(handle).state == "running")
    launcher.cancel(handle, grace_s=0)


def test_a_driver_that_dies_while_it_submits_leaves_a_job_that_the_next_one_finds(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    what = job(tmp_path, SLEEPS)
    driver = f"""
import os, pickle, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from flows.launch.slurm import launcher as module
from conf.schema import ClusterConfig
from flows.launch.base import Job
real = module.slurm
def dies(*words):
    answer = real(*words)
    if words[0] == "sbatch":
        os.kill(os.getpid(), 9)
    return answer
module.slurm = dies
place = Path({os.fspath(what.run_dir)!r})
launcher = module.SlurmLauncher(ClusterConfig(launcher="slurm"))
job = Job(name="try", run_dir=place, argv=("-c", {SLEEPS!r}), launch_dir=place / "launch", log_dir=place / "logs",
          each_node=True, nodes=2)
launcher.submit(launcher.render(job))
"""
    assert subprocess.run([sys.executable, "-c", driver], check=False).returncode == -signal.SIGKILL
    handle = launcher.handle(launcher.render(what))
    wait_for(lambda: launcher.status(handle).state == "running")
    launcher.cancel(handle, grace_s=0)
    assert launcher.status(handle).ended


def test_a_job_that_was_given_up_does_nothing_if_it_is_submitted_late(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    what = job(tmp_path, "print('trains')")
    plan = launcher.render(what)
    handle = launcher.submit(plan)
    launcher.cancel(handle, grace_s=0)
    before = what.log.read_text()
    late = lab.command("sbatch", "--wait", "--export=ALL,HLATCTL_TOKEN=old", os.fspath(plan.script_path))
    assert late.returncode == 0
    assert what.log.read_text() == before


def test_an_unknown_partition_is_refused_with_slurms_words(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="invalid partition"):
        submit(SlurmLauncher(cluster(partition="nowhere")), job(tmp_path, SLEEPS))


def test_a_full_disk_has_its_code_so_that_the_flow_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hlatctl.run.files.write_text", full)
    with pytest.raises(StorageError) as caught:
        submit(SlurmLauncher(cluster()), job(tmp_path, SLEEPS))
    assert caught.value.code == DISK_FULL
