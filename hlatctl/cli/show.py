"""`hlatctl show`: what a run was asked to do and where it comes from."""

from __future__ import annotations

from typing import Any

import typer

from hlatctl.cli.common import Json, RunName, RunsDir, announce, find_run, print_json, say
from hlatctl.run import files
from hlatctl.run.paths import RunPaths


def show(run: RunName, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Print a run's configuration and provenance.

    Prints two YAML documents, or JSON with --json.
    """
    import yaml

    from conf.load import load

    found = find_run(run, runs_dir)
    announce(found)
    provenance = _provenance(found)
    if as_json:
        import dataclasses

        config = dataclasses.asdict(load(found.config))
        print_json({"run_id": found.run_id, "path": str(found.root), "config": config, "provenance": provenance})
        return
    load(found.config)  # a damaged file is told of, not printed as if it were good
    typer.echo(f"# {found.config}\n{found.config.read_text(encoding='utf-8')}---\n# {found.provenance}")
    typer.echo(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}
