"""`hlatctl show`: prints a run's configuration and provenance."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, announce, columns, find_run, print_json, say, write
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import LATEST
from hlatctl.run.state import AmendmentState


def show(
    run: RunName = LATEST,
    created: Annotated[
        bool, typer.Option("--created", help="Show the configuration as it was, without amendments.")
    ] = False,
    origins: Annotated[bool, typer.Option("--origins", help="Print where each value came from.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Print a run's configuration and provenance.

    Prints the amendments, and two YAML documents: the configuration with all amendments, and the provenance. Prints
    JSON with --json. --origins prints the file, or the command line, or the amendment that set each value; the other
    values are defaults.
    """
    import dataclasses

    import yaml

    from conf.load import dump
    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    provenance, amendments = _provenance(paths), read_state(paths).amendments
    config = of_run(paths, number=0 if created else None)
    if origins:
        _show_origins(paths, provenance or {}, as_json=as_json)
        return
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
        write("\n".join(f"# {line}" for line in ["amendments", *table.splitlines()]))
    source = paths.config if created or not amendments else paths.amended_config(amendments[-1].number)
    write(f"# {source}\n{dump(config)}---\n# {paths.provenance}")
    write(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


def _rows(amendments: list[AmendmentState]) -> list[list[str]]:
    from hlatctl.report.numbers import amended
    from hlatctl.report.summary import AMENDMENTS, amendment_rows

    rows = [row for amendment in amendments for row in amendment_rows(amended(amendment))]
    return [[cell.upper() for cell in AMENDMENTS], *rows]


def _show_origins(run: RunPaths, provenance: dict[str, Any], *, as_json: bool) -> None:
    from conf.load import flatten
    from conf.of_run import of_run
    from conf.origins import SCHEMA

    values = flatten(of_run(run))
    record = provenance.get("origins")
    known = isinstance(record, dict) and isinstance(record.get("keys"), dict)
    keys = dict.fromkeys(values, SCHEMA if known else "unknown")
    keys |= record["keys"] if isinstance(record, dict) and known else {}
    for amendment in read_state(run).amendments:
        keys |= dict.fromkeys(amendment.changes, f"amendment {amendment.number}")
    if as_json:
        rows = {key: {"value": value, "origin": keys[key]} for key, value in values.items()}
        print_json({"run_id": run.run_id, "origins": rows, "files": (record or {}).get("files", {})})
        return
    write(columns([["key", "value", "origin"], *([k, str(v), keys[k]] for k, v in values.items())]))


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}
