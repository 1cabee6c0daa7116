"""`hlatctl show`: prints a run's configuration and provenance."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, announce, columns, find_run, print_json, say
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths


def show(
    run: RunName,
    origins: Annotated[bool, typer.Option("--origins", help="Print where each value came from.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Print a run's configuration and provenance.

    Prints two YAML documents, or JSON with --json. --origins prints the file, or the command line, or the amendment
    that set each value; the other values are defaults.
    """
    import yaml

    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    provenance = _provenance(paths)
    if origins:
        _show_origins(paths, provenance or {}, as_json=as_json)
        return
    if as_json:
        import dataclasses

        config = dataclasses.asdict(of_run(paths))
        print_json({"run_id": paths.run_id, "path": str(paths.root), "config": config, "provenance": provenance})
        return
    of_run(paths)  # raises if the file is damaged
    typer.echo(f"# {paths.config}\n{paths.config.read_text(encoding='utf-8')}---\n# {paths.provenance}")
    typer.echo(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


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
    typer.echo(columns([["key", "value", "origin"], *([k, str(v), keys[k]] for k, v in values.items())]))


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}
