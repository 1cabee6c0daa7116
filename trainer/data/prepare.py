"""``python -m trainer.data.prepare --config FILE --to DIR``: prepare corpus and tokenizer for training.

Arrow files are indexed where they lie; other files are converted to Arrow by several processes. The folder contains the
index, the converted files, ``validation.jsonl``, ``tokenizer/`` and ``dataset.json`` last. It appears once it is
complete, and an existing one is not changed. Files that a killed process has converted are kept in ``.NAME.partial``.

Without ``--to`` it only checks corpus and tokenizer, within seconds: names, schemas and first lines. A corpus in object
storage is listed; the listing is kept for fingerprints.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conf.load import load
from conf.schema import Config
from hlatctl.run.errors import STORAGE_AWAY, HlatctlError, cannot_write, run_main
from hlatctl.run.files import fsync, locked_file
from hlatctl.run.paths import partial_data
from trainer.data import corpus
from trainer.data.corpus import Corpus, Task, convert, index_in_place, pieces_of, units_of
from trainer.data.dataset import DATASET, Prepared, write_dataset
from trainer.data.documents import TokenCorpus
from trainer.data.prepare_tokens import check_tokens, fetch_indexes, write_token_dataset
from trainer.data.remote import in_words, is_remote, stand_ins, tidy
from trainer.data.workers import Progress, spread

_Checked = tuple[list[TokenCorpus], list[Corpus]]
_LOCK, _PROGRESS = ".lock", "progress"


def check(config: Config) -> None:
    """Check the corpus of a configuration with the code that prepares it, but without reading all of it.

    Raises:
        HlatctlError: names the problem.
    """
    if not is_remote(config):
        _check(config, whole=False)
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-") as folder, _named_by_url():
        _check(stand_ins(config, Path(folder), fresh=True), whole=False)


def prepare(config: Config, target: Path) -> None:
    """Write the prepared folder of a configuration's corpus, or wait for another process that is writing it.

    Raises:
        DataError: corpus or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
        StorageError: the folder can't be written.
    """
    if (target / DATASET).is_file():
        return
    checked = None if is_remote(config) else _check(config, whole=True)
    try:
        with _partial_folder(target) as partial:
            if partial is not None:
                _fill(config, checked, partial, target)
                _publish(partial, target)
    except OSError as error:
        raise cannot_write(target, error, hint="free space, or set another runs_dir") from None


def _fill(config: Config, checked: _Checked | None, partial: Path, target: Path) -> None:
    """Write the prepared folder. Stand-ins replace corpora in object storage, and are prepared like local folders."""
    with _named_by_url():
        here = config if checked else stand_ins(config, partial, fresh=False)
        tokens, corpora = checked or _check(here, whole=True)
        if tokens:
            write_token_dataset(here, tokens, partial, target)
        else:
            _write(here, corpora, partial, target)


@contextmanager
def _named_by_url() -> Iterator[None]:
    """Name objects by their URLs in errors, instead of their stand-ins."""
    try:
        yield
    except HlatctlError as error:
        error.message, error.hint = in_words(error.message), in_words(error.hint)
        raise


def _check(config: Config, *, whole: bool) -> _Checked:
    """Return the checked corpora: of token ids, otherwise of text. ``whole``: a preparation follows."""
    fetch_indexes(config, whole=whole)
    tokens = check_tokens(config)
    return tokens, [] if tokens else corpus.check(config)


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path | None]:
    """Yield the folder to fill, locked by this process; None if another process has written the target meanwhile.

    The folder is removed if the corpus has an error. After a kill, on a full disk, or when storage fails, it stays, and
    the next call continues.
    """
    folder = partial_data(target)
    lock = folder / _LOCK
    while True:
        with locked_file(lock) as held:
            if (target / DATASET).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                yield None
                return
            if not lock.is_file() or lock.stat().st_ino != os.fstat(held.fileno()).st_ino:
                continue  # its holder has removed the folder
            try:
                yield folder
            except HlatctlError as error:
                if error.code != STORAGE_AWAY:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            return


def _write(config: Config, corpora: list[Corpus], partial: Path, target: Path) -> None:
    pieces = [pieces_of(source, corpus) for source, corpus in enumerate(corpora)]
    fraction, skip = config.data.validation_fraction, config.data.on_corrupt == "skip"
    total_bytes = sum(piece.size for own in pieces for piece in own)
    with ExitStack() as stack:
        progress = Progress("data", total_bytes, partial / _PROGRESS)
        in_place, rest = index_in_place(stack, pieces, partial, progress, fraction=fraction, skip=skip)
        tasks = [Task(unit=unit, folder=partial) for unit in units_of(rest, fraction=fraction, skip=skip)]
        units = list(spread(convert, tasks, progress))
        prepared = Prepared(corpora=corpora, pieces=pieces, in_place=in_place, units=units)
        write_dataset(config, prepared, partial, target)


def _publish(partial: Path, target: Path) -> None:
    """Rename the folder to its final name, without the files that only the preparation needs."""
    tidy(partial, keep=(".idx", ".bin"))
    for path in [partial / _LOCK, partial / _PROGRESS, *partial.glob("unit-*.json"), *partial.glob("held-out-*.jsonl")]:
        path.unlink(missing_ok=True)
    if (target / DATASET).is_file():  # a process on another host was faster; its lock isn't visible here
        shutil.rmtree(partial)
        return
    shutil.rmtree(target, ignore_errors=True)  # it has no dataset.json
    partial.rename(target)
    fsync(target.parent)


def main(argv: list[str] | None = None) -> int:
    """Prepare the folder, or check; an error names the problem."""
    parser = argparse.ArgumentParser(prog="trainer.data.prepare", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration")
    parser.add_argument("--to", type=Path, help="folder to write; default: only check")
    arguments = parser.parse_args(argv)
    config = load(arguments.config)
    if arguments.to is None:
        check(config)
    else:
        prepare(config, arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
