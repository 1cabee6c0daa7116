"""Training of two nodes in copies of the environment, each on its own disk, which the next attempt uses again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl import node
from hlatctl.cache.environment import Layout, pack
from hlatctl.run import files, processes
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import NODE_NAME_ENV
from tests.ports import free_port
from tests.trainer.conftest import ROOT, EventsOf, MakeRun
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the programs of processes from /proc"),
]
_NODES = ("a", "b")


@pytest.fixture
def environment(tmp_path: Path) -> Layout:
    """A real environment that is quickly packed: it has links to the installed packages, and this project's sources."""
    prefix, installed = tmp_path / "shared", Path(sysconfig.get_path("purelib"))
    venv.create(prefix, symlinks=True)
    layout = Layout(prefix=prefix, base=Path("/usr"), project=ROOT, library=installed.relative_to(sys.prefix))
    for package in installed.iterdir():
        if not package.name.startswith(("_", "pip")) and package.suffix != ".pth":
            (prefix / layout.library / package.name).symlink_to(package)
    return layout


class Job:
    """One attempt on two nodes of this machine; the nodes' own disks are folders that outlive it."""

    def __init__(self, run: RunPaths, attempt: int, record: dict[str, object], disks: Path) -> None:
        port = str(free_port())
        self.log = disks / f"train-{attempt}.log"
        self.nodes = [
            self._start(run, attempt, rank, record, disks, {node.MASTER_PORT_ENV: port}) for rank in range(len(_NODES))
        ]

    def _start(
        self, run: RunPaths, attempt: int, rank: int, record: dict[str, object], disks: Path, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        name, own = _NODES[rank], disks / _NODES[rank]
        place, base = disks / f"{name}.environment", disks / f"train-{attempt}"
        files.write_sealed_json(place, {**record, "folder": os.fspath(own)})
        env |= {
            node.NODES_ENV: str(len(_NODES)),
            node.NODE_RANK_ENV: str(rank),
            node.MASTER_ADDR_ENV: "127.0.0.1",
            node.INTERFACE_ENV: "lo",
            node.LOG_ENV: os.fspath(self.log),
            node.ENVIRONMENT_ENV: os.fspath(place),
            NODE_NAME_ENV: name,
            "OMP_NUM_THREADS": "1",
        }
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "trainer")
        words = (*torchrun, "--run-dir", os.fspath(run.root), "--attempt", str(attempt))
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "hlatctl.node", os.fspath(base), "--", sys.executable, *words],
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env,
                cwd=disks,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.log.parent.glob(f"{self.log.stem}*.log")))

    def ranks(self) -> dict[int, processes.Identity]:
        return {rank: process for one in self.nodes for rank, process in processes.ranks(one.pid).items()}

    def kill(self) -> None:
        """Kill both nodes, and wait until nothing of the job runs."""
        tokens = [files.read_json(path)["token"] for path in self.log.parent.glob(f"{self.log.stem}.*pid")]
        for one in self.nodes:
            one.send_signal(signal.SIGKILL)
            one.wait()
        wait_for(lambda: not [process for token in tokens for process in processes.of_job(token)])


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for one in (one for job in started for one in job.nodes):
        if one.poll() is None:
            one.send_signal(signal.SIGQUIT)
            one.wait()


def test_training_in_copies_of_the_environment_is_killed_and_continues_in_the_kept_copies(
    tmp_path: Path, make_run: MakeRun, environment: Layout, events_of: EventsOf, jobs: list[Job]
) -> None:
    run = make_run(
        tmp_path / "runs" / "staged",
        train={"tokens": 100_000 * 4 * 32, "global_batch_size": 4},
        checkpoint={"every_steps": 10},
        cluster={"nodes": 2, "processes_per_node": 1},
    )
    record, disks = pack(tmp_path / "archives", environment), tmp_path / "disks"
    disks.mkdir()
    copies = [disks / name / str(record["archive_sha256"])[:32] / "env" for name in _NODES]

    def journalled(kind: str) -> bool:
        assert not [one for one in jobs[-1].nodes if one.poll() is not None], jobs[-1].said()
        return bool(events_of(run, kind, len(jobs)))

    jobs.append(Job(run, 1, record, disks))
    wait_for(lambda: journalled("checkpoint_verified"))
    programs = {rank: Path(f"/proc/{process.pid}/cmdline").read_bytes() for rank, process in jobs[0].ranks().items()}
    assert {rank: program.split(b"\0")[0] for rank, program in programs.items()} == {
        rank: os.fsencode(copy / "bin" / "python") for rank, copy in enumerate(copies)
    }
    jobs[0].kill()
    made = [copy.stat().st_ino for copy in copies]

    jobs.append(Job(run, 2, record, disks))
    wait_for(lambda: journalled("step"))
    for one in jobs[1].nodes:
        one.send_signal(signal.SIGTERM)
    for one in jobs[1].nodes:
        one.wait()
    assert [event["reason"] for event in events_of(run, "train_stopped", 2)] == ["stop"], jobs[1].said()
    assert [jobs[1].said().count(f"{name}: environment on {disks / name}/") for name in _NODES] == [1, 1]
    assert [copy.stat().st_ino for copy in copies] == made
    (started,) = events_of(run, "train_started", 2)
    assert started["world"] == 2
    assert started["resumed_from_step"] >= 10
