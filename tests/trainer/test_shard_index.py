"""The list of all blocks of a checkpoint: made, read back, and checked for completeness."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([[0, 100, 0, 0, 2, 3]], "x: 6 elements are in no shard"),
        ([[0, 100, 0, 0, 4, 3], [0, 100, 0, 0, 4, 3]], "x: a block is listed twice"),
        ([[0, 100, 0, 0, 2, 3], [0, 124, 3, 0, 2, 3]], "x: a block lies outside of the tensor or of its file"),
        ([[0, -16, 0, 0, 4, 3]], "x: a block lies outside of the tensor or of its file"),
        ([[0, 100, 0, 0, 4, 3]], "x: ends at byte 148 of a, which is shorter"),
    ],
)
def test_a_list_that_would_load_wrong_values_is_found(chunks: list[list[int]], reason: str) -> None:
    text = '{"files": ["a"], "v": 1}\n' + json.dumps(["x", "F32", [4, 3], chunks]) + "\n"
    assert ShardIndex(text).why_incomplete({"a": 147}) == reason


@pytest.mark.parametrize("chunk", [[-1, 100, 0, 0, 4, 3], [1, 100, 0, 0, 4, 3], [0, 100, 0, 0, 4]])
def test_a_block_in_no_file_or_of_other_dimensions_is_damage(chunk: list[int]) -> None:
    text = '{"files": ["a"], "v": 1}\n' + json.dumps(["x", "F32", [4, 3], [chunk]]) + "\n"
    with pytest.raises(ValueError, match="a line is invalid"):
        list(ShardIndex(text).tensors())
