"""`hlatctl goodput`: shows how a run spent its time."""

from __future__ import annotations

import dataclasses

from hlatctl.cli.common import Json, RunName, RunsDir, columns, find_run, print_json, write
from hlatctl.run.runs import LATEST


def goodput(run: RunName = LATEST, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Show how a run spent its time.

    Goodput, or effective training time ratio (ETTR), is the share of time spent on steps that count, without their
    waits for data. It is a share of the time from the first attempt's start to the newest attempt's last event.
    Uptime is the share of the same time in which steps followed one another. It includes lost steps, data waits and
    checkpoint stalls; restarts and pauses reduce it. Young's and Daly's checkpoint intervals are computed from the
    measured stall of a save and the measured time between failures. All figures come from the journal.
    """
    from conf.of_run import of_run
    from hlatctl.report import goodput
    from hlatctl.report.run_view import read_without_steps
    from hlatctl.run.simulated import noted

    paths = find_run(run, runs_dir)
    state, events = read_without_steps(paths)
    simulated = state.simulated
    account = goodput.measure_goodput(events, of_run(paths), state)
    if as_json:
        print_json({"run_id": paths.run_id, "simulated": simulated, **dataclasses.asdict(account)})
        return
    header, rows = goodput.time_table(account)
    write(
        columns(
            [
                ["run", noted(paths.run_id, simulated=simulated)],
                *([name, text] for name, text in goodput.facts(account)),
            ]
        )
        + "\n"
    )
    write(columns([[cell.upper() for cell in header], *rows]))
