"""Shards of a checkpoint: which blocks a process writes, their files, the list of all blocks, and reading them back."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from hlatctl.run.errors import CheckpointError, StorageError
from hlatctl.run.files import describe
from trainer.checkpoint.shards import (
    INDEX,
    Chunk,
    ShardIndex,
    StoredChunk,
    chunks_of,
    chunks_to_write,
    compose,
    describe_tensors,
    file_name,
    load_tensors,
    number_of,
    read_header,
    read_index,
    read_tensors,
    save_tensors,
    save_whole,
    write_shard,
)


@dataclass
class _Mesh:
    sizes: tuple[int, ...]
    place: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]


@dataclass
class _Place:
    offsets: tuple[int, ...]


class _Distributed:
    """What the code uses of a DTensor, without a process group."""

    def __init__(self, part: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], mesh: _Mesh, *how: Any) -> None:
        self.part, self.shape, self.offsets, self.device_mesh, self.placements = part, shape, offsets, mesh, how

    def to_local(self) -> Tensor:
        return self.part

    def __create_chunk_list__(self) -> list[_Place]:
        return [_Place(self.offsets)]


def _tensors(tp: int, dp: int) -> dict[str, Any]:
    """The tensors of one of 2 x 4 processes: weights sliced over the first axis, norms of all, and one sharded."""
    mesh = _Mesh((2, 4), (tp, dp))
    tensors: dict[str, Any] = {
        f"w{n}": _Distributed(torch.ones(2, 3 + n), (4, 3 + n), (tp * 2, 0), mesh, Shard(0), Replicate())
        for n in range(12)
    }
    tensors |= {f"norm{n}": _Distributed(torch.ones(4), (4,), (0,), mesh, Replicate(), Replicate()) for n in range(8)}
    rows = torch.ones(1 if dp < 3 else 0, 5)  # 3 rows over 4 replicas
    return tensors | {"rows": _Distributed(rows, (3, 5), (min(dp, 3), 0), mesh, Replicate(), Shard(0))}


def test_every_block_is_written_by_exactly_one_process_and_the_work_is_shared() -> None:
    written: Counter[tuple[str, tuple[int, ...]]] = Counter()
    elements = []
    for tp in range(2):
        for dp in range(4):
            chunks = chunks_to_write(_tensors(tp, dp))
            written.update((name, chunk.offsets) for name, chunk in chunks.items())
            elements.append(sum(chunk.values.numel() for name, chunk in chunks.items() if name.startswith("w")))
    blocks: set[tuple[str, tuple[int, ...]]] = {(f"w{n}", (2 * tp, 0)) for n in range(12) for tp in range(2)}
    blocks |= {(f"norm{n}", (0,)) for n in range(8)} | {("rows", (row, 0)) for row in range(3)}
    assert written == dict.fromkeys(blocks, 1)
    assert max(elements) - min(elements) <= 2 * 14, "they differ by one block at most"


def test_a_process_reads_all_its_blocks_but_no_empty_ones() -> None:
    tensors = _tensors(1, 3)
    assert [chunk.offsets for chunk in chunks_of(tensors["w0"])] == [(2, 0)]
    assert chunks_of(tensors["rows"]) == []
    (whole,) = chunks_of(torch.zeros(2, 2))
    assert (whole.offsets, whole.shape) == ((0, 0), (2, 2))


_TENSORS = {
    "model.a": torch.arange(12.0).view(3, 4),
    "model.b": torch.arange(5.0).bfloat16(),
    "model.c": torch.tensor(3.0),
    "model.transposed": torch.arange(12.0).view(3, 4).t(),
}


def _chunks() -> dict[str, Chunk]:
    return {
        name: Chunk(values=tensor, offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))
        for name, tensor in _TENSORS.items()
    }


def test_the_hash_made_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / file_name(1), _chunks())
    assert shard.entry == describe(tmp_path, tmp_path / file_name(1))
    assert sorted(shard.chunks) == sorted(read_header(tmp_path / file_name(1)))


def test_safetensors_and_torch_read_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    chunk = Chunk(values=torch.ones(2, 3), offsets=(4, 0), shape=(8, 3))
    write_shard(tmp_path / file_name(1), {**_chunks(), "model.part": chunk})
    theirs = load_file(tmp_path / file_name(1))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in _TENSORS.items())
    described = HuggingFaceStorageReader(str(tmp_path)).read_metadata().state_dict_metadata
    (part,) = described["model.part"].chunks  # type: ignore[union-attr]
    assert (tuple(part.offsets), tuple(part.sizes)) == ((4, 0), (2, 3))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / file_name(1)).write_bytes(b"x")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / file_name(1), _chunks())


def _with_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (_entry(dtype="F33"), "its header is invalid"),
        (_entry(shape=[2]), "a: 4 bytes, expected 8"),
        (_entry(shape=[-1], offsets=[4, 0]), "a: -4 bytes"),
        (_entry(shape="x"), "its header is invalid"),
        (_entry(offsets=[4, 8]), "a begins at byte"),
        (_entry(offsets=[0]), "its header is invalid"),
        ([], "its tensors end at byte"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{}", "format": "pt"}}, "its tensors end at byte"),
        ({**_entry(), "__metadata__": {"DCP_SHARDING_INFO": '{"b": {"saved_offsets": [0]}}'}}, "its header is invalid"),
        (1, "its header is invalid"),
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tmp_path: Path, header: object, why: str) -> None:
    _with_header(tmp_path / "x", _entry(), b"1234")
    assert read_header(tmp_path / "x")[0].tensor == "a"
    _with_header(tmp_path / "x", header, b"1234")
    with pytest.raises(ValueError, match=why):
        read_header(tmp_path / "x")


@settings(max_examples=200, deadline=None)
@given(where=st.integers(0, 400), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_header_is_refused_or_read_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int, cut: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / file_name(1)
    path.unlink(missing_ok=True)
    write_shard(path, _chunks())
    content = bytearray(path.read_bytes())
    if cut:
        content = content[:where]
    else:
        content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        read_header(path)
    except ValueError:
        return
    assert not cut or where >= len(content)


def test_the_name_of_a_shard_has_its_number() -> None:
    assert file_name(17) == "shard-00017-model-00001-of-00001.safetensors"
    assert [number_of(name) for name in (file_name(17), file_name(123456), "state.json")] == [17, 123456, None]


def _block(name: str, row: int, rows: int = 2) -> StoredChunk:
    return StoredChunk(name, "F32", [4, 3], 100, [row, 0], [rows, 3])


def test_it_is_read_back_and_only_the_wanted_lines_are_parsed() -> None:
    made = compose({"b": [_block("x", 2)], "a": [_block("x", 0), _block("y", 0, 4)]})
    spoiled = made.text.replace('["y","F32",', '["y",')
    (x,) = ShardIndex(spoiled).tensors("x".__eq__)
    assert (x.name, x.dtype, x.shape) == ("x", "F32", [4, 3])
    assert x.chunks == [("a", _block("x", 0)), ("b", _block("x", 2))]
    with pytest.raises(ValueError, match="a line is invalid"):
        list(ShardIndex(spoiled).tensors())


def test_rows_that_no_process_wrote_and_rows_written_twice_are_errors() -> None:
    with pytest.raises(StorageError, match="x: 6 of 12 elements were written by no process"):
        compose({"a": [_block("x", 0)]})
    with pytest.raises(StorageError, match="x: two processes wrote the same block"):
        compose({"a": [_block("x", 2)], "b": [_block("x", 2)]})


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


def test_tensors_come_back_in_the_number_format_that_is_asked_for(tmp_path: Path) -> None:
    written = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3) + 0.25
    save_whole({"model.a": written, "model.b": torch.ones(2)}, tmp_path)
    described = describe_tensors(tmp_path)
    assert {name: (tuple(t.shape), t.dtype, t.is_meta) for name, t in described.items()} == {
        "model.a": ((2, 3), torch.bfloat16, True),
        "model.b": ((2,), torch.float32, True),
    }
    assert torch.equal(read_tensors(tmp_path, "model.a".__eq__)["model.a"], written)
    exact = torch.zeros(2, 3)
    load_tensors({"model.a": exact}, tmp_path)
    assert torch.equal(exact, written.float())


def test_folder_that_can_not_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/x: NotADirectoryError"):
        save_tensors({"model.a": torch.ones(2)}, tmp_path / "file" / "x")


def test_missing_tensor_and_other_shape_are_checkpoint_errors(tmp_path: Path) -> None:
    save_whole({"model.a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.b is missing"):
        load_tensors({"model.b": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.a has shape \(2,\), expected \(3,\)"):
        load_tensors({"model.a": torch.ones(3)}, tmp_path)
