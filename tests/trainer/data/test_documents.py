"""Corpora of token ids and Megatron's files: they train like their text, and wrong or damaged ones are refused.

Megatron's files are compared with bytes that are put together here from its documented layout.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest
import torch

from conf.schema import Config, SourceConfig
from hlatctl.run.errors import ConfigError, DataError
from trainer.data import documents, tokenize, tokenizer
from trainer.data.documents import TokenFile, TokenSource, Writer, find, sources_of
from trainer.data.loader import Loader
from trainer.data.prepare import prepare
from trainer.data.survey import survey

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
    with Writer(tmp_path / "a", documents.dtype_for(vocab_size)) as writer:
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
    index, data = documents.index_path(prefix), documents.data_path(prefix)
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


MakeConfig = Callable[..., Config]


def prepared(config: Config, target: Path) -> dict[str, Any]:
    prepare(config, target)
    dataset: dict[str, Any] = json.loads((target / "dataset.json").read_text())
    return dataset


@pytest.fixture(scope="module")
def text(make_config: MakeConfig, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``dataset.json`` of the small corpus in an Arrow file with rows without text, which is used where it lies."""
    folder = tmp_path_factory.mktemp("text")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    table = pa.table({"text": pa.array([*texts[:100], None, " \n", *texts[100:]])})
    feather.write_feather(table, str(folder / "corpus.arrow"), compression="uncompressed", chunksize=64)
    prepare(make_config(data={"path": os.fspath(folder / "corpus.arrow")}), folder / "data")
    return folder / "data" / "dataset.json"


