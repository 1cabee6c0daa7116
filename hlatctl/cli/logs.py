"""`hlatctl logs`: the output of a run's processes, as it comes."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, find_run, look
from hlatctl.run.errors import HlatctlError
from hlatctl.run.paths import RunPaths

_POLL_S = 0.5
_BLOCK_BYTES = 1 << 16


def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only this training process.", min=0)] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print the newest attempt's logs.

    With -f, goes on over restarts until the run has ended.
    """
    found = find_run(run, runs_dir)
    printer = _Printer(rank)
    printer.print_new(_newest_folder(found))
    if not follow and not printer.seen:
        which = "logs" if rank is None else f"log of rank {rank}"
        raise HlatctlError(
            f"run {found.run_id}: no {which} yet in {_newest_folder(found)}",
            hint=f"see `hlatctl status {found.run_id}`",
        )
    while follow:
        ended = look(found).ended  # looked at first: what is written until then is still printed
        printer.print_new(_newest_folder(found))
        if ended:
            return
        time.sleep(_POLL_S)


def _newest_folder(run: RunPaths) -> Path:
    """The newest attempt's folder that holds a log; attempt 0 is everything before training."""
    folders = sorted((run.root / "logs").glob("attempt-*"), reverse=True)
    return next((folder for folder in folders if any(folder.rglob("*.log"))), run.logs(0))


class _Printer:
    """Prints what is new in log files, each part under the name of its file where there are several."""

    def __init__(self, rank: int | None) -> None:
        self.seen: dict[Path, _Reader] = {}
        self._rank = rank
        self._shown: Path | None = None

    def print_new(self, folder: Path) -> None:
        # A job's log holds what all its processes print; below it each has a file of its own.
        of_rank = (path for path in folder.rglob("*.log") if self._rank is not None and _is_of_rank(path, self._rank))
        for path in sorted(folder.glob("*.log") if self._rank is None else of_rank):
            for block in self._read_new(path):
                if self._shown != path:
                    typer.echo(f"==> {path.relative_to(folder.parent)} <==", err=True)
                    self._shown = path
                typer.echo(block, nl=False)

    def _read_new(self, path: Path) -> Iterator[str]:
        reader = self.seen.setdefault(path, _Reader())
        with path.open("rb") as file:
            file.seek(reader.offset)
            while block := file.read(_BLOCK_BYTES):
                yield reader.take(block)


class _Reader:
    """How far a file has been read; a character that is not there whole yet waits for its rest."""

    def __init__(self) -> None:
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, block: bytes) -> str:
        self.offset += len(block)
        return self._decoder.decode(block)


def _is_of_rank(path: Path, rank: int) -> bool:
    """By torchrun's layout (``…/<rank>/stdout.log``) or by the file's name (``node0-3.log``, ``rank00003.log``)."""
    digits = re.search(r"(\d+)$", path.stem)
    return path.parent.name == str(rank) or (digits is not None and int(digits.group(1)) == rank)
