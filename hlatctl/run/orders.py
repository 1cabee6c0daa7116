"""Orders to a job that stays after its first work and takes more work of the same kind: files in a folder.

Whoever started the job writes ``NUMBER.json``, the arguments of ``python`` for the next work, and the job answers with
``NUMBER.done``. Number 0 is the work that the job was started with. A job whose work fails ends with the failure. A job
without an order for :data:`STAYS_S` ends with success, so an order without an answer must be given to another job.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hlatctl.run import files

#: The next order comes after an export, which takes half a minute on a busy machine.
STAYS_S = 60.0
_POLL_S = 0.05


def clear(folder: Path) -> None:
    """Remove the files of an earlier job, before another one is started."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def give(folder: Path, number: int, argv: tuple[str, ...]) -> None:
    """Give the next order."""
    files.write_json(folder / f"{number}.json", list(argv))


def is_done(folder: Path, number: int) -> bool:
    """Return whether the work of an order has succeeded."""
    return (folder / f"{number}.done").is_file()


def done(folder: Path, number: int) -> None:
    """Record that the work of an order has succeeded."""
    files.write_text(folder / f"{number}.done", "")


def coming(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the arguments of each order until none has come for a while."""
    number, last_s = 1, time.monotonic()
    while time.monotonic() - last_s < STAYS_S:
        try:
            argv = files.read_json(folder / f"{number}.json")
        except FileNotFoundError:
            time.sleep(_POLL_S)
            continue
        yield number, [str(word) for word in argv]
        number, last_s = number + 1, time.monotonic()
