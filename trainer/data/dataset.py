"""Write ``dataset.json``, the description of a prepared corpus, with tokenizer, held-out text and estimates."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.fingerprint import digest
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.units import counted
from trainer.data import tokenizer
from trainer.data.arrow_index import index_file
from trainer.data.corpus import COLUMN, CORRUPT_KEPT, Corpus, InPlace, Piece, check_vocabulary, held_out_name
from trainer.data.documents import Source
from trainer.data.formats import fail
from trainer.data.remote import RemoteDocuments, in_order
from trainer.data.tokenizer import make_encoder

DATASET = "dataset.json"
VALIDATION = "validation.jsonl"
#: Size limit of the sample that estimates a source's tokens.
_SAMPLED_DOCUMENTS, _SAMPLED_BYTES = 512, 1 << 20
#: Held-out text copied from a source's files in place: a hundred times what an evaluation reads by default.
_VALIDATION_BYTES = 32 << 20
#: Kinds of unread files that the warning names.
_KINDS_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The results of indexing and conversion.

    Args:
        corpora: the configuration's corpora.
        pieces: the inputs of each corpus.
        in_place: the files of each corpus that are used where they lie.
        units: results of ``trainer.data.corpus``.
    """

    corpora: list[Corpus]
    pieces: list[list[Piece]]
    in_place: list[InPlace]
    units: list[dict[str, Any]]

    def converted(self, source: int) -> list[dict[str, Any]]:
        """Return the results of a source's converted inputs, in order."""
        return [piece for unit in self.units for piece in unit["pieces"] if piece["source"] == source]


def write_dataset(config: Config, prepared: Prepared, folder: Path, target: Path) -> None:
    """Write tables, held-out text, tokenizer and ``dataset.json``.

    Args:
        target: the folder's final path, which the description contains.

    Raises:
        DataError: the corpus can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
    """
    _check_documents(prepared)
    parts = [entry for unit in prepared.units for entry in unit["files"]]
    entries = [_finish_source(prepared, source, parts, folder, config) for source in range(len(prepared.corpora))]
    dataset = {"v": 3, "text_column": COLUMN, "on_corrupt": config.data.on_corrupt, "files": parts, "sources": entries}
    here = _placed(dataset, folder)
    sources = [Source(here, source) for source in range(len(entries))]
    validation = _write_validation(prepared, sources, folder)
    vocabulary = _prepare_tokenizer(config, sources, folder / "tokenizer")
    for entry, source in zip(entries, sources, strict=True):
        entry["estimated_tokens"] = _estimated_tokens(source, folder / "tokenizer")
    held_out = files.sha256_file(folder / VALIDATION)
    at = _below(target)
    dataset |= {
        "documents": sum(entry["documents"] for entry in entries),
        "text_bytes": sum(entry["text_bytes"] for entry in entries),
        "fingerprint": digest([vocabulary["fingerprint"], held_out, *(entry["fingerprint"] for entry in entries)]),
        "skipped_rows": sum(entry["skipped_rows"] for entry in entries),
        "corrupt": [message for entry in entries for message in entry["corrupt"]][:CORRUPT_KEPT],
        "corrupt_count": sum(entry["corrupt_count"] for entry in entries),
        "warnings": [*_unread(prepared.corpora), *_small_vocabulary(config, vocabulary["vocab_size"])],
        "validation": {**validation, "path": at(VALIDATION)},
        "tokenizer": {**vocabulary, "path": at("tokenizer")},
    }
    files.write_sealed_json(folder / DATASET, _placed(dataset, target))


def _below(folder: Path) -> Callable[[str], str]:
    return lambda name: os.fspath((folder / name).absolute())


