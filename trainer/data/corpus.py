"""The corpora of a configuration: their files, checked. ``trainer.data.prepare`` indexes or converts them."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.schema import Config
from hlatctl.run.errors import ConfigError, DataError
from trainer.data import formats, tokenizer
from trainer.data.damage import Row, fail
from trainer.data.stand_in import drop, fetch_ends, remote_of, shown

#: Modules are cut into documents of about this size. Otherwise one of the largest (a table of 100,000 tokens) would
#: fill a row of the batch for a third of the quickstart.
_MODULE_DOCUMENT_BYTES = 8 * 1024
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One corpus of the configuration's mixture.

    Args:
        name: its path.
        files: in order.
        column: of the text.
        unread: number of files in the folder that are not read, by suffix.
        modules: the files are Python modules of the standard library.
    """

    name: str
    files: list[Path]
    column: str
    unread: dict[str, int] = field(default_factory=dict)
    modules: bool = False


def check(config: Config) -> list[Corpus]:
    """Check everything that needs no full read; return the corpora in order.

    Raises:
        DataError: a path, file, column or tokenizer can't be used.
        ConfigError: the tokenizer is larger than the model's vocabulary.
    """
    if config.tokenizer.path is not None:
        check_vocabulary(config, tokenizer.look(Path(config.tokenizer.path))["vocab_size"])
    if not config.data.inputs:
        return [_standard_library()]
    corpora = [_corpus(Path(source.path), source.text_column or "") for source in config.data.inputs]
    for corpus in corpora:
        _check_files(corpus, skip=config.data.on_corrupt == "skip")
    return corpora


def check_vocabulary(config: Config, vocab_size: int) -> None:
    """Refuse a tokenizer that is larger than the model's embedding.

    Raises:
        ConfigError: it is larger than ``model.vocab_size``.
    """
    if vocab_size > config.model.vocab_size:
        divisor = config.parallel.tensor_parallel_size
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: below the {vocab_size} tokens of the tokenizer "
            f"(tokenizer.path={config.tokenizer.path})",
            hint=f"set model.vocab_size={-(-vocab_size // divisor) * divisor} or more",
        )


def _check_files(corpus: Corpus, *, skip: bool) -> None:
    """Check every file; if damage is skipped, at least one must be readable.

    Of a corpus in object storage, the ends of one file of each format are read: only the column is checked.
    """
    if remote_of(corpus.files[0]) is not None:
        for path in {formats.format_of(path): path for path in reversed(corpus.files)}.values():
            fetch_ends(path)
            formats.check_file(path, corpus.column, lambda _: None)
            drop(path)
        return
    damage: list[DataError] = []
    report = damage.append if skip else fail
    whole = [formats.check_file(path, corpus.column, report) for path in corpus.files]
    if damage and not any(whole):
        raise damage[0]


def read_module(path: Path) -> Iterator[Row]:
    """Yield the pieces of a Python module as rows; the text is None if it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield 1, None  # the standard library contains such files to test its own decoder
    except OSError as error:
        raise DataError(f"{path}: not readable ({error.strerror})") from None
    else:
        yield from enumerate(formats.cut(text.splitlines(keepends=True), _MODULE_DOCUMENT_BYTES), start=1)


def _corpus(path: Path, column: str) -> Corpus:
    files = formats.find_files(path)
    unread = formats.unread_files(path, set(files)) if path.is_dir() else {}
    return Corpus(name=shown(path), files=files, column=column, unread=unread)


def _standard_library() -> Corpus:
    """Return the interpreter's standard library, without its tests, which not every system installs."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = sorted(p for p in root.rglob("*.py") if not _NOT_THE_LIBRARY & set(p.relative_to(root).parts))
    if not modules:
        raise DataError(
            f"data.source=python_stdlib: {root} contains no .py files",
            hint="use an interpreter that comes with its sources, or set data.path",
        )
    return Corpus(name=str(root), files=modules, column="", modules=True)
