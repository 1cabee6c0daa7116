"""`hlatctl logs`: prints a run's events and the output of its processes.

Of the journal it prints stages, every tenth step, checkpoints and evaluations. A run of 2 M steps has 200,000 step
lines, so the first read starts in the last MiB of each journal file.
"""

from __future__ import annotations

import codecs
import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import RunName, RunsDir, announce, find_run, say, write
from hlatctl.driver_job import driver_job
from hlatctl.run import rank_output
from hlatctl.run.errors import HlatctlError
from hlatctl.run.events import line_of
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import Event, JournalTail, train_writer
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import LATEST
from hlatctl.units import one_line, utc

#: Steps between two lines, as torchtitan's `log_freq`.
EVERY_STEPS = 10
#: Lines of one task of an evaluation.
_PARTS_OF_A_TASK = 10
#: Bytes at the end of each journal file that the first read covers.
_RECENT_BYTES = 1 << 20


class JournalLines:
    """Reads new events of a run's journal as lines of text.

    Args:
        rank: read only the events of this training process; None: all events.
    """

    def __init__(self, run: RunPaths, rank: int | None = None) -> None:
        self._tail = JournalTail(run, _recent(run))
        self._writer = None if rank is None else train_writer(rank)
        self._shown_step: int | None = None
        self._shown_part: tuple[str, int] = ("", 0)

    def read_new(self) -> Iterator[str]:
        """Yield the lines of the events since the last call, in order of time."""
        for event in self._tail.read_new():
            if self._writer not in (None, event["writer"]):
                continue
            try:
                text = self._text(event)
                line = f"{utc(event['time_unix_s'])}  {text}"
            except DAMAGED:
                continue  # `hlatctl status` reports events without their fields
            if text:
                yield one_line(line)

    def _text(self, event: Event) -> str:
        kind = event["kind"]
        if kind == "train_started":
            self._shown_step = None
        if (kind == "step" and not self._is_time(int(event["step"]))) or (
            kind == "eval_progress" and not self._is_new_part(event)
        ):
            return ""
        return line_of(event)

    def _is_time(self, step: int) -> bool:
        last = self._shown_step
        if last is not None and step // EVERY_STEPS <= last // EVERY_STEPS:
            return False
        self._shown_step = step
        return True

    def _is_new_part(self, event: Event) -> bool:
        part = str(event["task"]), _PARTS_OF_A_TASK * int(event["done"]) // max(1, int(event["total"]))
        shown, self._shown_part = self._shown_part, part
        return part != shown


def _recent(run: RunPaths) -> dict[str, int]:
    offsets = {}
    for path in run.journal.glob("*.jsonl"):
        begin = path.stat().st_size - _RECENT_BYTES
        if begin > 0:
            with path.open("rb") as file:
                file.seek(begin)
                offsets[path.stem] = begin + len(file.readline(_RECENT_BYTES))
    return offsets


_POLL_S = 0.5
#: Seconds between two questions to a scheduler.
_ASK_S = 30.0
_BLOCK_BYTES = 1 << 16
#: Longer unfinished lines are printed as they are.
_MAX_LINE_BYTES = 1 << 20
#: Colours, which are removed, and codes that redraw a line: a progress bar becomes one line for each state.
_COLORS, _REDRAWS = re.compile("\x1b\\[[0-9;]*m"), re.compile("\r+\n?")
_NODE = re.compile(r"node-\d+")
_OF_OTHER_NODE = re.compile(r"\.node-(\d+)\.log$")


