"""Remote checkpoints over the S3 protocol: a real server on loopback, also one that dies during a copy."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("s3fs") is None or find_spec("moto") is None:
    pytest.skip("the extra s3 or moto is not installed", allow_module_level=True)

from hlatctl.cache import remote as layout
from hlatctl.cache.store import Objects
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import EventsOf, Finish, MakeRun, Start, TrainHere
from tests.trainer.s3_server import Server, make_bucket
from trainer.checkpoint import remote

pytestmark = pytest.mark.processes

_URL = "s3://bucket/runs"


def _steps(run: RunPaths) -> list[int]:
    return sorted(copy.step for copy in layout.complete_copies(layout.remote_folder(_URL, run.run_id)))


def test_two_ranks_copy_to_s3_and_one_process_continues_from_there(
    tmp_path: Path,
    s3_server: Server,
    make_run: MakeRun,
    start: Start,
    finish: Finish,
    train_here: TrainHere,
    events_of: EventsOf,
) -> None:
    checkpoint = {"every_steps": 8, "remote_url": _URL}
    run = make_run(tmp_path / "run", checkpoint=checkpoint, cluster={"processes_per_node": 2})
    finish(start("trainer", "--run-dir", os.fspath(run.root), "--attempt", "1", processes=2))
    assert _steps(run)[-1] == 24
    assert events_of(run, "checkpoint_uploaded")[-1]["step"] == 24
    shutil.rmtree(run.root)
    run = make_run(tmp_path / "run", checkpoint=checkpoint)
    assert train_here(run, 1) == 0
    assert events_of(run, "checkpoint_fetched")[0]["step"] == 24
    assert events_of(run, "train_started")[0]["resumed_from_step"] == 24


def test_a_server_that_dies_during_a_copy_delays_it(
    tmp_path: Path,
    s3_server: Server,
    make_run: MakeRun,
    train_here: TrainHere,
    events_of: EventsOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_FIRST_PAUSE_S", "_LAST_PAUSE_S"):
        monkeypatch.setattr(remote, name, 0.05)
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 24, "remote_url": _URL})
    put, alarm, tries = Objects.put, remote.Uploader._alarm, list[str]()

    def interrupted(self: Objects, source: Path, path: str, *more: Any) -> None:
        tries.append(path)
        if len(tries) == 3:
            assert _steps(run) == []
            assert len(layout.all_copies(self)) == 1
            s3_server.kill()
        put(self, source, path, *more)

    def repaired(self: remote.Uploader, why: str) -> None:
        alarm(self, why)
        s3_server.start()
        make_bucket()

    monkeypatch.setattr(Objects, "put", interrupted)
    monkeypatch.setattr(remote.Uploader, "_alarm", repaired)
    assert train_here(run, 1) == 0
    (event,) = events_of(run, "alarm")
    assert "Could not connect to the endpoint" in event["message"]
    assert _steps(run) == [24]
    assert layout.remote_folder(_URL, run.run_id).size(layout.CONFIG) == run.config.stat().st_size
