"""`hlatctl forecast`: forecasts when a run ends and what it costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hlatctl.cli.common import (
    ConfigDirs,
    Json,
    Overrides,
    RunsDir,
    columns,
    place,
    print_json,
    say,
    with_runs_dir,
    write,
)
from hlatctl.run import files
from hlatctl.run.errors import TrainingError
from hlatctl.run.simulated import WARNING
from hlatctl.units import counted

_LAUNCHER = "cluster.launcher=mock"


def forecast(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations per variant.")] = 20,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the simulations into this SVG file.", parser=place, show_default=False)
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Forecast when a run ends and what it costs.

    Simulates the run once per seed, with the same flow as `train --dry-run`. Then simulates variants of it: other
    checkpoint intervals, other numbers of spare nodes, slower starts, and no automatic restarts. Prints the median of
    each variant, and the duration that 95 % of its simulations don't exceed (p95). Nothing is trained,
    and the simulations' files are removed. The configuration's rehearsal.* keys describe the simulated cluster.
    """
    from conf.compose import compose
    from flows import forecast as simulations
    from hlatctl.report import forecast as report
    from hlatctl.report.figures import spending

    config = compose([*with_runs_dir(overrides, runs_dir), _LAUNCHER])
    say(WARNING)
    simulated = simulations.play_all(config, seeds, lambda variant: say(f"{counted(seeds, 'simulation')}: {variant}"))
    outlooks = {name: report.outlook(outcomes) for name, outcomes in simulated.items()}
    if figure:
        files.write_text(figure, spending.forecast(simulated).svg())
    first = next(iter(outlooks))
    if as_json:
        print_json({"simulated": True, "seeds": seeds, "variants": report.record(outlooks)})
    else:
        write(columns([[cell.upper() for cell in report.HEADER], *report.rows(outlooks)]) + "\n")
        write(columns([list(fact) for fact in report.facts(outlooks, seeds, time.time())]))
    if outlooks[first] is None:
        raise TrainingError(
            f"none of {counted(seeds, 'simulation')} finished; the first: {simulated[first][0].message}",
            hint="`hlatctl train --dry-run` with the same configuration shows one of them in full",
        )
