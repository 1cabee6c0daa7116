"""A folder that appears whole or not at all, and never in the place of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import StorageError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes the target when the block ends without an exception, else it is removed.

    Raises:
        StorageError: the target exists and is not an empty folder, or can't be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StorageError(f"--to={target}: exists and is not an empty folder", hint="name another, or remove it")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
        files.fsync_dir(target.parent)
    except OSError as error:
        raise StorageError(f"{target}: can't be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
