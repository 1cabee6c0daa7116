"""``python -m trainer.data.prepare --config FILE --to DIR``: corpus and tokenizer, ready to train on.

The folder gets uncompressed Arrow files (which the loader maps into memory), ``validation.jsonl``, ``tokenizer/`` and
``dataset.json`` last; it appears whole or not at all, and one that is there is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from conf.load import load
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError, StorageError, run_main
from trainer.data import corpus, tokenizer
from trainer.data.documents import Documents

DATASET = "dataset.json"
COLUMN = "text"
_BATCH_BYTES = 4 << 20
_FILE_BYTES = 1 << 30


def prepare(config: Config, target: Path) -> None:
    """Write the prepared folder of a configuration's corpus.

    Raises:
        DataError: corpus or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
        StorageError: the folder can't be written.
    """
    if (target / DATASET).is_file():
        return
    sources = corpus.check(config)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write(config, sources, partial, target)
        _publish(partial, target)
    except OSError as error:
        raise StorageError(
            f"{target}: can't be written ({error.strerror})", hint="free space, or choose another runs_dir"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(config: Config, sources: list[corpus.Source], partial: Path, target: Path) -> None:
    rows: Counter[str] = Counter()
    with closing(_Split(partial, config.data.validation_fraction)) as split:
        for source in sources:
            for text in corpus.read(source, config.data.text_column):
                split.add(text)
                rows[source.name] += 1
        counts = split.finish(os.fspath(config.data.path or config.data.source))
    folder = partial / "tokenizer"
    path = Path(config.tokenizer.path) if config.tokenizer.path else None
    texts = iter(Documents([partial / name for name in split.names]))
    tokenizer.prepare(path, folder, texts=texts, train_vocab_size=config.tokenizer.train_vocab_size)
    vocabulary = tokenizer.describe(folder)
    _check_vocabulary(config, vocabulary["vocab_size"])
    dataset = {
        "v": 1, "fingerprint": _fingerprint(partial, split.names, vocabulary), "text_column": COLUMN, **counts,
        "files": [{**entry, "path": os.fspath((target / entry["path"]).absolute())} for entry in counts["files"]],
        "validation": {**counts["validation"], "path": os.fspath((target / "validation.jsonl").absolute())},
        "tokenizer": {**vocabulary, "path": os.fspath((target / "tokenizer").absolute())},
        "sources": [{"path": name, "rows": count} for name, count in rows.items()],
    }  # fmt: skip
    files.write_json(partial / DATASET, dataset)


def _check_vocabulary(config: Config, vocab_size: int) -> None:
    if vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: below the {vocab_size} tokens of the tokenizer "
            f"(tokenizer.path={config.tokenizer.path})",
            hint=f"set model.vocab_size={vocab_size} or more",
        )


def _fingerprint(folder: Path, names: list[str], vocabulary: dict[str, Any]) -> str:
    """Of the content: equal corpora and tokenizers get equal ones, wherever they lie."""
    digest = hashlib.sha256(vocabulary["fingerprint"].encode())
    for name in [*names, "validation.jsonl"]:
        digest.update(files.sha256_file(folder / name).encode())
    return digest.hexdigest()[:16]


def _publish(partial: Path, target: Path) -> None:
    """Rename the folder to its place, unless another process has been quicker."""
    if target.is_dir() and not (target / DATASET).is_file():
        shutil.rmtree(target)
    try:
        partial.rename(target)
    except OSError:
        if not (target / DATASET).is_file():
            raise


class _Split:
    """Sends each document to the training files or to the held-out file, and counts.

    The first document trains. Of the others a hash of their position chooses; the last one is held out if that has
    chosen none, so neither side is ever empty.
    """

    def __init__(self, folder: Path, validation_fraction: float) -> None:
        self._folder, self._fraction = folder, validation_fraction
        self._held_out = (folder / "validation.jsonl").open("w", encoding="utf-8")
        self._writer: _ArrowWriter | None = None
        self._files: list[dict[str, Any]] = []
        self._validation = {"documents": 0, "text_bytes": 0}
        self._waiting: str | None = None
        self.rows = self._documents = self._skipped = 0

    @property
    def names(self) -> list[str]:
        """Training files written."""
        return [entry["path"] for entry in self._files]

    def add(self, text: str | None) -> None:
        """Take a row; one without text is counted and left out."""
        self.rows += 1
        if text is None or not text.strip() or not _is_unicode(text):
            self._skipped += 1
            return
        self._documents += 1
        if self._waiting is not None:
            self._place(self._waiting, self._documents - 2)
        self._waiting = text

    def close(self) -> None:
        """Release the files, finished or not."""
        self._close_file()
        self._held_out.close()

    def finish(self, source: str) -> dict[str, Any]:
        """Place the last document and finish the files; the counts of ``dataset.json``."""
        if self._waiting is None or self._documents < 2:
            raise DataError(
                f"data.path={source}: {self._documents} documents with text in {self.rows} rows; "
                "one to train on and one to hold out are needed",
                hint="give a larger corpus",
            )
        if self._validation["documents"]:
            self._place(self._waiting, self._documents - 1)
        else:
            self._hold_out(self._waiting)
        self.close()
        return {
            "files": self._files, "validation": self._validation, "skipped_rows": self._skipped,
            "documents": sum(entry["documents"] for entry in self._files),
            "text_bytes": sum(entry["bytes"] for entry in self._files),
        }  # fmt: skip

    def _place(self, text: str, position: int) -> None:
        share = int.from_bytes(hashlib.sha256(str(position).encode()).digest()[:8], "big") / 2**64
        if position and share < self._fraction:
            self._hold_out(text)
            return
        if self._writer is None:
            name = f"part-{len(self._files):05d}.arrow"
            self._writer = _ArrowWriter(self._folder / name)
        self._writer.add(text)
        if self._writer.bytes >= _FILE_BYTES:
            self._close_file()

    def _hold_out(self, text: str) -> None:
        self._held_out.write(json.dumps({COLUMN: text}) + "\n")
        self._validation["documents"] += 1
        self._validation["text_bytes"] += len(text.encode())

    def _close_file(self) -> None:
        if self._writer:
            self._files.append(self._writer.close())
            self._writer = None


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character and can't be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _ArrowWriter:
    """One uncompressed Arrow IPC file, written in batches."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schema = pa.schema([(COLUMN, pa.large_string())])
        self._sink: IO[bytes] = path.open("wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._batch: list[str] = []
        self._batch_bytes = 0
        self.documents = self.bytes = 0

    def add(self, text: str) -> None:
        """Take a document."""
        size = len(text.encode())
        self._batch.append(text)
        self._batch_bytes += size
        self.bytes += size
        self.documents += 1
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the file, durably; its entry in ``dataset.json``."""
        self._flush()
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        return {"path": self._path.name, "documents": self.documents, "bytes": self.bytes}

    def _flush(self) -> None:
        if self._batch:
            self._writer.write_batch(pa.record_batch([pa.array(self._batch, pa.large_string())], schema=self._schema))
        self._batch, self._batch_bytes = [], 0


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
