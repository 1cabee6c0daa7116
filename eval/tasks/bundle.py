"""Download CORE's bundle, an archive with the items of its tasks, and unpack only the files that are asked for.

The archive is somebody else's, and no checksum of it is published. So it is read within limits of size, and no path of
it is used: the files that this project knows are looked up by name, and each is written where this project wants it.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from eval.tasks import core
from eval.tasks.data_files import ELSEWHERE, refuse_offline
from hlatctl.run.errors import DataError, StorageError
from hlatctl.run.files import fsync, new_file
from hlatctl.units import size

#: The archive that nanochat downloads (scripts/base_eval.py); a folder `eval_bundle` with some 40 files.
URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
#: The archive has some 160 MB. These limits end a download or a file that never ends.
MOST_BYTES, MOST_FILE_BYTES = 1 << 30, 1 << 29
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 20.0
_COPY = "the archive has changed: copy the folder eval_bundle of an earlier download, such as nanochat's, into DIR"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def download(places: Iterable[str], to: Path) -> None:
    """Fetch the archive and write files of it below a data folder, with its own description of the tasks.

    Args:
        places: files below the data folder, as the archive has them.

    Raises:
        DataError: the archive can't be fetched, is damaged or too large, or lacks a file.
    """
    refuse_offline()
    described = [f"{core.BUNDLE}/{name}" for name in (core.CONFIG, core.BASELINES)]
    print(URL, file=sys.stderr, flush=True)
    with _opened() as answer:
        try:
            to.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=to) as archive:
                _copy(_Answer(answer), archive, MOST_BYTES, URL)
                unpack(archive, [*places, *described], to)
        except OSError as error:
            raise StorageError(f"--to={to}: {error.strerror or error}") from None


def _opened() -> IO[bytes]:
    try:
        answer: IO[bytes] = urllib.request.urlopen(URL, timeout=_TIMEOUT_S)
    except OSError as error:
        raise _unreachable(error) from None
    return answer


class _Answer:
    """An answer whose errors are the network's, not the disk's."""

    def __init__(self, answer: IO[bytes]) -> None:
        self._answer = answer

    def read(self, most: int) -> bytes:
        try:
            return self._answer.read(most)
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(error) from None


def _unreachable(error: Exception) -> DataError:
    reason = getattr(error, "reason", error)
    return DataError(f"{URL}: can't be fetched ({reason}), so nothing was written", hint=ELSEWHERE)


def unpack(archive: IO[bytes], places: Iterable[str], to: Path) -> None:
    """Write the named files of an archive below a folder, each atomically; the arguments are those of `download`."""
    try:
        with zipfile.ZipFile(archive) as packed:
            for place in dict.fromkeys(places):
                target = to / place
                target.parent.mkdir(parents=True, exist_ok=True)
                with packed.open(place) as source, new_file(target) as temporary, temporary.open("wb") as file:
                    _copy(source, file, MOST_FILE_BYTES, place)
                fsync(target.parent)
    except KeyError:
        raise DataError(f"{URL}: has no file {place}", hint=_COPY) from None
    except _DAMAGED as error:
        raise DataError(f"{URL}: can't be unpacked ({error})", hint="repeat the command") from None


def _copy(source: IO[bytes] | _Answer, target: IO[bytes], most: int, title: str) -> None:
    copied = 0
    while block := source.read(_BLOCK_BYTES):
        copied += len(block)
        if copied > most:
            raise DataError(f"{title}: has more than {size(most)}, so it was not written", hint=_COPY)
        target.write(block)
