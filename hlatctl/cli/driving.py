"""Driving a run or a sweep from a terminal: progress while it goes on, a summary when it has ended."""

from __future__ import annotations

import sys

from hlatctl.cli.common import columns, look, read_state, say
from hlatctl.cli.progress import observer_for
from hlatctl.cli.summary import end_lines
from hlatctl.run.errors import HlatctlError
from hlatctl.run.paths import RunPaths, SweepPaths

#: Arms of a sweep that are shown when it has ended.
_MOST_ROWS = 20


def drive(run: RunPaths) -> None:
    """Bring a run to its end and tell how it went.

    Raises:
        HlatctlError: the flow's own error, with how to go on as its hint if it has none.
    """
    from flows import pretrain

    if read_state(run).evaluates:
        from hlatctl.cli.evaluate import judge

        judge(run)
        return
    say(f"run {run.run_id} in {run.root}")
    try:
        with observer_for(sys.stderr) as observer:
            pretrain.drive(run, observer)
    except HlatctlError as error:
        error.hint = error.hint or f"`hlatctl resume {run.run_id}` continues the run"
        raise
    for line in end_lines(look(run)):
        say(line)


def drive_sweep(sweep: SweepPaths) -> None:
    """Bring a sweep to its end and tell how its arms compare.

    Raises:
        HlatctlError: the flow's own error.
    """
    from flows.sweep import driver
    from hlatctl.report import sweep as report
    from hlatctl.run.journal import read_events
    from hlatctl.run.sweep import fold

    say(f"sweep {sweep.run_id} in {sweep.root}")
    driver.drive(sweep, say)
    state = fold(read_events(sweep))
    rows = report.rows(state)
    say()
    say(columns([report.header(state), *rows[:_MOST_ROWS]]))
    if len(rows) > _MOST_ROWS:
        say(f"and {len(rows) - _MOST_ROWS} more arms: hlatctl status {sweep.run_id}")
    say()
    say(columns([list(fact) for fact in report.facts(state)]))
