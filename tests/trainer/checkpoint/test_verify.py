"""Verification by all ranks: each reads its share of the files, and one bad share is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hlatctl.run import files
from hlatctl.run.manifest import MANIFEST, read_manifest, write_manifest
from tests.trainer.rank_threads import on_ranks
from trainer.checkpoint.together import Together
from trainer.checkpoint.verify import Verifier, share
from trainer.shard_file import file_name
from trainer.shard_index import INDEX, compose
from trainer.storage import save_tensors

_RANKS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 7 by three ranks, each with a tensor of its own."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    shards = [save_tensors({f"model.{n}": torch.randn(4, 2)}, folder, number=n + 1) for n in range(_RANKS)]
    index = compose({shard.entry["path"]: shard.chunks for shard in shards if shard}, whole=True)
    files.write_text(folder / INDEX, index.text)
    files.write_json(folder / "state.json", {})
    write_manifest(folder, step=7, tokens=7, world={"world_size": _RANKS})
    return folder


def _reasons(folder: Path) -> list[Any]:
    def work(backend: Any) -> str | None:
        return Verifier(backend, Together(backend, folder, lambda: 600.0)).why_invalid(folder, from_storage=True)

    return on_ranks(_RANKS, work)


def test_every_file_is_in_one_share_and_a_rank_verifies_the_shard_that_it_wrote(folder: Path) -> None:
    entries = read_manifest(folder).files
    shares = [[entry["path"] for entry in share(entries, rank, _RANKS)] for rank in range(_RANKS)]
    assert shares[1:] == [[file_name(2)], [file_name(3)]]
    assert sorted(shares[0]) == sorted([file_name(1), INDEX, "state.json"])
    fewer = [entry["path"] for rank in range(2) for entry in share(entries, rank, 2)]
    assert sorted(fewer) == sorted(entry["path"] for entry in entries)


def test_a_complete_checkpoint_is_valid(folder: Path) -> None:
    assert _reasons(folder) == [None] * _RANKS


@pytest.mark.parametrize("name", [file_name(1), file_name(3), INDEX, "state.json"])
def test_a_changed_byte_in_any_share_is_a_reason_on_all_ranks(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert _reasons(folder) == [f"{name}: checksum differs"] * _RANKS


def _cut(folder: Path) -> str:
    (folder / file_name(2)).write_bytes((folder / file_name(2)).read_bytes()[:-4])
    return f"{file_name(2)}: its tensors end at byte"


def _lose_a_shard(folder: Path) -> str:
    (folder / file_name(2)).unlink()
    return f"model.1: ends at byte 224 of {file_name(2)}, which is shorter"


def _lose_rows(folder: Path) -> str:
    lines = (folder / INDEX).read_text().splitlines()
    lines[1] = lines[1].replace("[4,2],[[", "[5,2],[[")
    (folder / INDEX).write_text("\n".join(lines))
    return "model.0: 2 elements are in no shard"


def _spoil_json(folder: Path) -> str:
    (folder / "state.json").write_text("{")
    return "state.json: "


def _spoil_index(folder: Path) -> str:
    (folder / INDEX).write_text('{"files": ["../a"], "v": 1}\n')
    return f"{folder / INDEX}: can't be read (names a file outside"


@pytest.mark.parametrize("spoil", [_cut, _lose_a_shard, _lose_rows, _spoil_json, _spoil_index])
def test_a_manifest_with_right_hashes_does_not_make_useless_files_valid(
    folder: Path, spoil: Callable[[Path], str]
) -> None:
    """The hashes say that a file is as it was written, not that it was written well."""
    reason = spoil(folder)
    (folder / MANIFEST).unlink()
    write_manifest(folder, step=7, tokens=7, world={"world_size": _RANKS})
    for found in _reasons(folder):
        assert found is not None
        assert found.startswith(reason)


def test_a_checkpoint_without_manifest_is_invalid_on_all_ranks(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert _reasons(folder) == [f"{folder}: no manifest.json, so the checkpoint was never completed"] * _RANKS
