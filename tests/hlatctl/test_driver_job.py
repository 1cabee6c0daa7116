"""The program of a driver's job, with Slurm's commands and `hlatctl resume` replaced by scripts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.launch.slurm.commands import slurm
from hlatctl import driver_job
from hlatctl.driver_job import DriverJob, main
from hlatctl.run.paths import RunPaths

pytestmark = pytest.mark.processes

#: Ends with the next number of `codes`, or waits for SIGTERM if it is `wait`.
DRIVER = """
import pathlib, signal, sys
folder = pathlib.Path({folder!r})
(folder / "started").open("a").write(" ".join(sys.argv[1:]) + "\\n")
codes = (folder / "codes").read_text().split()
(folder / "codes").write_text(" ".join(codes[1:]))
if codes[0] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    (folder / "waits").touch()
    signal.pause()
sys.exit(int(codes[0]))
"""


class Job:
    """A run whose driver ends with the given codes, and what the program of its job did."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.run = folder, RunPaths(folder / "runs" / "one")
        self.run.root.mkdir(parents=True)
        DriverJob(launcher="slurm", token="t").write(self.run.driver_job)

    def drives(self, codes: str) -> int:
        (self._folder / "codes").write_text(codes)
        return main([os.fspath(self.run.driver_job), "resume", "one", "--yes"])

    def lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    (tmp_path / "bin").mkdir()
    for name, answer in (("sbatch", "8"), ("scancel", "")):
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/sh\necho "$@" >>{tmp_path}/{name}\nenv | grep ^SLURM_ >{tmp_path}/env-{name}\necho {answer}\n'
        )
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "packages" / "hlatctl").mkdir(parents=True)
    (tmp_path / "packages" / "hlatctl" / "__init__.py").touch()
    (tmp_path / "packages" / "hlatctl" / "__main__.py").write_text(DRIVER.format(folder=os.fspath(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path / "packages"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HLATCTL_TOKEN", "t")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "4096")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setattr(driver_job, "_AGAIN_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    yield Job(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_driver_that_dies_starts_again_until_the_run_has_ended(job: Job) -> None:
    assert job.drives("137 18 0") == 0
    assert job.lines("started") == ["resume one --yes"] * 3
    assert job.lines("sbatch") == [
        f"--dependency=singleton --parsable --comment=t --export=ALL,HLATCTL_TOKEN=t {job.run.root}/driver-job.sh"
    ]
    assert job.lines("scancel") == ["8"], "nothing is left for the next job"
    assert not job.run.driver_job.exists()


@pytest.mark.parametrize(("codes", "starts"), [("10", 1), ("26", 1), ("1 " * 12, 10)])
def test_a_failure_that_repeats_ends_all_jobs(job: Job, codes: str, starts: int) -> None:
    assert job.drives(codes) == int(codes.split()[0])
    assert len(job.lines("started")) == starts
    assert (job.lines("scancel"), job.run.driver_job.exists()) == (["8"], False)


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGUSR1, False), (signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_job_that_must_end_leaves_the_run_to_the_next_unless_it_was_stopped(
    job: Job, number: signal.Signals, ends: bool, tmp_path: Path
) -> None:
    def signals() -> None:
        while not (tmp_path / "waits").exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=signals)
    thread.start()
    assert job.drives("wait") == (130 if ends else 0)
    thread.join()
    assert (job.lines("scancel"), job.run.driver_job.exists()) == (["8"] if ends else [], not ends)


@pytest.mark.parametrize(
    "change", [lambda place: place.unlink(), lambda place: DriverJob(launcher="slurm", token="u").write(place)]
)
def test_a_job_of_a_run_that_was_stopped_or_taken_over_does_nothing(job: Job, change: Callable[[Path], None]) -> None:
    change(job.run.driver_job)
    assert job.drives("0") == 0
    assert (job.lines("started"), job.lines("sbatch")) == ([], [])


def test_jobs_do_not_inherit_the_options_of_the_job_in_which_they_are_submitted(job: Job, tmp_path: Path) -> None:
    slurm("sbatch", "train.sh")
    assert job.lines("env-sbatch") == ["SLURM_CONF=/etc/slurm.conf"]
    (tmp_path / "env-sbatch").unlink()
    assert job.drives("0") == 0
    assert job.lines("env-sbatch") == ["SLURM_CONF=/etc/slurm.conf"]
