"""Shards that are read back while they are written: what comes back, when, and what needs another reading."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from tests.trainer.conftest import EventsOf, TrainRun
from tests.trainer.rank_threads import on_ranks
from tests.waiting import wait_for
from trainer.checkpoint import trust
from trainer.checkpoint.shards import INDEX, compose, file_name, save_tensors
from trainer.checkpoint.together import Together
from trainer.checkpoint.trust import ReadBack, Verifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages of a file")
_PIECE = 4096


def test_pieces_come_back_before_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "PIECE_BYTES", _PIECE)
    came, pread = threading.Event(), os.pread

    def noted(descriptor: int, size: int, begin: int) -> bytes:
        if begin == _PIECE:
            came.set()
        return pread(descriptor, size, begin)

    monkeypatch.setattr(os, "pread", noted)
    path, content = tmp_path / "shard", os.urandom(2 * _PIECE + 100)
    reading = ReadBack(path)
    with path.open("wb", buffering=0) as file:
        file.write(content[: 2 * _PIECE])
        wait_for(came.is_set)
        file.write(content[2 * _PIECE :])
    reading.written()
    path.rename(tmp_path / "committed")
    assert reading.sha256() == hashlib.sha256(content).hexdigest()


def test_a_file_that_was_never_written_or_became_shorter_has_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ReadBack(tmp_path / "missing")
    missing.written()
    assert missing.sha256() is None
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    (tmp_path / "cut").write_bytes(b"values")
    cut = ReadBack(tmp_path / "cut")
    cut.written()
    assert cut.sha256() is None


@pytest.mark.parametrize("damaged", [False, True])
def test_a_shard_is_read_again_only_if_it_came_back_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    shard = save_tensors({"model.a": torch.randn(4, 2)}, folder)
    assert shard
    files.write_text(folder / INDEX, compose({file_name(1): shard.chunks}).text)
    write_manifest(folder, step=7, tokens=7, world={"world_size": 1})
    if damaged:
        with (folder / file_name(1)).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    hashed: list[str] = []
    sha256_file = files.sha256_file

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(files, "sha256_file", noted)
    reading = ReadBack(folder / file_name(1))
    reading.written()
    (reason,) = on_ranks(
        1,
        lambda backend: Verifier(backend, Together(backend, folder, lambda: 600.0)).why_invalid(
            folder, from_storage=True, read_back=reading
        ),
    )
    assert reason == (f"{file_name(1)}: checksum differs" if damaged else None)
    assert (file_name(1) in hashed) == damaged


def test_checkpoints_that_came_back_while_they_were_written_are_verified_without_another_reading(
    train_run: TrainRun, events_of: EventsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    sha256_file = files.sha256_file

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(files, "sha256_file", noted)
    run = train_run()
    assert [event["step"] for event in events_of(run, "checkpoint_verified")] == [8, 16, 24]
    assert "manifest.json" not in hashed
    assert "state.json" in hashed
    assert file_name(1) not in hashed
