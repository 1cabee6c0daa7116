"""The Slurm launcher against a real Slurm: every end of a job is named, with the host to blame."""

from __future__ import annotations

import dataclasses
import os
import uuid
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, SlurmConfig
from flows.drill.arena import fill_disk
from flows.launch.base import Handle, Job
from flows.launch.endings import has_ended, token_file
from flows.launch.slurm.launcher import SlurmLauncher
from flows.runtime.jobs import job_error
from hlatctl.run import rank_output
from hlatctl.run.errors import LaunchError
from hlatctl.run.state import TRAIN_JOB
from tests.flows.launch.contract import SLEEPS, end_of, python_job, submit
from tests.slurm.lab import Lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

#: The last rank of four fails once all have printed. The others wait for it as in a collective.
RANK = """
import os, time
from pathlib import Path
from trainer.process import follow_launcher
follow_launcher()
print("at work", flush=True)
at_work = Path(__file__).with_name("at-work")
at_work.mkdir(exist_ok=True)
(at_work / os.environ["RANK"]).touch()
while os.environ["RANK"] != "3" or len(list(at_work.iterdir())) < 4:
    time.sleep(0.1)
raise ValueError("the reason")
"""
#: Ends when it is asked to stop, with the code of training that has saved a checkpoint.
SAVES = "import os, signal, time\nsignal.signal(15, lambda *_: os._exit(75))\nprint('started')\ntime.sleep(600)"
SHARE = "runs_dir must be on storage that all nodes share"


def cluster(**settings: object) -> ClusterConfig:
    return ClusterConfig(launcher="slurm", nodes=2, slurm=SlurmConfig(**settings))  # type: ignore[arg-type]


def job(folder: Path, code: str, *, nodes: int = 2) -> Job:
    return python_job(folder / f"run-{uuid.uuid4().hex[:6]}", code, nodes=nodes, PYTHONUNBUFFERED="1")


