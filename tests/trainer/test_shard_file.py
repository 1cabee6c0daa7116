"""One shard: written in one pass, hashed, readable by safetensors and torch, and checked by its header."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hlatctl.run.files import describe
from trainer.chunks import Chunk
from trainer.shard_file import file_name, number_of, read_header, write_shard
from trainer.storage import read_tensors

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


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.9 itself, as it writes
def test_a_checkpoint_that_torch_wrote_is_read_without_an_index(tmp_path: Path) -> None:
    """Older releases wrote so."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    whole = {name: tensor.contiguous() for name, tensor in _TENSORS.items()}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        save(dict(whole), storage_writer=writer, no_dist=True)
    read = read_tensors(tmp_path, lambda name: name != "model.a")
    assert read.keys() == whole.keys() - {"model.a"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read.items())


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
