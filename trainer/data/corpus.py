"""The corpus that a configuration names, as a stream of documents. Where they go is prepare's business."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from hlatctl.run.errors import DataError
from trainer.data import formats, tokenizer


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus.

    Args:
        path: the file.
        name: under which its rows are counted.
        whole: it is one document, whatever its format.
    """

    path: Path
    name: str
    whole: bool = False


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
    if not source.whole:
        yield from formats.read_documents(source.path, column)
        return
    try:
        yield source.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        yield None  # the standard library holds such files to test its own decoder
    except OSError as error:
        raise DataError(f"{source.path}: not readable ({error.strerror})") from None


def _standard_library() -> list[Source]:
    """The sources of the running interpreter's standard library, one document a file."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    if not found:
        raise DataError(
            f"data.source=python_stdlib: {root} holds no .py files",
            hint="use an interpreter that comes with its sources, or set data.path",
        )
    return [Source(path=path, name=str(root), whole=True) for path in found]
