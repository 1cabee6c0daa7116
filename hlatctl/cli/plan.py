"""`hlatctl plan`: shows what `train` would run, and what it needs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hlatctl.cli.common import ConfigDirs, Json, Overrides, columns, print_json
from hlatctl.run.simulated import MARK

_SIMULATED = (
    f"{MARK}: cluster.launcher=mock starts no jobs. `hlatctl train` with this configuration needs --dry-run;\n"
    "the launch script below is for {launcher}."
)

_TITLE = "launch script of the first training attempt"
_TITLES = {"kubernetes": "manifest of the first training attempt"}

if TYPE_CHECKING:
    from conf.schema import Config
    from flows.describe import FlowDescription
    from hlatctl.plan.sections import Section


def plan(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank the layouts that fit the nodes, cheapest first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what `train` would run, without changing anything.

    Prints the resolved configuration, the stages, the launch script, and the memory, time, money and disk space that
    the run needs. Each figure is marked as given, derived, calibrated or measured.
    """
    from conf.compose import compose

    config = compose(overrides or [], to_start=False)
    if search:
        _search(config, as_json)
        return
    from conf.validate import missing_to_start
    from flows.describe import describe
    from flows.stages.data import prepared_dataset
    from hlatctl.plan.arithmetic import budget
    from hlatctl.plan.epochs import epochs
    from hlatctl.plan.sections import corpus_section, sections

    flow, tables = describe(config), sections(config, compose)
    if known := epochs(config, prepared_dataset(config)):
        tables.append(corpus_section(known))
    if as_json:
        print_json(
            {
                "simulated": flow.simulated,
                "missing_to_start": [str(error) for error in missing_to_start(config)],
                "config": dataclasses.asdict(config),
                "stages": [dataclasses.asdict(stage) for stage in flow.stages],
                "launch_script": flow.launch_script,
                "nodes_script": flow.nodes_script,
                "environment_collisions": flow.collisions,
                "budget": dataclasses.asdict(budget(config)),
                "plan": {
                    section.title: [dataclasses.asdict(figure) for figure in section.figures] for section in tables
                },
            }
        )
        return
    for title, text in _texts(config, flow, tables):
        typer.echo(f"# {title}\n{text.rstrip()}\n")


def _texts(config: Config, flow: FlowDescription, tables: list[Section]) -> list[tuple[str, str]]:
    from conf.load import dump
    from conf.validate import missing_to_start

    missing = "\n".join(str(error) for error in missing_to_start(config))
    only = [("simulation only", _SIMULATED.format(launcher=_launcher(config)))] if flow.simulated else []
    return [
        *([("needed before `hlatctl train`", missing)] if missing else []),
        *only,
        ("configuration", dump(config)),
        ("stages", columns([["STAGE", "WOULD", "FINGERPRINT", "WHY"], *(_stage_row(stage) for stage in flow.stages)])),
        *([("script that keeps the nodes for training", flow.nodes_script)] if flow.nodes_script else []),
        (_TITLES.get(config.cluster.launcher, _TITLE), flow.launch_script),
        *([("environment variables that it overrides", "\n".join(flow.collisions))] if flow.collisions else []),
        *((section.title, columns([[f.name, f.kind, f.text] for f in section.figures])) for section in tables),
    ]


def _launcher(config: Config) -> str:
    return "one machine" if config.cluster.nodes == 1 else "Slurm, and cluster.launcher=slurm submits it"


def _stage_row(stage: Any) -> list[str]:
    return [stage.name, "run" if stage.will_run else "skip", stage.fingerprint, stage.why]


def _search(config: Config, as_json: bool) -> None:
    from hlatctl.plan.search import search
    from hlatctl.plan.sections import search_records, search_rows

    layouts = search(config)
    if as_json:
        print_json(search_records(layouts))
    elif layouts:
        typer.echo(columns(search_rows(layouts)))
    else:
        typer.echo(f"no layout fits {config.cluster.nodes} nodes of {config.cluster.name}")
