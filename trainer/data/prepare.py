"""``python -m trainer.data.prepare --config FILE --to DIR``: prepare corpus and tokenizer for training.

The folder gets uncompressed Arrow files (which the loader maps into memory), ``validation.jsonl``, ``tokenizer/`` and
``dataset.json`` last. It is created atomically, and an existing one is not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from conf.fingerprint import digest
from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.atomic import partial_folder
from hlatctl.run.errors import DataError, cannot_write, run_main
from trainer.data import formats, tokenizer
from trainer.data.corpus import Corpus, check, check_vocabulary, read
from trainer.data.documents import Documents
from trainer.data.encoder import make_encoder
from trainer.data.prepare_tokens import check_tokens, write_dataset
from trainer.data.split import COLUMN, Document, Split

DATASET = "dataset.json"
#: ``dataset.json`` keeps this many messages about skipped damage, and counts all of it.
_CORRUPT_KEPT = 20
#: The sample for the estimate of a source's tokens, at most.
_SAMPLED_DOCUMENTS, _SAMPLED_BYTES = 512, 1 << 20
#: Kinds of unread files that the warning names.
_KINDS_SHOWN = 5


def prepare(config: Config, target: Path) -> None:
    """Write the prepared folder of a configuration's corpus.

    Raises:
        DataError: corpus or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
        StorageError: the folder can't be written.
    """
    if (target / DATASET).is_file():
        return
    tokens = check_tokens(config)
    corpora = [] if tokens else check(config)
    try:
        with partial_folder(target) as partial:
            if tokens:
                write_dataset(config, tokens, partial, target)
            else:
                _write(config, corpora, partial, target)
            _publish(partial, target)
    except OSError as error:
        raise cannot_write(target, error, hint="free space, or set another runs_dir") from None


def _write(config: Config, corpora: list[Corpus], partial: Path, target: Path) -> None:
    with closing(Split(partial, config.data.validation_fraction)) as split:
        entries = [_read(split, index, corpus, config, partial) for index, corpus in enumerate(corpora)]
        counts = split.finish()
    folder = partial / "tokenizer"
    path = Path(config.tokenizer.path) if config.tokenizer.path else None
    here = [{**entry, "path": partial / entry["path"]} for entry in counts["files"]]
    texts = iter(Documents(here))
    tokenizer.prepare(path, folder, texts=texts, train_vocab_size=config.tokenizer.train_vocab_size)
    vocabulary = tokenizer.describe(folder)
    check_vocabulary(config, vocabulary["vocab_size"])

    def final(name: str) -> str:
        return os.fspath((target / name).absolute())

    for index, entry in enumerate(entries):
        own = [file for file in here if file["source"] == index]
        if not own:
            raise DataError(
                f"{entry['path']}: all of its documents are held out", hint="lower data.validation_fraction"
            )
        entry.update(
            documents=sum(file["documents"] for file in own),
            text_bytes=sum(file["bytes"] for file in own),
            fingerprint=digest([file["sha256"] for file in own]),
            inputs=final(entry["inputs"]),
        )
        entry["estimated_tokens"] = _estimated_tokens(Documents(own), entry["text_bytes"], folder)
    held_out = files.sha256_file(partial / "validation.jsonl")
    dataset = {
        "v": 2,
        "text_column": COLUMN,
        **counts,
        "sources": entries,
        "fingerprint": digest([vocabulary["fingerprint"], held_out, *(entry["fingerprint"] for entry in entries)]),
        "skipped_rows": sum(entry["skipped_rows"] for entry in entries),
        "corrupt": [message for entry in entries for message in entry["corrupt"]][:_CORRUPT_KEPT],
        "corrupt_count": sum(entry["corrupt_count"] for entry in entries),
        "warnings": [*_unread(corpora), *_small_vocabulary(config, vocabulary["vocab_size"])],
        "files": [{**entry, "path": final(entry["path"])} for entry in counts["files"]],
        "validation": {**counts["validation"], "path": final("validation.jsonl")},
        "tokenizer": {**vocabulary, "path": final("tokenizer")},
    }
    files.write_sealed_json(partial / DATASET, dataset)


def _estimated_tokens(documents: Documents, text_bytes: int, folder: Path) -> int:
    """Estimate a source's tokens from documents that are spread evenly over it, up to 1 MiB."""
    encode = make_encoder(tokenizer.load(folder / tokenizer.TOKENIZER_JSON))
    tokens = sizes = 0
    for position in range(0, len(documents), max(1, len(documents) // _SAMPLED_DOCUMENTS)):
        text = documents[position]
        tokens, sizes = tokens + len(encode(text)) + 1, sizes + len(text.encode())
        if sizes >= _SAMPLED_BYTES:
            break
    return max(1, round(tokens / sizes * text_bytes))


def _unread(corpora: list[Corpus]) -> list[str]:
    unread = [(corpus.name, sorted(corpus.unread.items(), key=lambda item: -item[1])) for corpus in corpora]
    return [
        f"data: {sum(n for _, n in kinds)} files in {name} are not read: "
        + ", ".join(f"{n} {kind}" for kind, n in kinds[:_KINDS_SHOWN])
        + (", …" if len(kinds) > _KINDS_SHOWN else "")
        for name, kinds in unread
        if kinds
    ]


def _small_vocabulary(config: Config, vocab_size: int) -> list[str]:
    asked = config.tokenizer.train_vocab_size
    if config.tokenizer.path is not None or vocab_size >= asked:
        return []
    return [
        f"data: the corpus gives a tokenizer of {vocab_size:,} tokens, fewer than tokenizer.train_vocab_size={asked:,}"
    ]


def _read(split: Split, source: int, corpus: Corpus, config: Config, partial: Path) -> dict[str, Any]:
    """Send a corpus to the split; return the first fields of its entry in ``dataset.json``."""
    rows, skipped, corrupt = 0, 0, Corrupt()
    report = corrupt.note if config.data.on_corrupt == "skip" else formats.fail
    for number, path in enumerate(corpus.files):
        for row, text in read(corpus, path, report):
            rows += 1
            if text is None or not text.strip() or not _is_unicode(text):
                skipped += 1
            else:
                split.add(Document(text=text, source=source, file=number, row=row))
    if split.documents_of[source] == 0:
        raise DataError(f"{corpus.name}: no document with text in {rows} rows", hint="use a larger corpus")
    inputs = f"inputs-{source:02d}.json"
    files.write_json(partial / inputs, [os.fspath(path) for path in corpus.files])
    return {
        "path": corpus.name,
        "rows": rows,
        "skipped_rows": skipped,
        "corrupt": corrupt.messages,
        "corrupt_count": corrupt.count,
        "inputs": inputs,
    }


class Corrupt:
    """Counts damage that is skipped, and keeps the first messages."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def note(self, error: DataError) -> None:
        """Count one damaged row or part of a file."""
        self.count += 1
        if len(self.messages) < _CORRUPT_KEPT:
            self.messages.append(error.message)
            print(f"skipped: {error.message}", file=sys.stderr)


def _publish(partial: Path, target: Path) -> None:
    """Rename the folder to its place, unless another process did so first."""
    if target.is_dir() and not (target / DATASET).is_file():
        shutil.rmtree(target)
    try:
        partial.rename(target)
    except OSError:
        if not (target / DATASET).is_file():
            raise


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogate: JSON can encode one, but UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Prepare the folder; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.data.prepare", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    prepare(load(arguments.config), arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
