"""The corpus that a configuration names, as a stream of documents. Where they go is prepare's business."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from hlatctl.run.errors import DataError
from trainer.data import formats, tokenizer

#: Modules are cut into documents of about this size: one of the largest (a table of 100,000 tokens) would otherwise
#: fill a row of the batch for a third of the quickstart.
_MODULE_DOCUMENT_BYTES = 8 * 1024
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus.

    Args:
        path: the file.
        name: under which its rows are counted.
        module: it is a Python module of the standard library, not a file of the corpus's own formats.
    """

    path: Path
    name: str
    module: bool = False


def check(config: Config) -> list[Source]:
    """Everything that can be seen without reading the corpus; the files, in order.

    Raises:
        DataError: a path, file, column or tokenizer that can't be used.
    """
    if config.tokenizer.path is not None:
        tokenizer.kind_of(Path(config.tokenizer.path))
    if config.data.path is None:
        return _standard_library()
    files = formats.find_files(Path(config.data.path))
    for path in files:
        formats.check_file(path, config.data.text_column)
    return [Source(path=path, name=str(path)) for path in files]


def read(source: Source, column: str) -> Iterator[str | None]:
    """A file's documents; None or blank where a row has no text."""
    if not source.module:
        yield from formats.read_documents(source.path, column)
        return
    try:
        text = source.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield None  # the standard library holds such files to test its own decoder
    except OSError as error:
        raise DataError(f"{source.path}: not readable ({error.strerror})") from None
    else:
        yield from formats.cut(text.splitlines(keepends=True), _MODULE_DOCUMENT_BYTES)


def _standard_library() -> list[Source]:
    """The sources of the running interpreter's standard library, without its tests, which not every system installs."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(p for p in root.rglob("*.py") if not _NOT_THE_LIBRARY & set(p.relative_to(root).parts))
    if not found:
        raise DataError(
            f"data.source=python_stdlib: {root} holds no .py files",
            hint="use an interpreter that comes with its sources, or set data.path",
        )
    return [Source(path=path, name=str(root), module=True) for path in found]
