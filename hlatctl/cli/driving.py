"""Drives a run or a sweep from a terminal: progress while it runs, a summary when it ends."""

from __future__ import annotations

import sys

from conf.amendable import with_resume
from hlatctl.cli.common import columns, say, write
from hlatctl.cli.progress import observer_for
from hlatctl.cli.summary import end_lines
from hlatctl.report.run_view import view_run
from hlatctl.run.errors import HlatctlError
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths, SweepPaths

#: Arms of a sweep that are shown when it has ended.
_MOST_ROWS = 20


def drive(run: RunPaths, *, detach: bool) -> None:
    """Print the id of a run or a sweep and drive it to its end, here or in a process of its own.

    Raises:
        HlatctlError: the flow's own error.
    """
    write(run.run_id)
    sys.stdout.flush()
    if detach:
        _detach(run)
    elif isinstance(run, SweepPaths):
        _drive_sweep(run)
    elif read_state(run).evaluates:
        from hlatctl.cli.evaluate import evaluate_run

        evaluate_run(run)
    else:
        _drive_run(run)


def _detach(run: RunPaths) -> None:
    from flows.runtime import detached

    driver = detached.start_driver(run)
    is_sweep = isinstance(run, SweepPaths)
    say(f"the {'sweep' if is_sweep else 'run'}'s driver is process {driver.pid}; it continues if this terminal closes")
    say(f"hlatctl status {run.run_id}     shows its state")
    if not is_sweep:  # its trials have logs
        say(f"hlatctl logs {run.run_id} -f    prints its output")
    say(f"hlatctl stop {run.run_id}       stops it with a checkpoint")


def _drive_run(run: RunPaths) -> None:
    from flows import pretrain

    say(f"run {run.run_id} in {run.root}; Ctrl-C stops it with a checkpoint")
    try:
        with observer_for(sys.stderr) as observer:
            pretrain.drive(run, observer)
    except HlatctlError as error:
        error.hint = with_resume(error.hint, run.run_id)
        raise
    for line in end_lines(view_run(run)):
        say(line)


def _drive_sweep(sweep: SweepPaths) -> None:
    from flows.sweep import driver
    from hlatctl.report import sweep as report
    from hlatctl.report.run_view import view_sweep

    say(f"sweep {sweep.run_id} in {sweep.root}")
    driver.drive(sweep, say)
    state, _ = view_sweep(sweep)
    rows = report.rows(state)
    say()
    say(columns([report.header(state), *rows[:_MOST_ROWS]]))
    if len(rows) > _MOST_ROWS:
        say(f"and {len(rows) - _MOST_ROWS} more arms: hlatctl status {sweep.run_id}")
    say()
    say(columns([list(fact) for fact in report.facts(state)]))