@pytest.fixture(scope="module")
def ids(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its token ids, in several pairs of files."""
    target = tmp_path_factory.mktemp("ids") / "ids"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_LEAST_PART_BYTES", 20 << 10)
        tokenize.tokenize(text, target, processes=1, validation_fraction=0.02)
    return target


@pytest.fixture(scope="module")
def tokens(ids: Path, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``dataset.json`` of these ids."""
    return prepared(make_config(data={"path": os.fspath(ids)}), tmp_path_factory.mktemp("tokens") / "data")


def test_batches_equal_those_of_the_text_to_the_last_bit(
    text: Path, ids: Path, tokens: dict[str, Any], make_config: MakeConfig
) -> None:
    dataset = json.loads(text.read_text())
    assert len(list(ids.glob("*.bin"))) > 1
    assert tokens["fingerprint"] == dataset["fingerprint"], "a run can continue with the one after the other"
    assert Path(tokens["validation"]["path"]).read_bytes() == Path(dataset["validation"]["path"]).read_bytes()
    loaders = [Loader(make_config(), described, rank=0, size=1) for described in (dataset, tokens)]
    try:
        documents: set[int] = set()
        while len(documents) < 230:  # nearly all of an epoch
            batches = [loader.next() for loader in loaders]
            assert torch.equal(batches[0][0], batches[1][0])
            assert torch.equal(batches[0][1], batches[1][1])
            assert loaders[0].spans == loaders[1].spans
            assert loaders[0].state == loaders[1].state
            documents |= {span.document for spans in loaders[0].spans for span in spans}
    finally:
        for loader in loaders:
            loader.close()


def test_a_survey_counts_the_same_tokens(text: Path, tokens: dict[str, Any], make_config: MakeConfig) -> None:
    of_text, of_ids = (survey(make_config(), d, documents=10_000) for d in (json.loads(text.read_text()), tokens))
    assert of_text["tokens"] == of_ids["tokens"] == tokens["sources"][0]["estimated_tokens"]
    assert of_text["sample"] == of_ids["sample"]
    assert of_text["text_bytes"] == pytest.approx(of_ids["text_bytes"], rel=0.03)  # without held-out documents


@pytest.fixture
def ours(tokens: dict[str, Any], make_config: MakeConfig) -> Callable[[Path], Config]:
    """A configuration of Megatron's files with the tokenizer of the small corpus."""
    return lambda path: make_config(
        data={"path": os.fspath(path)}, tokenizer={"path": tokens["tokenizer"]["path"], "train_vocab_size": 400}
    )


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A prefix of 50 documents: document ``i`` has the ids 300 + i and 100 + i; all but the first ends with 1 (eos)."""
    return write(tmp_path / "web_text_document", [[300 + i, 100 + i, *([1] if i else [])] for i in range(50)])


@pytest.mark.parametrize("named", ["web_text_document", "web_text_document.idx", "web_text_document.bin", ""])
def test_megatrons_files_are_found_by_prefix_file_or_folder(megatron: Path, named: str) -> None:
    found = find(megatron.parent / named)
    assert found is not None
    assert found.prefixes == [megatron]


def test_megatrons_documents_are_trained_on_or_held_out_as_text(
    megatron: Path, ours: Callable[[Path], Config], tmp_path: Path
) -> None:
    dataset = prepared(ours(megatron), tmp_path / "data")
    assert dataset["tokenizer"]["eos_id"] == 1
    (source,) = sources_of(dataset)
    assert isinstance(source, TokenSource)
    trained = [document.tolist() for document in source.documents]
    assert all(len(document) == 3 and document[-1] == 1 for document in trained), "each has one end of sequence"
    held_out = [json.loads(line)["text"] for line in (tmp_path / "data" / "validation.jsonl").read_text().splitlines()]
    decoder = tokenizer.load(Path(dataset["tokenizer"]["path"]) / "tokenizer.json")
    everything = [decoder.decode([300 + i, 100 + i]) for i in range(50)]
    rest = [decoder.decode(document[:-1]) for document in trained]
    assert len(held_out) == 1
    assert [text for text in everything if text not in held_out] == rest
    place = everything.index(held_out[0])
    assert (source.origin(0).row, source.origin(48).row) == (1 + (place == 0), 50 - (place == 49))
    assert source.origin(0).file == f"{megatron}.bin"
    assert source.excerpt(0, 60) == rest[0]


def test_another_end_of_sequence_is_reported(ours: Callable[[Path], Config], tmp_path: Path) -> None:
    write(tmp_path / "c", [[300 + i, 7] for i in range(50)])
    (warning,) = prepared(ours(tmp_path / "c"), tmp_path / "data")["warnings"]
    assert "end with token 7, which is not the tokenizer's end of sequence" in warning


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(
    megatron: Path, ours: Callable[[Path], Config], tmp_path: Path
) -> None:
    dataset = prepared(ours(megatron), tmp_path / "data")
    (source,) = sources_of(dataset)
    stored = np.fromfile(f"{megatron}.bin", dtype="<u2")
    stored[1] = 65_000
    stored.tofile(f"{megatron}.bin")
    with pytest.raises(DataError, match=r"document\.bin: token 2 of document 1 is 65000, and the tokenizer has ids be"):
        list(source.documents)
    with pytest.raises(DataError, match="token 2 of document 1 is 65000"):
        prepare(ours(megatron), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_files_that_changed_after_preparation_are_refused(
    megatron: Path, ours: Callable[[Path], Config], tmp_path: Path
) -> None:
    dataset = prepared(ours(megatron), tmp_path / "data")
    write(megatron, [[300, 1]] * 50)
    with pytest.raises(DataError, match="100 tokens, not 149"):
        list(sources_of(dataset)[0].documents)


def test_incomplete_and_mixed_corpora_are_refused(
    megatron: Path, ids: Path, corpus: Path, ours: Callable[[Path], Config], make_config: MakeConfig, tmp_path: Path
) -> None:
    def refused(config: Config, message: str, kind: type[Exception] = DataError) -> None:
        with pytest.raises(kind, match=message):
            prepare(config, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()

    refused(make_config(data={"path": os.fspath(megatron)}), "tokenizer.path: not set, and data.path=", ConfigError)
    both = [SourceConfig(path=os.fspath(path)) for path in (corpus, ids)]
    refused(make_config(data={"path": None, "sources": both}), "is text, and .* contains token ids")
    shutil.copyfile(corpus, megatron.parent / "corpus.jsonl")
    refused(ours(megatron.parent), r"contains token ids \(web_text_document.idx\) and text \(corpus.jsonl\)")
    os.unlink(f"{megatron}.bin")
    refused(ours(megatron), r"web_text_document.bin: is missing beside web_text_document.idx")
    refused(ours(write(tmp_path / "one", [[1, 2]])), "1 documents; one to train on and one to hold out")
    refused(ours(write(tmp_path / "none", [[], []])), "its documents have no tokens")


def test_another_tokenizer_and_a_damaged_folder_are_refused(
    ids: Path, mixed: dict[str, Any], make_config: MakeConfig, tmp_path: Path
) -> None:
    other = make_config(data={"path": os.fspath(ids)}, tokenizer={"path": mixed["tokenizer"]["path"]})
    with pytest.raises(DataError, match="was made with") as caught:
        prepare(other, tmp_path / "refused")
    fixed = caught.value.hint.removeprefix("set tokenizer.path=")
    prepare(make_config(data={"path": os.fspath(ids)}, tokenizer={"path": fixed}), tmp_path / "data")
    copied = shutil.copytree(ids, tmp_path / "copy")
    shard = next(copied.glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{shard.stem}.*tokens, not"):
        prepare(make_config(data={"path": os.fspath(copied)}), tmp_path / "refused")


def test_files_beyond_the_open_ones_are_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.data import documents as tokenized

    monkeypatch.setattr(tokenized, "_OPEN_FILES", 2)
    entries = [tokenized.describe_pair(write(tmp_path / f"{i}", [[i + 5, 1]])) for i in range(5)]
    documents = tokenized.TokenDocuments(entries, held_out=[1, 4], vocab_size=100, eos_id=1)
    order = list(itertools.permutations(range(3)))
    assert [documents[i][0] for places in order for i in places] == [(5, 7, 8)[i] for places in order for i in places]
    assert documents._file.cache_info().currsize == 2
