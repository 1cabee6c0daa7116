"""Prepare corpora of token ids for training: check them, and write what ``trainer.data.prepare`` writes for text.

The ids stay where they are. The folder contains ``validation.jsonl``, ``tokenizer/`` and ``dataset.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conf.fingerprint import digest
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.files import reading
from trainer.data import documents as megatron
from trainer.data import tokenizer
from trainer.data.corpus import COLUMN, check_vocabulary
from trainer.data.dataset import DATASET, VALIDATION
from trainer.data.documents import MANIFEST, TokenCorpus, TokenDocuments, TokenSource, check_counts, describe_pair, find
from trainer.data.remote import fetch_ranges, files_of, in_order

#: Maximum held-out documents of Megatron's files: they are decoded to text.
_MOST_HELD_OUT = 2000
#: Minimum documents of each corpus to check; the others are checked when they are read.
_CHECKED_DOCUMENTS = 64
#: This many equal last tokens are no coincidence.
_ENOUGH_LAST_TOKENS = 16
#: A pair's fingerprint covers its sizes and this many blocks of each file: its whole content can have terabytes.
_BLOCKS, _BLOCK_BYTES = 16, 4096


def check_tokens(config: Config) -> list[TokenCorpus]:
    """Return the corpora of token ids of a configuration after a check of all headers; empty if it names text.

    Raises:
        DataError: files are incomplete or damaged, ids and text are mixed, or the tokenizer is missing or another one.
        ConfigError: the tokenizer is larger than the model's vocabulary.
    """
    found = [(source.path, find(Path(source.path))) for source in config.data.inputs]
    corpora = [corpus for _, corpus in found if corpus is not None]
    if not corpora:
        return []
    text = next((path for path, corpus in found if corpus is None), None)
    if text is not None:
        raise DataError(
            f"data.sources: {text} is text, and {corpora[0].name} contains token ids; a mixture has one kind",
            hint=f"make token ids of the text: hlatctl data tokenize data.path={text} --to FOLDER",
        )
    described = tokenizer.look(_tokenizer_path(config, corpora))
    for corpus in corpora:
        _check_tokenizer(config, corpus, described)
        _entries(corpus)
    check_vocabulary(config, described["vocab_size"])
    return corpora


def _tokenizer_path(config: Config, corpora: Sequence[TokenCorpus]) -> Path:
    if config.tokenizer.path is not None:
        return Path(config.tokenizer.path)
    own = next((corpus.folder / "tokenizer" for corpus in corpora if corpus.folder is not None), None)
    if own is None:
        raise ConfigError(
            f"tokenizer.path: not set, and data.path={corpora[0].name} contains token ids without a tokenizer",
            hint="set tokenizer.path to the tokenizer that made the ids",
        )
    return own


def _check_tokenizer(config: Config, corpus: TokenCorpus, described: dict[str, Any]) -> None:
    expected = corpus.manifest.get("tokenizer", described)["fingerprint"]
    if described["fingerprint"] != expected:
        raise DataError(
            f"tokenizer.path={config.tokenizer.path}: has fingerprint {described['fingerprint']}, and {corpus.name} "
            f"was made with {expected}",
            hint=f"set tokenizer.path={(corpus.folder or Path()) / 'tokenizer'}",
        )


def _entries(corpus: TokenCorpus) -> list[dict[str, Any]]:
    """Return the entries of a corpus's pairs of files, checked against its manifest.

    Raises a DataError if a pair is damaged, or there are too few documents.
    """
    entries = [describe_pair(prefix) for prefix in corpus.prefixes]
    for entry, shard in zip(entries, corpus.manifest.get("shards", ()), strict=False):
        check_counts({**entry, **shard}, documents=entry["documents"], tokens=entry["tokens"])
    documents = sum(entry["documents"] for entry in entries)
    if documents < 1 + (corpus.folder is None):
        raise DataError(
            f"data.path={corpus.name}: {documents} documents; one to train on and one to hold out are needed",
            hint="use a larger corpus",
        )
    return entries


def write_token_dataset(config: Config, corpora: Sequence[TokenCorpus], partial: Path, target: Path) -> None:
    """Write the files of a prepared folder, whose final name is ``target``, from :func:`check_tokens`.

    Raises a DataError if a checked id is not in the vocabulary.
    """
    folder = partial / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed preparation
    tokenizer.prepare(_tokenizer_path(config, corpora), folder, texts=(), train_vocab_size=0)
    described = tokenizer.describe(folder)
    sources = [_source(config, corpus) for corpus in corpora]
    here = {"sources": sources, "tokenizer": {**described, "path": folder}}
    opened = [TokenSource(here, index) for index in range(len(sources))]
    warnings = []
    for corpus, source in zip(corpora, opened, strict=True):
        _check_ids(source.documents, corpus)
        warnings += _warnings(config, corpus, source.documents, described["eos_id"])
    counts = _write_held_out(corpora, opened, partial / VALIDATION)
    held_out_sha256 = files.sha256_file(partial / VALIDATION)
    dataset = {
        "v": 3,
        "text_column": COLUMN,
        "files": [],
        "sources": [_placed(source, partial, target) for source in sources],
        "documents": sum(source["documents"] for source in sources),
        "text_bytes": _total([source["text_bytes"] for source in sources]),
        "fingerprint": digest(
            [described["fingerprint"], held_out_sha256, *(source["fingerprint"] for source in sources)]
        ),
        "skipped_rows": 0,
        "corrupt": [],
        "corrupt_count": 0,
        "warnings": warnings,
        "validation": {**counts, "path": os.fspath((target / VALIDATION).absolute())},
        "tokenizer": {**described, "path": os.fspath((target / "tokenizer").absolute())},
    }
    files.write_sealed_json(partial / DATASET, dataset)


def _source(config: Config, corpus: TokenCorpus) -> dict[str, Any]:
    entries = _entries(corpus)
    rows = sum(entry["documents"] for entry in entries)
    count = 0
    if corpus.folder is None:
        count = min(max(1, math.ceil(rows * config.data.validation_fraction)), _MOST_HELD_OUT, rows - 1)
    return {
        "path": corpus.name,
        "rows": rows,
        "skipped_rows": 0,
        "corrupt": [],
        "corrupt_count": 0,
        "documents": rows - count,
        "held_out": count,
        "text_bytes": corpus.manifest.get("text_bytes"),
        "estimated_tokens": round(sum(entry["tokens"] for entry in entries) * (rows - count) / rows),
        # Decides the order of documents. For ids made from text it is the text's, so both give the same batches.
        "fingerprint": corpus.manifest.get("source", {}).get("fingerprint") or _fingerprint(corpus.prefixes),
        "shards": entries,
    }


def _placed(source: dict[str, Any], partial: Path, target: Path) -> dict[str, Any]:
    """Return an entry with the final paths of pairs whose indexes are in the folder."""
    here, later = partial.absolute(), target.absolute()
    prefixes = [Path(shard["path"]) for shard in source["shards"]]
    paths = [os.fspath(later / p.relative_to(here) if here in p.parents else p) for p in prefixes]
    return {**source, "shards": [{**s, "path": path} for s, path in zip(source["shards"], paths, strict=True)]}


def _fingerprint(prefixes: Sequence[Path]) -> str:
    digest_ = hashlib.sha256()
    for prefix in prefixes:
        for path in (megatron.index_path(prefix), megatron.data_path(prefix)):
            size = path.stat().st_size
            digest_.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for position in _blocks(size):
                    file.seek(position)
                    digest_.update(file.read(_BLOCK_BYTES))
    return digest_.hexdigest()[:16]


def _blocks(size: int) -> list[int]:
    """Return the positions of the blocks of a file that its fingerprint covers."""
    return [max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1) for block in range(_BLOCKS)]


def fetch_indexes(config: Config, *, whole: bool) -> None:
    """Fill the parts of stand-ins that :func:`check_tokens`, or the ``whole`` preparation, reads.

    Paths that aren't in stand-ins are ignored. Raises a DataError if the storage can't be read.
    """
    ranges: list[tuple[Path, int, int]] = []
    for source in config.data.inputs:
        root = Path(source.path)
        own = [root / MANIFEST, *(root / "tokenizer").glob("*"), *([root / VALIDATION] if whole else [])]
        for path, size in files_of(root):
            if path in own and (root / MANIFEST).is_file():
                ranges.append((path, 0, size))
            elif path.suffix == ".idx":
                ranges.append((path, 0, size if whole else min(size, megatron.HEADER_BYTES)))
            elif whole and path.suffix == ".bin":
                ranges += [(path, position, min(size, _BLOCK_BYTES)) for position in _blocks(size)]
    fetch_ranges(ranges)


def _sampled(documents: TokenDocuments) -> Iterator[int]:
    yield from range(0, len(documents), max(1, len(documents) // _CHECKED_DOCUMENTS))


def _check_ids(documents: TokenDocuments, corpus: TokenCorpus) -> None:
    if not any(len(ids) for ids in in_order(documents, _sampled(documents))):
        raise DataError(f"data.path={corpus.name}: its documents have no tokens", hint="use a larger corpus")


def _warnings(config: Config, corpus: TokenCorpus, documents: TokenDocuments, eos_id: int) -> list[str]:
    if corpus.folder is not None:
        fraction = corpus.manifest.get("validation_fraction")
        if fraction == config.data.validation_fraction:
            return []
        return [
            f"data.validation_fraction={config.data.validation_fraction}: has no effect, because {corpus.name} was "
            f"tokenized with {fraction}"
        ]
    stored = [documents.stored(documents.among_all(position)) for position in _sampled(documents)]
    last = {int(ids[-1]) for ids in stored if len(ids)}
    if len(stored) < _ENOUGH_LAST_TOKENS or len(last) != 1 or last == {eos_id}:
        return []
    return [
        f"data: documents of {corpus.name} end with token {last.pop()}, which is not the tokenizer's end of sequence; "
        "each gets that one too"
    ]


def _write_held_out(corpora: Sequence[TokenCorpus], sources: Sequence[TokenSource], path: Path) -> dict[str, int]:
    """Write the held-out documents of all corpora as text; return their number and bytes."""
    counts = {"documents": 0, "text_bytes": 0}
    with path.open("wb") as file:
        for corpus, source in zip(corpora, sources, strict=True):
            if corpus.folder is not None:
                with reading(corpus.folder / VALIDATION, hint="copy the folder again"):
                    with (corpus.folder / VALIDATION).open("rb") as lines:
                        shutil.copyfileobj(lines, file)
                    for name in counts:
                        counts[name] += corpus.manifest["validation"][name]
            for text in source.held_out_texts():
                file.write(json.dumps({COLUMN: text}).encode() + b"\n")
                counts["documents"] += 1
                counts["text_bytes"] += len(text.encode())
    return counts


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