@pytest.fixture(scope="module")
def limited(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> tuple[SlurmLauncher, Handle]:
    """A job on the node apart, which lasts until its partition's limit; and its launcher."""
    launcher = SlurmLauncher(cluster(partition="apart", stop_before_limit_s=20))
    what = dataclasses.replace(job(tmp_path_factory.mktemp("limited"), SAVES, nodes=1), name=TRAIN_JOB)
    return launcher, submit(launcher, what)


@pytest.fixture
def launcher(lab: Lab, limited: tuple[SlurmLauncher, Handle]) -> SlurmLauncher:
    lab.wait_until_idle()
    return SlurmLauncher(cluster())


def runs(launcher: SlurmLauncher, handle: Handle, what: Job) -> None:
    """Wait until the job's command runs on all of its nodes."""
    wait_for(lambda: what.log.read_text().count("started") == what.nodes)
    wait_for(lambda: launcher.status(handle).state == "running")


def test_the_lines_of_a_rank_are_in_the_log_of_its_node_and_name_the_reason(
    launcher: SlurmLauncher, tmp_path: Path
) -> None:
    what = job(tmp_path, "")
    what.run_dir.mkdir()
    program = what.run_dir / "rank.py"
    program.write_text(RANK)
    what = dataclasses.replace(what, argv=(os.fspath(program),), each_node=False, processes_per_node=2)
    status = end_of(launcher, submit(launcher, what))
    of_second = rank_output.node_log(what.log, 1).read_text()
    assert "[rank2]: at work\n" in of_second
    assert "[rank0]: at work\n" in what.log.read_text()
    assert "[rank2]" not in what.log.read_text()
    assert status.blamed_hosts == status.hosts[1:]
    assert job_error(what, status).message.endswith("(ValueError: the reason)")
    assert {path.name for path in what.log_dir.iterdir()} == {"try.log", "try.node-1.log"}


def test_a_node_that_does_not_see_the_run_directory_is_blamed_and_says_so(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    what = job(tmp_path, SLEEPS, nodes=4)
    with lab.hidden(tmp_path, "n3"):
        status = end_of(launcher, submit(launcher, what))
    assert (status.state, status.verdict) == ("failed", "node_failed")
    assert "n3" in status.blamed_hosts
    line = next(line for line in what.log.read_text().splitlines() if line.startswith("StorageError: "))
    assert line.endswith("can't be written on n3 (No such file or directory); " + SHARE)
    assert "Traceback" not in what.log.read_text()


def test_a_job_that_no_node_is_free_for_or_that_is_suspended_waits_with_the_reason(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    first = job(tmp_path, SLEEPS, nodes=4)
    holding = submit(SlurmLauncher(cluster()), first)
    runs(launcher, holding, first)
    number = lab.command("squeue", "-h", "-p", "main", "-t", "RUNNING", "-o", "%i").stdout.strip()
    lab.command("scontrol", "suspend", number)
    wait_for(lambda: launcher.status(holding).reason == "suspended")
    assert launcher.status(holding).state == "queued"
    lab.command("scontrol", "resume", number)
    wait_for(lambda: launcher.status(holding).state == "running")
    waiting = submit(launcher, job(tmp_path, SLEEPS, nodes=4))
    wait_for(lambda: launcher.status(waiting).state == "queued")
    wait_for(lambda: launcher.status(waiting).reason in ("Resources", "Priority"))
    launcher.cancel(waiting, grace_s=1)
    assert launcher.status(waiting).ended
    launcher.cancel(holding, grace_s=0)
    assert launcher.status(holding).ended


def test_a_job_stops_by_itself_on_a_full_disk_and_stays_given_up(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    what = job(lab.disk, SAVES)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    ballast = lab.disk / "ballast"
    fill_disk(ballast)
    assert "No space left on device" in launcher.dump_stacks(handle)
    launcher.cancel(handle, grace_s=60)
    status = launcher.status(handle)
    given_up = token_file(what.launch_dir / what.name).read_text()
    ballast.unlink()
    assert (status.state, status.exit_code, status.verdict) == ("failed", 75, "")
    assert given_up.startswith("given up ")


def test_a_job_on_a_drained_node_goes_on(launcher: SlurmLauncher, lab: Lab, tmp_path: Path) -> None:
    what = job(tmp_path, SLEEPS)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    drained = launcher.status(handle).hosts[0]
    with lab.drained(drained):
        assert set(SlurmLauncher(cluster()).hosts(2)) == {*lab.nodes} - {drained}, "a node apart can't be a spare one"
        wait_for(lambda: lab.state_of(drained).startswith("drain"))
        assert SlurmLauncher(cluster()).status(handle).state == "running"
        launcher.cancel(handle, grace_s=0)


def test_a_job_that_was_given_up_does_nothing_if_it_is_submitted_late(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    what = job(tmp_path, "print('trains')")
    plan = launcher.render(what)
    handle = launcher.submit(plan)
    launcher.cancel(handle, grace_s=0)
    before = what.log.read_text()
    late = lab.command("sbatch", "--parsable", "--export=ALL,HLATCTL_TOKEN=old", os.fspath(plan.script_path))
    shown = ("squeue", "-h", "-t", "all", f"--jobs={late.stdout.strip()}", "-o", "%T")
    wait_for(lambda: lab.command(*shown).stdout.strip() == "COMPLETED")
    assert what.log.read_text() == before


def test_a_node_whose_slurmstepd_is_killed_ends_its_processes_and_is_blamed(
    launcher: SlurmLauncher, lab: Lab, tmp_path: Path
) -> None:
    """Slurm itself does not notice: the step runs on until the driver ends it, because no step of training follows."""
    what = job(tmp_path, SLEEPS)
    handle = submit(launcher, what)
    runs(launcher, handle, what)
    lost = launcher.status(handle).hosts[1]
    lab.kill_step(lost)
    wait_for(lambda: has_ended(what.launch_dir / what.name, 1))
    launcher.cancel(handle, grace_s=0)
    assert end_of(launcher, handle).blamed_hosts == (lost,)


def test_an_unknown_partition_is_refused_with_slurms_words(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="invalid partition"):
        submit(SlurmLauncher(cluster(partition="nowhere")), job(tmp_path, SLEEPS))


def test_a_job_stops_before_its_partitions_limit(limited: tuple[SlurmLauncher, Handle]) -> None:
    status = end_of(*limited)
    assert (status.verdict, status.exit_code) == ("time_limit", 75)
