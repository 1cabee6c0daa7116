from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hlatctl.run.errors import DataError
from trainer.data import formats
from trainer.data.formats import TextRow

_TEXTS = ["first\r\nlines", "zwölf 東京 🤖", "third"]
_TABLE = pa.table({"id": [1, 2, 3], "text": _TEXTS})
_LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(_TEXTS)).encode()


def _arrow(path: Path, make: Callable[..., pa.RecordBatchWriter]) -> None:
    with make(str(path), _TABLE.schema) as writer:
        writer.write_table(_TABLE, max_chunksize=2)


_WRITE: dict[str, Callable[[Path], object]] = {
    "file.arrow": lambda path: _arrow(path, pa.ipc.new_file),
    "stream.arrow": lambda path: _arrow(path, pa.ipc.new_stream),
    "a.parquet": lambda path: pq.write_table(_TABLE, path),
    "a.jsonl": lambda path: path.write_bytes(_LINES),
    "a.json": lambda path: path.write_bytes(_LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(_LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(_LINES[:20]) + zstandard.compress(_LINES[20:])),
}


@pytest.mark.parametrize("name", _WRITE)
def test_every_format_gives_its_documents_in_order(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _WRITE[name](path)
    assert formats.find_files(tmp_path) == [path]
    formats.check_file(path, "text")
    assert list(formats.read_documents(path, "text")) == list(enumerate(_TEXTS, start=1))


def test_plain_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    content = "".join(f"line {i} of a longer text, äöü\r\n" for i in range(6000))
    path.write_bytes(content.encode())
    rows = list(formats.read_documents(path, "text"))
    assert [row for row, _ in rows] == [1, 2, 3, 4]
    parts = [part or "" for _, part in rows]
    assert "".join(parts) == content
    assert len(parts) == 4
    assert all(part.endswith("\n") for part in parts)
    assert all(len(part.encode()) < formats.TEXT_DOCUMENT_BYTES + 100 for part in parts)


def test_null_is_a_row_without_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n\n{"text": "x"}\n')
    assert list(formats.read_documents(path, "text")) == [(1, None), (3, "x")], "rows are lines of the file"


@pytest.mark.parametrize("name", ["file.arrow", "stream.arrow", "a.parquet", "a.jsonl"])
def test_missing_column_is_named_with_the_existing_ones(tmp_path: Path, name: str) -> None:
    _WRITE[name](tmp_path / name)
    with pytest.raises(DataError, match=r"data.text_column='body' is not there; it has: id, text") as caught:
        formats.check_file(tmp_path / name, "body")
    assert caught.value.hint == "set data.text_column to one of them"


def test_column_that_is_not_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(_TABLE, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'id' is int64, must be text"):
        formats.check_file(tmp_path / "a.parquet", "id")


def test_paths_without_readable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*absent: no such file or folder"):
        formats.find_files(tmp_path / "absent")
    with pytest.raises(DataError, match="the folder is empty"):
        formats.find_files(tmp_path)
    (tmp_path / "notes.doc").write_text("x")
    with pytest.raises(DataError, match=r"none of its 1 files has a known format \(notes\.doc, …\)") as caught:
        formats.find_files(tmp_path)
    assert ".parquet" in caught.value.hint
    with pytest.raises(DataError, match=r"notes\.doc: unknown format"):
        formats.find_files(tmp_path / "notes.doc")


@pytest.mark.parametrize("name", [name for name in _WRITE if name not in ("a.jsonl", "a.json")])
def test_truncated_file_is_a_data_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _WRITE[name](path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=rf"{name}: truncated or damaged|{name}:\d+: not a JSON value"):
        list(formats.read_documents(path, "text"))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"a\.parquet: the file is empty"):
        formats.check_file(tmp_path / "a.parquet", "text")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"a\.jsonl:2: not a JSON value"),
        ("[" * 100_000, r"a\.jsonl:2: not a JSON value \(maximum recursion depth"),
        ('{"text": "x", "n": ' + "9" * 5000 + "}", r"a\.jsonl:2: not a JSON value \(Exceeds the limit"),
        ('["x"]', r"a\.jsonl:2: is list, must be an object with the field 'text'"),
        ('{"text": 7}', r"a\.jsonl:2: field 'text' is int, must be text"),
        ('{"body": "x"}', r"a\.jsonl:2: data\.text_column='text' is not there; it has: body"),
    ],
    ids=lambda text: text[:30],
)
def test_bad_line_of_json_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(formats.read_documents(path, "text"))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt:1: not UTF-8 text \(byte 3\)"):
        formats.check_file(tmp_path / "a.txt", "text")


