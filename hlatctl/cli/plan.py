"""`hlatctl plan`: what `train` would do, without doing it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from hlatctl.cli.common import Json, Overrides, columns, print_json

if TYPE_CHECKING:
    from conf.schema import Config
    from flows.describe import FlowDescription


def plan(overrides: Overrides = None, as_json: Json = False) -> None:
    """Show what train would do, touching nothing.

    Prints the resolved configuration, the stages, the launch script and what the run will take.
    """
    from conf.compose import compose

    config = compose(overrides or [])
    from flows.describe import describe
    from hlatctl.plan import arithmetic

    flow = describe(config)
    budget = arithmetic.budget(config)
    if as_json:
        print_json(
            {
                "config": dataclasses.asdict(config),
                "stages": [dataclasses.asdict(stage) for stage in flow.stages],
                "launch_script": flow.launch_script,
                "environment_collisions": flow.collisions,
                "budget": dataclasses.asdict(budget),
            }
        )
        return
    for title, text in _sections(config, flow, arithmetic.render(budget)):
        typer.echo(f"# {title}\n{text.rstrip()}\n")


def _sections(config: Config, flow: FlowDescription, budget: str) -> list[tuple[str, str]]:
    from conf.load import dump

    return [
        ("configuration", dump(config)),
        ("stages", columns([["STAGE", "WOULD", "FINGERPRINT", "WHY"], *(_stage_row(stage) for stage in flow.stages)])),
        ("launch script of the first training attempt", flow.launch_script),
        *([("environment that it overrides", "\n".join(flow.collisions))] if flow.collisions else []),
        ("what it takes", budget),
    ]


def _stage_row(stage: Any) -> list[str]:
    return [stage.name, "run" if stage.will_run else "skip", stage.fingerprint, stage.why]
