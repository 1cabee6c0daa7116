"""Copies of checkpoints from a node's own disk to the run directory: who copies what, and what a failure leaves."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from hlatctl.run.checkpoint import MANIFEST, why_invalid, write_manifest
from hlatctl.run.errors import StorageError
from tests.trainer.conftest import MakeRun
from tests.trainer.rank_threads import on_ranks
from tests.waiting import WAIT_S
from trainer.checkpoint.shards import file_name
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import Tiers
from trainer.checkpoint.writer import copy_to_shared

_RANKS = 3


@pytest.fixture
def tiers(tmp_path: Path, make_run: MakeRun) -> Tiers:
    """Folders with a checkpoint of step 7 on the node's own disk."""
    run = make_run(tmp_path / "run", checkpoint={"fast_dir": os.fspath(tmp_path / "nvme")})
    tiers = Tiers(load(run.config), run)
    assert tiers.fast
    fast = tiers.fast / "step-00000007"
    fast.mkdir(parents=True)
    for number in range(_RANKS):
        (fast / file_name(number + 1)).write_bytes(bytes([number]) * 1000)
    (fast / "state.json").write_text("{}\n")
    write_manifest(fast, step=7, tokens=7, world={"world_size": _RANKS})
    return tiers


def _copy(tiers: Tiers) -> list[Any]:
    return on_ranks(
        _RANKS, lambda backend: copy_to_shared(7, tiers, backend, Together(backend, tiers.shared, lambda: 600.0))
    )


def test_each_rank_copies_the_shard_that_it_wrote(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[list[str]] = []
    together, copy = threading.Barrier(_RANKS), Tiers.copy

    def noted(self: Tiers, step: int, names: list[str]) -> None:
        if MANIFEST not in names:
            copied.append(sorted(names))
            together.wait(timeout=WAIT_S)  # all copy at the same time
        copy(self, step, names)

    monkeypatch.setattr(Tiers, "copy", noted)
    assert _copy(tiers) == [tiers.shared / "step-00000007"] * _RANKS
    assert sorted(copied) == [[file_name(1), "state.json"], [file_name(2)], [file_name(3)]]
    assert why_invalid(tiers.shared / "step-00000007") is None
    assert [path.name for path in tiers.shared.iterdir()] == ["step-00000007"]


def test_a_share_that_cannot_be_copied_is_an_error_on_all_ranks_and_leaves_nothing(tiers: Tiers) -> None:
    assert tiers.fast
    (tiers.fast / "step-00000007" / file_name(3)).unlink()
    failures = _copy(tiers)
    assert [type(failure) for failure in failures] == [StorageError] * _RANKS
    assert all("rank 2: FileNotFoundError" in str(failure) for failure in failures)
    assert list(tiers.shared.iterdir()) == []
