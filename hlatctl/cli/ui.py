"""`hlatctl ui` and `hlatctl watch`: serve the live page of a runs folder, or show its running runs on the terminal.

`hlatctl ui` also serves the pages of Prefect and MLflow behind the live page.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunsDir, columns, runs_folder, say, write
from hlatctl.run.labels import leading, marked
from hlatctl.units import count, duration, one_line, utc

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from hlatctl.report.run_list import LiveRow


def ui(
    port: Annotated[int, typer.Option(help="Port of the page.", min=0, max=65535)] = 8400,
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's web page.", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's web page.", min=1, max=65535)] = 5000,
    page_only: Annotated[bool, typer.Option("--page-only", help="Don't start Prefect's and MLflow's servers.")] = False,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the page stop, resume, amend, label and archive runs.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Serve a page that shows all runs live.

    Prints the page's link, and serves it until Ctrl-C. Prefect's and MLflow's own pages start behind it. Runs don't
    need these servers.
    """
    from flows.live.serve import Options, serve

    options = Options(
        port=port, prefect_port=prefect_port, mlflow_port=mlflow_port, page_only=page_only, allow_control=allow_control
    )
    serve(runs_folder(runs_dir), options, _ready, say)


def _ready(link: str, auth: str) -> None:
    write(f"page\t{link}")
    if auth:
        user, _, password = auth.partition(":")
        say(f"Prefect's and MLflow's pages are starting; their user is {user}, their password {password}")
    say("press Ctrl-C to stop")


_REFRESH_S = 2.0
_HEADER = ["RUN", "STATUS", "STEP", "LOSS", "TOKENS/S", "LEFT", "WHAT"]
#: Lines of the screen besides those of runs; the last one of the terminal stays empty.
_OTHER_LINES = 4
_LEAST_RUN_WIDTH, _GAP = 12, 2


def watch(
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once, as without a terminal, and return.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show all running runs on one screen.

    Shows also the runs that ended within a day. Runs that need a person come first. `q` or Ctrl-C ends it.
    """
    from hlatctl.report.run_list import LiveRuns

    folder = runs_folder(runs_dir)
    live = LiveRuns(folder)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        found = live.refresh()
        if found:
            write(columns([_HEADER, *map(_cells, found)]))
        else:
            say(f"no run in {folder} is running, and none ended within a day")
        return
    from rich.console import Console
    from rich.live import Live

    screen = _Screen(str(folder))
    with (
        suppress(KeyboardInterrupt),
        _keys() as keys,
        Live(screen, console=Console(), screen=True, auto_refresh=False) as view,
    ):
        while True:
            screen.rows = live.refresh()
            view.refresh()
            if keys.pressed("q", _REFRESH_S):
                return


def _cells(row: LiveRow) -> list[str]:
    """Return a run's cells as plain text; all but the first and the last are numbers or a status."""
    return [
        row.run_id,
        marked(row.status, simulated=row.simulated) + (" !" if row.needs_person else ""),
        *_numbers(row),
        row.what,
    ]


def _numbers(row: LiveRow) -> list[str]:
    return [
        f"{row.step}/{row.total_steps or '?'}",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.tokens_per_s is None else count(row.tokens_per_s),
        "-" if row.left_s is None else duration(row.left_s),
    ]


class _Screen:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.rows: list[LiveRow] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for text, style in _lines(self._folder, self.rows, console.size.width, console.size.height):
            yield Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _lines(folder: str, known: list[LiveRow] | None, width: int, height: int) -> Iterator[tuple[str, str]]:
    """Yield each line of the screen and its style. ``known`` is None until the runs have been read."""
    rows = known or []
    cells = [[row.status + " !" * row.needs_person, *_numbers(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(_HEADER[1:-1], *cells, strict=True)]
    run_width = max(_LEAST_RUN_WIDTH, width - sum(widths) - _GAP * len(widths))
    yield f"{one_line(folder)}  {utc(time.time())}", ""
    yield _joined("RUN", _HEADER[1:-1], run_width, widths), "bold"
    room, left_out = height - _OTHER_LINES, 0
    for row, numbers in zip(rows, cells, strict=True):
        lines = [_joined(one_line(row.run_id), numbers, run_width, widths)]
        if what := leading(one_line(row.what), simulated=row.simulated).removesuffix(" · "):
            lines.append(f"  {what}")
        room -= len(lines)
        left_out += room < 0
        if not left_out:
            yield from ((line, "red" if row.needs_person else "") for line in lines)
    more = f"{left_out} more · " if left_out else ""
    nothing = "" if rows else "reading the runs · " if known is None else "no run is running · "
    yield f"{nothing}{more}{sum(row.needs_person for row in rows)} need a person (!) · q ends", ""


def _joined(run: str, cells: list[str], run_width: int, widths: list[int]) -> str:
    run = run if len(run) <= run_width else f"{run[: run_width - 1]}…"
    others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return (" " * _GAP).join([run.ljust(run_width), *others]).rstrip()


class _Keys:
    def pressed(self, wanted: str, timeout_s: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
        if not ready:
            return False
        typed = os.read(sys.stdin.fileno(), 64)
        return not typed or wanted.encode() in typed.lower()


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Switch the terminal to single keys without echo."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield _Keys()
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
