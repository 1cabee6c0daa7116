"""`hlatctl watch`: one screen with the running runs of a folder."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import RunsDir, columns, runs_folder, say
from hlatctl.run.simulated import marked
from hlatctl.units import count, duration, one_line, utc

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from hlatctl.report.live_runs import LiveRow

_REFRESH_S = 2.0
_HEADER = ["RUN", "STATUS", "STEP", "LOSS", "TOKENS/S", "LEFT", "WHAT"]
#: Lines of the screen besides those of runs.
_OTHER_LINES = 4


def watch(
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once, as without a terminal, and return.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show all running runs on one screen.

    Shows also the runs that ended within a day. Runs that need a person come first. `q` or Ctrl-C ends it.
    """
    from hlatctl.report.live_runs import LiveRuns

    folder = runs_folder(runs_dir)
    live = LiveRuns(folder)
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        found = live.refresh()
        if found:
            typer.echo(columns([_HEADER, *map(_cells, found)]))
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
    return [
        row.run_id,
        marked(row.status, simulated=row.simulated) + (" !" if row.needs_person else ""),
        f"{row.step}/{row.total_steps or '?'}",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.tokens_per_s is None else count(row.tokens_per_s),
        "-" if row.left_s is None else duration(row.left_s),
        row.what,
    ]


class _Screen:
    """The table, drawn for the terminal's size at that moment."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.rows: list[LiveRow] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        import time

        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, expand=True, padding=(0, 2, 0, 0))
        for name in _HEADER:
            least = {"RUN": 12, "STATUS": 9, "WHAT": 8}.get(name)
            table.add_column(
                name, no_wrap=True, overflow="ellipsis", min_width=least, ratio=1 if name == "WHAT" else None
            )
        room = max(1, console.size.height - _OTHER_LINES)
        for row in self.rows[:room]:
            style = "bold red" if row.needs_person else ""
            table.add_row(*(Text(one_line(cell), style=style) for cell in _cells(row)))
        left_out = len(self.rows) - room
        needing = sum(row.needs_person for row in self.rows)
        yield Text(f"{self._folder}  {utc(time.time())}", no_wrap=True, overflow="ellipsis")
        yield table
        more = f"{left_out} more · " if left_out > 0 else ""
        nothing = "" if self.rows else "no run is running · "
        yield Text(f"{nothing}{more}{needing} need a person (!) · q ends", no_wrap=True, overflow="ellipsis")


class _Keys:
    """Reads single keys from the terminal."""

    def pressed(self, wanted: str, timeout_s: float) -> bool:
        """Wait for a key; return whether it was the wanted one. A closed terminal counts as it."""
        ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
        if not ready:
            return False
        typed = os.read(sys.stdin.fileno(), 64)
        return not typed or wanted.encode() in typed.lower()


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Let the terminal give keys one by one, without showing them."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield _Keys()
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
