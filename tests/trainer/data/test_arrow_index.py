"""Texts are found where they lie, and held-out documents are skipped without copying the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run.errors import DataError
from trainer.data.arrow_index import Indexed, TableWriter, TextFile, held_out_rows, index_file, load_table
from trainer.data.formats import fail, read_documents

_TEXTS = ["eins", None, "", "zwei äöü", " ", *(f"text number {i}" * i for i in range(20)), None]


def _write(path: Path, kind: pa.DataType, make: Callable[..., Any] = pa.ipc.new_file, **options: Any) -> Path:
    table = pa.table({"id": pa.array(range(len(_TEXTS))), "text": pa.array(_TEXTS, pa.string()).cast(kind)})
    with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=9)
    return path


def _open(path: Path, indexed: Indexed) -> TextFile:
    return TextFile(os.fspath(path), indexed.batches, size=indexed.size, mtime_ns=indexed.mtime_ns, report=fail)


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_text_of_each_row_is_read_in_any_order(tmp_path: Path, kind: pa.DataType, make: Callable[..., Any]) -> None:
    path = _write(tmp_path / "a.arrow", kind, make)
    indexed = index_file(path, "text", fail)
    assert indexed is not None
    assert (indexed.rows, len(indexed.batches)) == (26, 3)
    assert 0 <= indexed.text_bytes - sum(len((text or "").encode()) for text in _TEXTS) < 3 * 64
    file = _open(path, indexed)
    rows = [text or "" for _, text in read_documents(path, "text")]
    assert [file.text(row) for row in reversed(range(26))] == rows[::-1]


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_file_whose_text_is_not_there_as_it_is_must_be_converted(tmp_path: Path, make: Callable[..., Any]) -> None:
    assert index_file(_write(tmp_path / "a.arrow", pa.string(), make, compression="zstd"), "text", fail) is None
    assert index_file(_write(tmp_path / "b.arrow", pa.string_view(), make), "text", fail) is None


def test_fingerprint_depends_on_the_content_and_not_on_path_or_time(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.arrow", pa.string())
    copy = tmp_path / "b.arrow"
    copy.write_bytes(path.read_bytes())
    os.utime(copy, (1, 1))
    other = tmp_path / "c.arrow"
    other.write_bytes(path.read_bytes().replace(b"zwei", b"drei"))
    first, second, third = (index_file(p, "text", fail) for p in (path, copy, other))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.fingerprint == second.fingerprint != third.fingerprint


def test_held_out_rows_are_a_share_that_depends_on_the_file() -> None:
    rows = held_out_rows("00000000000000aa", 2_000_000, 0.02)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert 39_000 < len(rows) < 41_000
    assert not np.array_equal(rows, held_out_rows("00000000000000ab", 2_000_000, 0.02))
    assert len(held_out_rows("ffffffffffffffff", 1000, 0.0)) == 0
    assert np.array_equal(rows[rows < 5000], held_out_rows("00000000000000aa", 5000, 0.02))


@given(files=st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=8))
def test_positions_are_those_of_a_list_without_the_held_out_documents(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bool]]
) -> None:
    folder = tmp_path_factory.mktemp("table")
    writer = TableWriter(folder, "index")
    empty = np.empty(0, dtype=index_file.__globals__["BATCH"])
    for number, held in enumerate(files):
        indexed = Indexed(size=1, mtime_ns=2, rows=len(held), text_bytes=0, batches=empty, fingerprint="")
        writer.add(indexed, number, np.flatnonzero(held), checked=True)
    writer.close()
    described = writer.describe()
    paths = {
        kind: {**described[kind], "path": os.fspath(folder / described[kind]["path"])}
        for kind in ("files", "batches", "skips")
    }
    table = load_table({**described, **paths})
    everything = [(number, row, held) for number, rows in enumerate(files) for row, held in enumerate(rows)]
    training = [(number, row) for number, row, held in everything if not held]
    assert [table.find(table.document(position)) for position in range(len(training))] == training
    assert [table.find(int(d)) for d in table.held_out] == [(number, row) for number, row, held in everything if held]


def test_damaged_index_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.arrow", pa.string())
    indexed = index_file(path, "text", fail)
    assert indexed is not None
    writer = TableWriter(tmp_path, "index")
    writer.add(indexed, 0, np.array([2]), checked=True)
    writer.close()
    described = writer.describe()
    paths = {
        kind: {**described[kind], "path": os.fspath(tmp_path / described[kind]["path"])}
        for kind in ("files", "batches", "skips")
    }
    (tmp_path / "index-batches.bin").write_bytes(b"\0" * 7)
    with pytest.raises(DataError, match=r"index-batches\.bin: the index of the corpus is damaged"):
        load_table({**described, **paths})
