"""`hlatctl show`: prints a run's configuration and provenance."""

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

    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    provenance = _provenance(paths)
    if as_json:
        import dataclasses

        config = dataclasses.asdict(of_run(paths))
        print_json({"run_id": paths.run_id, "path": str(paths.root), "config": config, "provenance": provenance})
        return
    of_run(paths)  # raises if the file is damaged
    typer.echo(f"# {paths.config}\n{paths.config.read_text(encoding='utf-8')}---\n# {paths.provenance}")
    typer.echo(yaml.safe_dump(provenance, sort_keys=False, allow_unicode=True), nl=False)


def _provenance(run: RunPaths) -> dict[str, Any] | None:
    try:
        record = files.read_json(run.provenance)
    except (OSError, ValueError) as error:
        say(f"{run.provenance}: can't be read ({error})")
        return None
    return record if isinstance(record, dict) else {"content": record}
