"""``python -m trainer.data.prepare --config FILE --to DIR``: corpus and tokenizer, ready to train on.

The folder gets uncompressed Arrow files (which the loader maps into memory), ``validation.jsonl``, ``tokenizer/`` and
``dataset.json`` last; it appears whole or not at all, and one that is there is left as it is.
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
from hlatctl.run.errors import DataError, cannot_write, run_main
from trainer.data import formats, tokenizer
from trainer.data.corpus import Corpus, check, check_vocabulary, read
from trainer.data.documents import Documents
from trainer.data.encoder import make_encoder
from trainer.data.split import COLUMN, Document, Split
from trainer.new_folder import partial_folder

DATASET = "dataset.json"
#: Messages about damage that is skipped which ``dataset.json`` keeps; all of it is counted.
_CORRUPT_TOLD = 20
#: What the estimate of a source's tokens is taken from, at most.
_SAMPLED_DOCUMENTS, _SAMPLED_BYTES = 512, 1 << 20
#: Kinds of unread files that the warning names.
_KINDS_TOLD = 5


def prepare(config: Config, target: Path) -> None:
    """Write the prepared folder of a configuration's corpus.

    Raises:
        DataError: corpus or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
        StorageError: the folder can't be written.
    """
    if (target / DATASET).is_file():
        return
    corpora = check(config)
    try:
        with partial_folder(target) as partial:
            _write(config, corpora, partial, target)
            _publish(partial, target)
    except OSError as error:
        raise cannot_write(target, error, hint="free space, or choose another runs_dir") from None


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
        own = [file for file in counts["files"] if file["source"] == index]
        entry.update(
            documents=sum(file["documents"] for file in own),
            text_bytes=sum(file["bytes"] for file in own),
            fingerprint=digest([file["sha256"] for file in own]),
            inputs=final(entry["inputs"]),
        )
        if not own:
            raise DataError(f"{entry['path']}: its documents are all held out", hint="lower data.validation_fraction")
        documents = Documents([file for file in here if file["source"] == index])
        entry["estimated_tokens"] = _estimated_tokens(documents, entry["text_bytes"], folder)
    held_out = files.sha256_file(partial / "validation.jsonl")
    dataset = {
        "v": 2,
        "text_column": COLUMN,
        **counts,
        "sources": entries,
        "fingerprint": digest([vocabulary["fingerprint"], held_out, *(entry["fingerprint"] for entry in entries)]),
        "skipped_rows": sum(entry["skipped_rows"] for entry in entries),
        "corrupt": [message for entry in entries for message in entry["corrupt"]][:_CORRUPT_TOLD],
        "corrupt_count": sum(entry["corrupt_count"] for entry in entries),
        "warnings": [*_unread(corpora), *_small_vocabulary(config, vocabulary["vocab_size"])],
        "files": [{**entry, "path": final(entry["path"])} for entry in counts["files"]],
        "validation": {**counts["validation"], "path": final("validation.jsonl")},
        "tokenizer": {**vocabulary, "path": final("tokenizer")},
    }
    files.write_sealed_json(partial / DATASET, dataset)


def _estimated_tokens(documents: Documents, text_bytes: int, folder: Path) -> int:
    """Tokens of a source, by those of documents that are spread evenly over it, up to a MiB of them."""
    encode = make_encoder(tokenizer.load(folder / tokenizer.TOKENIZER_JSON))
    tokens = sizes = 0
    for position in range(0, len(documents), max(1, len(documents) // _SAMPLED_DOCUMENTS)):
        text = documents[position]
        tokens, sizes = tokens + len(encode(text)) + 1, sizes + len(text.encode())
        if sizes >= _SAMPLED_BYTES:
            break
    return max(1, round(tokens / sizes * text_bytes))


def _unread(corpora: list[Corpus]) -> list[str]:
    found = [(corpus.name, sorted(corpus.unread.items(), key=lambda item: -item[1])) for corpus in corpora]
    return [
        f"data: {sum(n for _, n in kinds)} files in {name} are not read: "
        + ", ".join(f"{n} {kind}" for kind, n in kinds[:_KINDS_TOLD])
        + (", …" if len(kinds) > _KINDS_TOLD else "")
        for name, kinds in found
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
    """Send a corpus to the split; its entry in ``dataset.json``, as far as it is known."""
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
        raise DataError(f"{corpus.name}: no document with text in {rows} rows", hint="give a larger corpus")
    inputs = f"inputs-{source:02d}.json"
    files.write_json(partial / inputs, [os.fspath(path) for path in corpus.files])
    return {
        "path": corpus.name,
        "rows": rows,
        "skipped_rows": skipped,
        "corrupt": corrupt.told,
        "corrupt_count": corrupt.count,
        "inputs": inputs,
    }


class Corrupt:
    """Counts damage that is skipped, and keeps the first messages."""

    def __init__(self) -> None:
        self.count = 0
        self.told: list[str] = []

    def note(self, error: DataError) -> None:
        """Take one damaged row, or stretch of a file."""
        self.count += 1
        if len(self.told) < _CORRUPT_TOLD:
            self.told.append(error.message)
            print(f"skipped: {error.message}", file=sys.stderr)


def _publish(partial: Path, target: Path) -> None:
    """Rename the folder to its place, unless another process has been quicker."""
    if target.is_dir() and not (target / DATASET).is_file():
        shutil.rmtree(target)
    try:
        partial.rename(target)
    except OSError:
        if not (target / DATASET).is_file():
            raise


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character and can't be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    """Prepare; an exception says what is wrong."""
    parser = argparse.ArgumentParser(prog="trainer.data.prepare", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    prepare(load(arguments.config), arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