def logs(
    run: RunName = LATEST,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run has ended.")] = False,
    rank: Annotated[int | None, typer.Option(help="Print only this rank.", min=0)] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Print only the output of this attempt; 0: of the jobs before training.", min=0)
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Print only the output of a stage: driver, data, compile, train, eval, ..."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print the output of all attempts, stages and nodes.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Print a run's events, and its newest attempt's output.

    Prints the newest journal entries first: stages, every tenth step, checkpoints, evaluations, restarts. Then prints
    the output of the first node's processes, or with --rank of one process on any node. `--stage driver` prints what
    the driver has decided. With -f, continues across restarts until the run has ended.
    """
    paths = find_run(run, runs_dir)
    announce(paths)
    if stage is not None:
        _check_stage(paths, stage)
    printer = _Printer(paths, rank, attempt, stage=stage, everything=everything)
    printer.print_new()
    if not follow and not printer.printed:
        _nothing(printer)
    jobs = _DriverJobs(paths)
    while follow:
        # Checked first, so that the last output is printed.
        ended = driver_pid(paths) is None and not jobs.are_left
        printer.print_new()
        if ended:
            return
        time.sleep(_POLL_S)


class _DriverJobs:
    """Whether a scheduler's job still drives a run or will do so. Asks the scheduler every 30 s."""

    def __init__(self, run: RunPaths) -> None:
        self._place, self._asked_s, self._left = run.driver_job, -math.inf, True

    @property
    def are_left(self) -> bool:
        chain = driver_job(self._place)
        if chain is None:
            return False
        if time.monotonic() - self._asked_s >= _ASK_S:
            from flows.control import none_left
            from flows.launch.base import driver_jobs

            with suppress(HlatctlError):  # the scheduler is away, or can't be asked here: nothing is known
                self._left = driver_jobs(self._place) != ""
            if not self._left:
                say(f"the run's driver: {none_left(self._place, chain)}")
            self._asked_s = time.monotonic()
        return self._left


def _check_stage(run: RunPaths, stage: str) -> None:
    """Refuse a stage that has no output yet.

    Raises:
        HlatctlError: names those that have.
    """
    known = sorted({_stage_of(path) for path in (run.root / "logs").rglob("*.log")})
    if stage not in known:
        raise HlatctlError(
            f"--stage={stage}: run {run.run_id} has no output of such a stage",
            hint=f"it has that of: {', '.join(known)}" if known else f"`hlatctl status {run.run_id}` shows its state",
        )


def _stage_of(path: Path) -> str:
    """Return the stage of a log: ``eval`` of ``eval-10240.log``, ``train`` of ``train.node-3.log``."""
    if path.parent.name.isdigit():  # a process of torchrun's, on Kubernetes
        path = next(parent for parent in path.parents if parent.parent.name.startswith("attempt-"))
    name = path.name.split(".")[0]
    return name.rpartition("-")[0] if name.rpartition("-")[2].isdigit() else name


def _nothing(printer: _Printer) -> None:
    """Print that the logs are empty.

    Raises:
        HlatctlError: there is no log.
    """
    name, rank = printer.run.run_id, printer.rank
    which = "logs" if rank is None else f"output of rank {rank}"
    if not printer.found:
        raise HlatctlError(
            f"run {name}: no {which} yet in {printer.folder}", hint=f"`hlatctl status {name}` shows the run's state"
        )
    say(f"rank {rank} has printed nothing" if rank is not None else "the run has printed nothing")


def _newest_folder(run: RunPaths) -> Path:
    """Return the newest attempt's folder that contains a log. Attempt 0 is everything before training."""
    folders = sorted((run.root / "logs").glob("attempt-*"), reverse=True)
    return next((folder for folder in folders if any(folder.rglob("*.log"))), run.logs(0))


class _Printer:
    def __init__(
        self,
        run: RunPaths,
        rank: int | None,
        attempt: int | None = None,
        *,
        stage: str | None = None,
        everything: bool = False,
    ) -> None:
        self.printed = self.found = False
        self._seen: dict[Path, _Reader] = {}
        self.run, self.rank = run, rank
        self._attempt, self._per_node = attempt, 0
        self._stage, self._everything = stage, everything
        self._journal = JournalLines(run, rank)
        self._shown, self._open_line = "", False

    @property
    def folder(self) -> Path:
        return _newest_folder(self.run) if self._attempt is None else self.run.logs(self._attempt)

    def print_new(self) -> None:
        for line in self._journal.read_new() if self._attempt is None and self._stage is None else ():
            self._print("journal", f"{line}\n")
        if self._stage is None and not self._everything:
            self._print_logs(self.folder)
            return
        top = self.run.root / "logs" if self._attempt is None else self.folder
        for path in sorted(top.rglob("*.log"), key=lambda path: (path.parent != top, path)):
            if self._stage in (None, _stage_of(path)):
                self.found = True
                for text in filter(None, self._read_new(path, self.rank if _has_ranks(path) else None)):
                    self._print(str(path.relative_to(self.run.root / "logs")), text)

    def _print(self, name: str, text: str) -> None:
        if self._shown != name:
            if self._open_line:
                write()
            say(f"==> {name} <==")
            self._shown = name
        write(_REDRAWS.sub("\n", _COLORS.sub("", text)), nl=False)
        self.printed, self._open_line = True, not text.endswith("\n")

    def _print_logs(self, folder: Path) -> None:
        # A node's log has the lines of all its ranks. On Kubernetes, each rank has a file in a subfolder.
        own = {path for path in folder.rglob("*.log") if self.rank is not None and _is_of_rank(path, self.rank)}
        node = self._node_of_rank(folder)
        shared = {path for path in folder.glob("*.log") if _node_of(path) == node} - own
        self.found |= bool(shared if self.rank is None else own)
        for path in sorted(own | shared):
            for text in filter(None, self._read_new(path, self.rank if path in shared else None)):
                self._print(str(path.relative_to(folder.parent)), text)

    def _node_of_rank(self, folder: Path) -> int:
        """Return the node whose log is printed; without a rank, the first one, because there can be thousands."""
        if not self.rank or not any(_node_of(path) for path in folder.glob("*.log")):
            return 0
        from conf.of_run import of_run

        self._per_node = self._per_node or of_run(self.run).cluster.processes_per_node
        return self.rank // self._per_node

    def _read_new(self, path: Path, rank: int | None) -> Iterator[str]:
        reader = self._seen.setdefault(path, _Reader(rank))
        with path.open("rb") as file:
            file.seek(reader.offset)
            while block := file.read(_BLOCK_BYTES):
                yield reader.take(block)


class _Reader:
    """The offset up to which a file has been read, and the bytes of an incomplete character or line.

    Args:
        rank: rank whose lines are read; None: all.
    """

    def __init__(self, rank: int | None) -> None:
        self.offset = 0
        self._rank, self._open_line = rank, b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, block: bytes) -> str:
        self.offset += len(block)
        if self._rank is None:
            return self._decoder.decode(block)
        *lines, self._open_line = (self._open_line + block).splitlines(keepends=True) or [b""]
        if self._open_line.endswith(b"\n") or len(self._open_line) > _MAX_LINE_BYTES:
            lines, self._open_line = [*lines, self._open_line], b""
        start = rank_output.prefix(self._rank)
        return b"".join(line[len(start) :] for line in lines if line.startswith(start)).decode(errors="replace")


def _has_ranks(path: Path) -> bool:
    return _stage_of(path) == "train" and not path.parent.name.isdigit()


def _node_of(path: Path) -> int:
    """Return the node of a log in an attempt's folder. The name of the first node's log has no number."""
    match = _OF_OTHER_NODE.search(path.name)
    return int(match[1]) if match else 0


def _is_of_rank(path: Path, rank: int) -> bool:
    """Match torchrun's layout: ``node-<number>/…/<local rank>/stdout.log``. Each node has the same number of ranks."""
    if not path.parent.name.isdigit():
        return False
    node = next((int(part.name[5:]) for part in path.parents if _NODE.fullmatch(part.name)), 0)
    on_node = sum(folder.name.isdigit() for folder in path.parent.parent.iterdir()) if node else 0
    return node * on_node + int(path.parent.name) == rank
