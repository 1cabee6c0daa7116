"""Megatron's files, against bytes that are put together here from its documented layout."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hlatctl.run.errors import DataError
from trainer.data import megatron
from trainer.data.megatron import TokenFile, Writer

_CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    *,
    dtype: str = "<u2",
    code: int | None = None,
    firsts: Sequence[int] | None = None,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
) -> Path:
    """Write a pair of files; by default, each sequence is a document."""
    firsts = range(len(sequences) + 1) if firsts is None else firsts
    size = np.dtype(dtype).itemsize
    lengths = [len(ids) for ids in sequences]
    positions = [size * sum(lengths[:i]) for i in range(len(lengths))]
    head = magic + struct.pack("<QBQQ", version, code or _CODES[dtype], len(lengths), len(firsts))
    tail = struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(firsts)}q", *lengths, *positions, *firsts)
    Path(f"{prefix}.idx").write_bytes(head + tail)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(ids, dtype=dtype).tobytes() for ids in sequences))
    return prefix


_SEQUENCES = [[1, 2, 3], [], [4], [5, 6]]


@pytest.mark.parametrize("dtype", _CODES)
def test_every_type_of_ids_is_read(tmp_path: Path, dtype: str) -> None:
    file = TokenFile(write(tmp_path / "c", _SEQUENCES, dtype=dtype))
    assert [file[i].tolist() for i in range(len(file))] == _SEQUENCES


def test_the_sequences_of_a_document_are_joined(tmp_path: Path) -> None:
    file = TokenFile(write(tmp_path / "c", _SEQUENCES, firsts=[0, 2, 2, 4]))
    assert [file[i].tolist() for i in range(len(file))] == [[1, 2, 3], [], [4, 5, 6]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(32_000, "<u2"), (128_256, "<i4")])
def test_written_files_have_megatrons_layout(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    with Writer(tmp_path / "a", megatron.dtype_for(vocab_size)) as writer:
        for ids in _SEQUENCES:
            writer.add(np.array(ids, dtype=np.int32))
        writer.finish()
    write(tmp_path / "b", _SEQUENCES, dtype=dtype)
    for end in ("idx", "bin"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


def test_an_unknown_header_is_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"magic": b"TNTIDX\0\0\0"}, "old unmapped format"),
        ({"magic": b"something"}, "not an index"),
        ({"version": 2}, "version 2 is unknown"),
        ({"code": 7}, "type 7 is not a type of token ids"),
    ):
        with pytest.raises(DataError, match=message):
            TokenFile(write(tmp_path / "c", _SEQUENCES, **change))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", _SEQUENCES)
    index, data = megatron.index_path(prefix), megatron.data_path(prefix)
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"has {len(whole) - 1} bytes, not {len(whole)}"):
        TokenFile(prefix)
    index.write_bytes(whole + bytes(len(_SEQUENCES)))
    with pytest.raises(DataError, match="modes of multimodal data"):
        TokenFile(prefix)
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a whole number of uint16 ids"):
        TokenFile(prefix)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DataError, match="document 4 lies outside"):
        TokenFile(prefix)[3]
    data.unlink()
    with pytest.raises(DataError, match="not readable"):
        TokenFile(prefix)


def test_a_corpus_without_tokens_can_be_opened(tmp_path: Path) -> None:
    assert TokenFile(write(tmp_path / "c", [[], []]))[1].tolist() == []
