"""The mirror over the S3 protocol: a real server on loopback, also one that dies during a copy."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="the extra s3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")

from hlatctl.cache import mirror as layout
from hlatctl.cache.objects import Objects, connect
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, Finish, MakeRun, Start, TrainHere
from tests.waiting import wait_for
from trainer.checkpoint import mirror

pytestmark = pytest.mark.processes

_URL = "s3://bucket/runs"


class Server:
    """moto's S3 server. It keeps objects in memory, so a server that dies loses them."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.start()

    def start(self) -> None:
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._answers)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture(scope="module")
def any_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def server(any_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server with an empty bucket, which the environment names."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{any_server.port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    make_bucket()
    return any_server


def make_bucket() -> None:
    system, _ = connect(_URL)
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")


def _steps(run: RunPaths) -> list[int]:
    return sorted(copy.step for copy in layout.complete_copies(layout.mirror_of(_URL, run.run_id)))


def test_two_ranks_copy_to_s3_and_one_process_continues_from_there(
    tmp_path: Path,
    server: Server,
    make_run: MakeRun,
    start: Start,
    finish: Finish,
    train_here: TrainHere,
    events_of: EventsOf,
) -> None:
    checkpoint = {"every_steps": 8, "mirror_url": _URL}
    run = make_run(tmp_path / "run", checkpoint=checkpoint, cluster={"processes_per_node": 2})
    finish(start("trainer", "--run-dir", os.fspath(run.root), "--attempt", "1", processes=2))
    assert _steps(run)[-1] == 24
    assert events_of(run, "checkpoint_mirrored")[-1]["step"] == 24
    shutil.rmtree(run.root)
    run = make_run(tmp_path / "run", checkpoint=checkpoint)
    assert train_here(run, 1) == 0
    assert events_of(run, "checkpoint_fetched")[0]["step"] == 24
    assert events_of(run, "train_started")[0]["resumed_from_step"] == 24


def test_a_server_that_dies_during_a_copy_delays_it(
    tmp_path: Path,
    server: Server,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_FIRST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(mirror, name, 0.05)
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 24, "mirror_url": _URL})
    put, alarm, tries = Objects.put, mirror.Mirror._alarm, list[str]()

    def interrupted(self: Objects, source: Path, path: str, *more: Any) -> None:
        tries.append(path)
        if len(tries) == 3:
            assert _steps(run) == []
            assert len(layout.all_copies(self)) == 1
            server.kill()
        put(self, source, path, *more)

    def repaired(self: mirror.Mirror, why: str) -> None:
        alarm(self, why)
        server.start()
        make_bucket()

    monkeypatch.setattr(Objects, "put", interrupted)
    monkeypatch.setattr(mirror.Mirror, "_alarm", repaired)
    assert train_here(run, 1) == 0
    (event,) = events_of(run, "alarm")
    assert "Could not connect to the endpoint" in event["message"]
    assert _steps(run) == [24]
    assert layout.mirror_of(_URL, run.run_id).size(layout.CONFIG) == run.config.stat().st_size