def _placed(dataset: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``dataset.json`` with the paths of the prepared files of its sources below a folder."""
    at = _below(folder)
    sources = []
    for entry in dataset["sources"]:
        kinds = {kind: {**file, "path": at(file["path"])} for kind, file in entry["index"].items() if kind != "rows"}
        sources.append({**entry, "inputs": at(entry["inputs"]), "index": {**entry["index"], **kinds}})
    return {**dataset, "sources": sources, "files": [{**file, "path": at(file["path"])} for file in dataset["files"]]}


def _check_documents(prepared: Prepared) -> None:
    """Refuse a corpus that is too small; hold out one document if none is held out."""
    total = 0
    for source, (corpus, in_place) in enumerate(zip(prepared.corpora, prepared.in_place, strict=True)):
        converted = prepared.converted(source)
        documents = in_place.rows + sum(piece["documents"] for piece in converted)
        rows = in_place.rows + sum(piece["rows"] for piece in converted)
        if not documents:
            raise DataError(f"{corpus.name}: no document with text in {rows} rows", hint="use a larger corpus")
        total += documents
    if total < 2:
        raise DataError(
            f"data: {total} documents with text; one to train on and one to hold out are needed",
            hint="use a larger corpus",
        )
    converted_held_out = sum(unit["validation"]["documents"] for unit in prepared.units)
    largest = max(prepared.in_place, key=lambda source: source.rows)
    if not converted_held_out and not any(source.table.held_out for source in prepared.in_place):
        if not largest.rows:
            raise DataError("data: no document is held out", hint="raise data.validation_fraction")
        largest.table.hold_out_last()


def _finish_source(
    prepared: Prepared, source: int, parts: list[dict[str, Any]], folder: Path, config: Config
) -> dict[str, Any]:
    corpus, in_place, converted = prepared.corpora[source], prepared.in_place[source], prepared.converted(source)
    table = in_place.table
    share = (in_place.rows - table.held_out) / in_place.rows if in_place.rows else 0.0
    own = [part for part in parts if part["source"] == source]
    for number, part in enumerate(own):
        indexed = index_file(folder / part["path"], COLUMN, fail)
        assert indexed is not None  # it has just been written
        table.add(indexed, -1 - number, np.empty(0, dtype=np.int64), checked=False)
    table.close()
    documents = table.documents - table.held_out
    if not documents:
        raise DataError(f"{corpus.name}: all of its documents are held out", hint="lower data.validation_fraction")
    inputs = f"inputs-{source:02d}.json"
    files.write_json(folder / inputs, _inputs(prepared.pieces[source], converted, folder))
    content = [part["sha256"] for part in own]
    if in_place.rows:
        content += [corpus.column, str(config.data.validation_fraction), *in_place.fingerprints]
    return {
        "path": corpus.name,
        "rows": in_place.rows + sum(piece["rows"] for piece in converted),
        "skipped_rows": sum(piece["skipped_rows"] for piece in converted),
        "corrupt": [*in_place.corrupt.messages, *(m for piece in converted for m in piece["corrupt"])][:CORRUPT_KEPT],
        "corrupt_count": in_place.corrupt.count + sum(piece["corrupt_count"] for piece in converted),
        "inputs": inputs,
        "index": table.describe(),
        "documents": documents,
        "text_bytes": round(in_place.text_bytes * share) + sum(part["bytes"] for part in own),
        "fingerprint": digest(content),
    }


def _inputs(pieces: list[Piece], converted: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return the path of each input; for a range of a file also the number of rows before it.

    Stand-ins are in the folder, which is renamed later, so their paths are relative to it.
    """
    lines = {piece["number"]: piece["lines"] for piece in converted}
    inputs: list[Any] = []
    before = 0
    for piece in pieces:
        before = before if piece.start else 0
        path = os.fspath(piece.path.relative_to(folder) if folder in piece.path.parents else piece.path)
        inputs.append({"path": path, "rows_before": before} if piece.is_range else path)
        before += lines.get(piece.number, 0)
    return inputs


def _write_validation(prepared: Prepared, sources: list[Source], folder: Path) -> dict[str, Any]:
    """Write the held-out documents: all converted ones, and a sample of those in files in place."""
    documents = sum(unit["validation"]["documents"] for unit in prepared.units)
    text_bytes = sum(unit["validation"]["text_bytes"] for unit in prepared.units)
    with (folder / VALIDATION).open("wb") as out:
        for number in range(len(prepared.units)):
            with (folder / held_out_name(number)).open("rb") as part:
                shutil.copyfileobj(part, out)
        for source, in_place in zip(sources, prepared.in_place, strict=True):
            documents += in_place.table.held_out
            for text in _sample(source.held_out_texts(), in_place):
                out.write(json.dumps({COLUMN: text}).encode() + b"\n")
                text_bytes += len(text.encode())
    if not text_bytes:
        raise DataError("data: no held-out document has text", hint="raise data.validation_fraction")
    return {"documents": documents, "text_bytes": text_bytes}


def _sample(texts: RemoteDocuments[str], in_place: InPlace) -> Iterator[str]:
    average = in_place.text_bytes / in_place.rows if in_place.rows else 0
    positions = range(0, len(texts), max(1, round(len(texts) * average / _VALIDATION_BYTES)))
    yield from (text for text in in_order(texts, positions) if text.strip())


def _prepare_tokenizer(config: Config, sources: list[Source], folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)  # of a killed preparation
    path = Path(config.tokenizer.path) if config.tokenizer.path else None
    texts = (text for source in sources for text in source.documents if text.strip())
    tokenizer.prepare(path, folder, texts=texts, train_vocab_size=config.tokenizer.train_vocab_size)
    vocabulary = tokenizer.describe(folder)
    check_vocabulary(config, vocabulary["vocab_size"])
    return vocabulary


def _estimated_tokens(source: Source, folder: Path) -> int:
    """Estimate a source's tokens from evenly spread documents, up to 1 MiB."""
    encode = make_encoder(tokenizer.load(folder / tokenizer.TOKENIZER_JSON))
    documents, sampled, tokens, sizes = source.documents, 0, 0, 0
    for text in in_order(documents, range(0, len(documents), max(1, len(documents) // _SAMPLED_DOCUMENTS))):
        sampled += 1
        if text.strip():
            tokens, sizes = tokens + len(encode(text)) + 1, sizes + len(text.encode())
        if sizes >= _SAMPLED_BYTES:
            break
    if not sizes:
        raise DataError(f"{source.name}: no text in {sampled} of its documents", hint="use a larger corpus")
    return max(1, round(tokens / sizes * source.text_bytes))


def _unread(corpora: list[Corpus]) -> list[str]:
    return [
        _not_read(corpus.name, sorted(corpus.unread.items(), key=lambda item: -item[1]))
        for corpus in corpora
        if corpus.unread
    ]


def _not_read(name: str, kinds: list[tuple[str, int]]) -> str:
    number = sum(n for _, n in kinds)
    listed = ", ".join(f"{n} {kind}" for kind, n in kinds[:_KINDS_SHOWN]) + ", …" * (len(kinds) > _KINDS_SHOWN)
    return f"data: {counted(number, 'file')} in {name} {'is' if number == 1 else 'are'} not read: {listed}"


def _small_vocabulary(config: Config, vocab_size: int) -> list[str]:
    asked = config.tokenizer.train_vocab_size
    if config.tokenizer.path is not None or vocab_size >= asked:
        return []
    return [
        f"data: the corpus gives a tokenizer of {vocab_size:,} tokens, fewer than tokenizer.train_vocab_size={asked:,}"
    ]
