"""`hlatctl show`: prints a run's configuration and provenance."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, announce, columns, find_run, print_json, say
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import AmendmentState


def show(
    run: RunName,
    created: Annotated[
        bool, typer.Option("--created", help="Show the configuration as it was, without amendments.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Print a run's configuration and provenance.

    Prints the amendments, and two YAML documents: the configuration with all amendments, and the provenance. Prints
    JSON with --json.
    """
    import dataclasses

    import yaml

    from conf.load import dump
    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    provenance, amendments = _provenance(paths), read_state(paths).amendments
    config = of_run(paths, number=0 if created else None)
    if as_json:
        print_json(
            {
                "run_id": paths.run_id,
                "path": str(paths.root),
                "config": dataclasses.asdict(config),
                "amendments": [dataclasses.asdict(amendment) for amendment in amendments],
                "provenance": provenance,
            }
        )
        return
    if amendments and not created:
        table = columns(_rows(amendments))
        typer.echo("\n".join(f"# {line}" for line in ["amendments", *table.splitlines()]))
    source = paths.config if created or not amendments else paths.amended_config(amendments[-1].number)
    typer.echo(f"# {source}\n{dump(config)}---\n# {paths.provenance}")
    typer.echo(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


def _rows(amendments: list[AmendmentState]) -> list[list[str]]:
    from hlatctl.report.numbers import amended
    from hlatctl.report.summary import AMENDMENTS, amendment_rows

    rows = [row for amendment in amendments for row in amendment_rows(amended(amendment))]
    return [[cell.upper() for cell in AMENDMENTS], *rows]


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}
