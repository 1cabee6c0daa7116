"""The list of all blocks of a checkpoint: made, read back, and checked for completeness."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run.errors import CheckpointError, StorageError
from trainer.shard_file import StoredChunk
from trainer.shard_index import INDEX, ShardIndex, compose, read_index


def _block(name: str, row: int, rows: int = 2) -> StoredChunk:
    return StoredChunk(name, "F32", [4, 3], 100, [row, 0], [rows, 3])


def test_it_is_read_back_and_only_the_wanted_lines_are_parsed() -> None:
    made = compose({"b": [_block("x", 2)], "a": [_block("x", 0), _block("y", 0, 4)]}, whole=True)
    spoiled = made.text.replace('["y","F32",', '["y",')
    (x,) = ShardIndex(spoiled).tensors("x".__eq__)
    assert (x.name, x.dtype, x.shape) == ("x", "F32", [4, 3])
    assert x.chunks == [("a", _block("x", 0)), ("b", _block("x", 2))]
    with pytest.raises(ValueError, match="a line is invalid"):
        list(ShardIndex(spoiled).tensors())


def test_rows_that_no_process_wrote_and_rows_written_twice_are_errors() -> None:
    with pytest.raises(StorageError, match="x: 6 of 12 elements were written by no process"):
        compose({"a": [_block("x", 0)]}, whole=True)
    with pytest.raises(StorageError, match="x: two processes wrote the same block"):
        compose({"a": [_block("x", 2)], "b": [_block("x", 2)]}, whole=True)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"files": [], "v": 2}', '{"files": 1, "v": 1}', '{"files": ["a/b"], "v": 1}']
)
def test_a_damaged_list_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"tensors\.jsonl: can't be read"):
        read_index(tmp_path)
