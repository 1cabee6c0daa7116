"""Arrow files are used where they lie: nothing is copied, and a changed or damaged file is named."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conf.schema import Config
from hlatctl.run.errors import DataError
from trainer.data.documents import Source, sources_of
from trainer.data.loader import Loader
from trainer.data.prepare import prepare

MakeConfig = Callable[..., Config]


def _arrow(path: Path, texts: Sequence[str | None], **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def _texts(count: int, name: str = "a") -> list[str | None]:
    return [f"document {i} of {name}, with some words" for i in range(count)]


def _prepared(config: Config, target: Path) -> tuple[dict[str, Any], list[str]]:
    """dataset.json, and the texts that are held out."""
    prepare(config, target)
    dataset = json.loads((target / "dataset.json").read_text())
    lines = Path(dataset["validation"]["path"]).read_text().splitlines()
    return dataset, [json.loads(line)["text"] for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _arrow(tmp_path / "corpus" / "a.arrow", _texts(60))
    _arrow(tmp_path / "corpus" / "b.arrow", _texts(40, "b"))
    return tmp_path / "corpus"


@pytest.fixture
def config(make_config: MakeConfig, folder: Path) -> Config:
    return make_config(data={"path": os.fspath(folder), "validation_fraction": 0.1})


def test_nothing_is_copied_but_the_held_out_documents(config: Config, folder: Path, tmp_path: Path) -> None:
    dataset, held_out = _prepared(config, tmp_path / "d")
    (source,) = sources_of(dataset)
    assert not list((tmp_path / "d").glob("*.arrow"))
    assert sorted([*source.documents, *held_out]) == sorted(map(str, [*_texts(60), *_texts(40, "b")]))
    assert 3 <= len(held_out) <= 25
    assert dataset["validation"]["documents"] == len(held_out)
    assert (dataset["documents"], dataset["sources"][0]["rows"]) == (100 - len(held_out), 100)
    assert dataset["text_bytes"] == pytest.approx(sum(map(len, source.documents)), rel=0.2)
    for position, text in enumerate(source.documents):
        origin = source.origin(position)
        name = Path(origin.file).stem
        assert text == _texts(60, name)[origin.row - 1]


def test_files_that_need_conversion_are_in_the_same_source(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    _arrow(folder / "c.arrow", _texts(30, "c"), compression="zstd")
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts(20, "d")))
    config = make_config(data={"path": os.fspath(folder), "validation_fraction": 0.1})
    dataset, held_out = _prepared(config, tmp_path / "d")
    (source,) = sources_of(dataset)
    everything = [text for name, count in (("a", 60), ("b", 40), ("c", 30), ("d", 20)) for text in _texts(count, name)]
    assert sorted([*source.documents, *held_out]) == sorted(map(str, everything))
    origins = {Path(source.origin(i).file).stem for i in range(len(source.documents))}
    assert origins == {"a", "b", "c", "d"}
    assert dataset["validation"]["documents"] == len(held_out)


@pytest.mark.parametrize("fraction", [0.0, 0.999])
def test_neither_side_is_ever_empty(make_config: MakeConfig, tmp_path: Path, fraction: float) -> None:
    _arrow(tmp_path / "corpus" / "two.arrow", ["only this one", "and that one"])
    config = make_config(data={"path": os.fspath(tmp_path / "corpus"), "validation_fraction": fraction})
    dataset, held_out = _prepared(config, tmp_path / "d")
    assert (list(sources_of(dataset)[0].documents), held_out) == (["only this one"], ["and that one"])


def test_order_depends_on_the_content_and_not_on_the_path(
    make_config: MakeConfig, folder: Path, config: Config, tmp_path: Path
) -> None:
    first, _ = _prepared(config, tmp_path / "d")
    folder.rename(tmp_path / "moved")
    second, _ = _prepared(
        make_config(data={"path": os.fspath(tmp_path / "moved"), "validation_fraction": 0.1}), tmp_path / "e"
    )
    assert first["fingerprint"] == second["fingerprint"]
    less = make_config(data={"path": os.fspath(tmp_path / "moved"), "validation_fraction": 0.2})
    third, _ = _prepared(less, tmp_path / "f")
    assert third["sources"][0]["fingerprint"] != first["sources"][0]["fingerprint"]


def test_loader_reads_them_and_rows_without_text_give_no_tokens(make_config: MakeConfig, tmp_path: Path) -> None:
    texts = [text for pair in zip(_texts(30), [" \n", "", None] * 10, strict=True) for text in pair][:-1]
    plain = _arrow(tmp_path / "corpus" / "a.arrow", texts)
    config = make_config(data={"path": os.fspath(plain), "validation_fraction": 0.0}, train={"global_batch_size": 1})
    dataset, _ = _prepared(config, tmp_path / "d")
    eos = dataset["tokenizer"]["eos_id"]
    loader = Loader(config, dataset, rank=0, size=1)
    drawn = [loader.next()[0][0].tolist() for _ in range(60)]
    loader.close()
    tokens = [token for sequence in drawn for token in sequence]
    assert tokens.count(eos) > 30
    assert (eos, eos) not in set(itertools.pairwise(tokens))


def test_corpus_without_any_text_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    _arrow(tmp_path / "corpus" / "a.arrow", [None, " ", "", None])
    with pytest.raises(DataError, match="no held-out document has text"):
        prepare(make_config(data={"path": os.fspath(tmp_path / "corpus")}), tmp_path / "d")
    assert not list(tmp_path.glob(".d*")), "no temporary folder is left"


def _source(config: Config, target: Path) -> Source:
    source = sources_of(_prepared(config, target)[0])[0]
    assert isinstance(source, Source)
    return source


def test_file_that_changed_after_indexing_is_refused_by_name(config: Config, folder: Path, tmp_path: Path) -> None:
    source = _source(config, tmp_path / "d")
    os.utime(folder / "b.arrow", ns=(1, 1))
    with pytest.raises(DataError, match=r"b\.arrow: has changed since it was indexed \(its time of change\)"):
        list(source.documents)
    size = (folder / "a.arrow").stat().st_size
    _arrow(folder / "a.arrow", _texts(61))
    with pytest.raises(DataError, match=rf"a\.arrow: has changed since it was indexed \([\d,]+ bytes, was {size:,}"):
        _source(config, tmp_path / "d").documents[0]
    (folder / "a.arrow").unlink()
    with pytest.raises(DataError, match=r"a\.arrow: can't be read \(No such file"):
        _source(config, tmp_path / "d").documents[0]


@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
def test_damaged_row_is_named_or_skipped(make_config: MakeConfig, tmp_path: Path, on_corrupt: str) -> None:
    path = _arrow(tmp_path / "corpus" / "a.arrow", ["first", "second", "third", "the fourth"])
    config = make_config(data={"path": os.fspath(path), "on_corrupt": on_corrupt, "validation_fraction": 0.0})
    content = path.read_bytes()
    offsets = struct.pack("<5i", 0, 5, 11, 16, 26)
    assert content.count(offsets) == 1
    content = content.replace(b"first", b"\xffirst").replace(offsets, struct.pack("<5i", 0, 5, 2**30, 16, 26))
    dataset, _ = _prepared(config, tmp_path / "d")
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (source,) = sources_of(dataset)
    if on_corrupt == "skip":
        assert list(source.documents) == ["", "", ""]
        return
    with pytest.raises(DataError, match=r"a\.arrow:1: not UTF-8 text \(byte 0\)"):
        source.documents[0]
    with pytest.raises(DataError, match=r"a\.arrow:2: its text begins at 5 and ends at 1073741824 of 26 bytes"):
        source.documents[1]


def test_truncated_file_is_refused_or_skipped(make_config: MakeConfig, folder: Path, tmp_path: Path) -> None:
    (folder / "b.arrow").write_bytes((folder / "b.arrow").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"b\.arrow: truncated or damaged"):
        prepare(make_config(data={"path": os.fspath(folder)}), tmp_path / "d")
    dataset, held_out = _prepared(make_config(data={"path": os.fspath(folder), "on_corrupt": "skip"}), tmp_path / "e")
    assert dataset["corrupt_count"] == 1
    assert dataset["documents"] + len(held_out) == 60
