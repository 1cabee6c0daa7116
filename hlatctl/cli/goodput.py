"""`hlatctl goodput`: where a run's time went, and what it cost."""

from __future__ import annotations

import dataclasses

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, columns, find_run, print_json


def goodput(run: RunName, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Tell where a run's time went.

    Goodput, or effective training time ratio (ETTR), is the time of the steps that count, without their wait for data,
    of the time from the first attempt's start to the newest one's last sign of life. Uptime is the share of that time
    in which steps followed one another, lost ones, data wait and checkpoint stalls included: what restarts and pauses
    leave. Young's and Daly's intervals between checkpoints follow from the measured stall of a save and the measured
    time between failures. Everything comes from the journal.
    """
    import conf.load
    from hlatctl.report import ledger
    from hlatctl.run.fold import fold
    from hlatctl.run.journal import read_events
    from hlatctl.run.simulated import noted

    found = find_run(run, runs_dir)
    events = read_events(found)
    simulated = fold(events).simulated
    account = ledger.ledger(events, conf.load.load(found.config))
    if as_json:
        print_json({"run_id": found.run_id, "simulated": simulated, **dataclasses.asdict(account)})
        return
    header, rows = ledger.time_table(account)
    typer.echo(
        columns(
            [["run", noted(found.run_id, simulated=simulated)], *([name, text] for name, text in ledger.facts(account))]
        )
        + "\n"
    )
    typer.echo(columns([[cell.upper() for cell in header], *rows]))
