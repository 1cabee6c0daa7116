"""A process that waits for jobs on a node, and the program of each job that has it fork the ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hlatctl import warm
from hlatctl.run import files, processes
from tests.waiting import wait_for

#: A rank that leaves what it is, and ends as it is told.
_RANK = """
import json, os, signal, sys
from pathlib import Path
from trainer.process import follow_launcher
follow_launcher()
place, end = Path(sys.argv[1]), sys.argv[2]
grandparent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
own = {"pid": os.getpid(), "waits": grandparent, "rank": os.environ["RANK"], "size": os.environ["WORLD_SIZE"]}
own |= {"job": os.environ["JOB"], "master": os.environ.get("MASTER_ADDR")}
own["sockets"] = [str(path) for path in Path("/proc/self/fd").iterdir() if path.is_socket()]
print("at work", flush=True)
place.with_suffix(".tmp").write_text(json.dumps(own))
place.with_suffix(".tmp").rename(place)
if end == "waits":
    signal.pause()
sys.exit(int(end))
"""


class _Node:
    """A node of an allocation, the programs of its jobs, and the process that waits there."""

    def __init__(self, folder: Path) -> None:
        files.write_text(folder / "modules" / "torch.py", "")  # importing PyTorch takes a second
        files.write_text(folder / "modules" / "ends.py", _RANK)
        root = Path(__file__).parents[2]
        self._folder = folder
        own = {"PYTHONPATH": f"{folder / 'modules'}:{root}", warm.WARM_ENV: os.fspath(folder)}
        self._env = {**os.environ, **own, processes.NODE_NAME_ENV: "n2"}

    def _launch(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "trainer.launch", "1", "--import=json", "-m", "ends", *words]

    def waits(self) -> subprocess.Popen[bytes]:
        """Start the process that waits for jobs."""
        return subprocess.Popen([sys.executable, "-m", "hlatctl.node", "--warm", "--", *self._launch()], env=self._env)

    def start(self, job: str, end: str, **env: str) -> subprocess.Popen[str]:
        """Start a job on the second of two nodes."""
        words = [sys.executable, "-m", "hlatctl.node", os.fspath(self._folder / job), "--"]
        places = {"NODE_RANK": "1", "HLATCTL_NODES": "2", "HLATCTL_MASTER_ADDR": "n1", "HLATCTL_MASTER_PORT": "1"}
        return subprocess.Popen(
            [*words, *self._launch(os.fspath(self._folder / f"{job}.json"), end)],
            env={**self._env, **places, "JOB": job, **env},
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: str, end: int, **env: str) -> tuple[bool, dict[str, Any]]:
        """Run a job; return whether its rank was forked by what waits, and what the rank was."""
        with self.start(job, str(end), **env) as program:
            output = program.communicate()[0]
        assert program.returncode == bool(end), output
        record = files.read_json(self._folder / f"{job}.node-1.exit_code")
        assert record["code"] == program.returncode
        assert "[rank1]: at work\n" in output
        rank = self.rank(job)
        assert (rank["rank"], rank["size"], rank["master"], rank["job"]) == ("1", "2", "n1", job)
        assert not rank["sockets"]
        assert processes.identify(rank["pid"]) is None
        return record["warm"], rank

    def rank(self, job: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self._folder / f"{job}.json").read_text())
        return value


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="abstract names of sockets")
def test_one_job_after_another_is_forked_by_what_waits_and_ends_with_its_own_program(tmp_path: Path) -> None:
    node = _Node(tmp_path)
    waits = node.waits()
    try:
        is_warm, rank = node.run("first", 0, HLATCTL_WARM_IS_NEW="1")
        assert (is_warm, rank["waits"]) == (True, waits.pid)
        is_warm, rank = node.run("fails", 3)
        assert (is_warm, rank["waits"]) == (True, waits.pid)

        with node.start("killed", "waits") as program:
            wait_for((tmp_path / "killed.json").exists)
            rank = node.rank("killed")
            os.kill(waits.pid, signal.SIGTERM)  # as a scheduler asks all processes of a job to stop
            program.kill()
        wait_for(lambda: processes.identify(rank["pid"]) is None)
        assert waits.wait() == -signal.SIGTERM, "it ends after the job"
        assert not node.run("cold", 0)[0]
    finally:
        waits.kill()
        waits.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="credentials of the other end")
def test_a_process_of_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert warm.of_same_user(ours) == os.getpid()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert warm.of_same_user(ours) is None