class _Damage:
    """Skips damage and keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, error: DataError) -> None:
        self.messages.append(error.message)


def _read(path: Path) -> tuple[list[TextRow], list[str]]:
    damage = _Damage()
    return list(formats.read_documents(path, "text", damage)), damage.messages


def test_bad_lines_are_skipped_and_reported_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": \n{"text": "caf\xe9"}\n{"text": 4}\n{"text": "five"}\n')
    rows, damage = _read(path)
    assert rows == [(1, "one"), (5, "five")]
    assert [message.split(": ")[0] for message in damage] == [f"{path}:{line}" for line in (2, 3, 4)]
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a JSON value"):
        list(formats.read_documents(path, "text"))


def test_a_bad_line_of_a_text_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ncaf\xe9\nthree\n")
    assert _read(path) == ([(1, "one\nthree\n")], [f"{path}:2: not UTF-8 text (byte 3)"])


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
def test_a_row_that_is_not_utf8_is_named_and_skipped(tmp_path: Path, name: str) -> None:
    texts = [f"text {i}" for i in range(5)]
    raw = pa.array([text.encode() for text in texts[:2]] + [b"\xff\xfe"] + [text.encode() for text in texts[3:]])
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 5, raw.buffers())})
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream)(str(path), table.schema) as writer:
            writer.write_table(table)
    rows, damage = _read(path)
    assert rows == [(i + 1, text) for i, text in enumerate(texts) if i != 2]
    assert damage == [f"{path}:3: not UTF-8 text (byte 0)"]


def test_a_damaged_row_group_is_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"a text of its own, number {i}" for i in range(300)]
    pq.write_table(
        pa.table({"text": texts}),
        path,
        row_group_size=100,
        use_dictionary=False,
        write_page_checksum=True,
        compression="none",
    )
    content = bytearray(path.read_bytes())
    content[content.index(b"number 150")] ^= 0xFF
    path.write_bytes(bytes(content))
    rows, (damage,) = _read(path)
    assert rows == [(i + 1, text) for i, text in enumerate(texts) if not 100 <= i < 200]
    assert damage.startswith(f"{path}: truncated or damaged in rows 101 to 200 (")
    with pytest.raises(DataError, match="truncated or damaged in rows 101 to 200") as caught:
        list(formats.read_documents(path, "text"))
    assert caught.value.hint == "copy the file again, or set data.on_corrupt=skip"


def test_damaged_offsets_of_arrow_are_found_before_they_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    values = pa.array(["first", "second", "third"], pa.string())
    with pa.ipc.new_stream(str(path), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([values], names=["text"]))
    offsets = struct.pack("<4i", 0, 5, 11, 16)
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<4i", 0, 5, 2**30, 16)))
    rows, (damage,) = _read(path)
    assert rows == []
    assert damage.startswith(f"{path}: truncated or damaged from row 1 on (")


def test_compressed_file_that_ends_early_gives_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = "".join(json.dumps({"text": f"{i} {hash(str(i))}"}) + "\n" for i in range(5000)).encode()
    path.write_bytes(gzip.compress(lines)[:-2000])
    rows, (damage,) = _read(path)
    assert 100 < len(rows) < 5000
    assert damage.startswith(f"{path}: truncated or damaged after line {len(rows)} (")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow"])
def test_file_that_is_damaged_as_a_whole_is_reported_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _WRITE[name](path)
    path.write_bytes(path.read_bytes()[:-9])
    rows, damage = _read(path)
    assert (rows, len(damage)) == ([], 1)
    checked = _Damage()
    assert not formats.check_file(path, "text", checked)
    assert checked.messages == damage


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.RST", "a.adoc", "a.tex", "more/README.rst"])
def test_plain_text_is_read_whatever_it_is_written_in(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("Title\n=====\n", encoding="utf-8")
    for other in ("README.rst", "page.html", "LICENSE"):
        (tmp_path / other).write_text("not read", encoding="utf-8")
    assert formats.find_files(tmp_path) == [path]
    assert formats.unread_files(tmp_path, {path}) == {".rst": 1, ".html": 1, "LICENSE": 1}
    assert list(formats.read_documents(path, "text")) == [(1, "Title\n=====\n")]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.parquet", "big.parquet", "a.arrow", "view.arrow"]
)
def test_a_document_without_an_end_is_named_and_skipped(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (formats, formats, formats):
        monkeypatch.setattr(module, "MAX_TEXT_BYTES", 1000)
    path, texts = tmp_path / name, ["one", "x" * 5000, "three"]
    table = pa.table({"text": texts})
    if name.endswith(".parquet"):
        monkeypatch.setattr(formats, "_DICTIONARY_BYTES", 0 if name.startswith("big") else 1 << 20)
        pq.write_table(table, path, compression="zstd")
    elif name.endswith(".arrow"):
        if name.startswith("view"):
            table = pa.table({"text": pa.array(texts, pa.string_view())})
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table)
    else:
        whole = "".join(f"{text}\n" if name == "a.txt" else f"{json.dumps({'text': text})}\n" for text in texts)
        pack = gzip.compress if name.endswith(".gz") else zstandard.compress if name.endswith(".zst") else bytes
        path.write_bytes(pack(whole.encode()))
    rows, reported = _read(path)
    assert rows == ([(1, "one\nthree\n")] if name == "a.txt" else [(1, "one"), (3, "three")])
    assert len(reported) == 1
    assert reported[0].startswith(f"{path}:2: the document has 5,")
    assert reported[0].endswith(" bytes, the limit is 1,000")


def test_parquet_that_unpacks_to_much_more_is_read_in_little_memory(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.parquet", 20_000
    text = "x" * (formats._DICTIONARY_BYTES + 1)
    pq.write_table(pa.table({"text": pa.array([text]).dictionary_encode().take([0] * rows)}), path, store_schema=False)
    before_bytes = pa.total_allocated_bytes()
    read = formats.read_documents(path, "text")
    assert [next(read) == (number, text) for number in range(1, 4)] == [True] * 3
    assert pa.total_allocated_bytes() - before_bytes < 5 * len(text)


def test_a_range_of_lines_counts_the_bytes_of_a_line_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_TEXT_BYTES", 10)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n" + b"x" * 100 + b"\n3\n4\n")
    ranges = [formats.LineRange(path, start, start + 35) for start in (0, 35, 70)]
    assert [[line for line, _ in lines] for lines in ranges] == [[b"1\n", b"x" * 11 + b"\n"], [], [b"3\n"]]
    assert [lines.read_bytes for lines in ranges] == [103, 0, 2]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_packed_line_that_is_almost_endless_is_not_unpacked_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(formats, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(formats, "_MAX_UNPACKED_BYTES", 100_000)
    path, pack = tmp_path / name, gzip.compress if name.endswith(".gz") else zstandard.compress
    path.write_bytes(pack(b'{"text": "one"}\n' + b"x" * 3_000_000 + b'\n{"text": "three"}\n'))
    rows, reported = _read(path)
    assert rows == [(1, "one")]
    assert "truncated or damaged after line 1" in reported[0]
    assert "a line has more than 100,000 bytes" in reported[0]
