"""Processes of one machine that are forked with PyTorch imported, in torchrun's place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flows.recovery import failure_causes
from hlatctl.run import processes
from tests.trainer.conftest import Finish, Start
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def test_a_killed_process_ends_the_others_and_is_named(tmp_path: Path, start: Start, finish: Finish) -> None:
    launcher = start("tests.trainer.launched", os.fspath(tmp_path), processes=3, shares="tests.trainer.launched:share")
    wait_for(lambda: len(list(tmp_path.glob("*.json"))) == 3 or launcher.poll() is not None)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    ranks = processes.ranks(launcher.pid)
    assert {rank: process.pid for rank, process in ranks.items()} == {rank: own["pid"] for rank, own in enumerate(told)}
    for rank, own in enumerate(told):
        assert own["session"] == own["pid"], "a signal to the job's process group doesn't reach it"
        assert own["argv"] == [os.fspath(tmp_path)]
        assert own["imported"]
        assert own["SHARED_BY"] == str(launcher.pid)
        assert (own["LOCAL_RANK"], own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]) == (str(rank), "3", "3")

    (tmp_path / "go").touch()
    output = finish(launcher, 1)  # rank 2 ends when it is asked to
    assert failure_causes.has_killed_process(output)
    assert failure_causes.failed_host(output) == processes.node_name()
    assert output.index("rank      : 2") < output.index("Root Cause") < output.index("rank      : 1"), output
