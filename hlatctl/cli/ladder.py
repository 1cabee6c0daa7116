"""`hlatctl ladder`: train smaller models, forecast a larger one, and compare its result with the forecast."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import (
    ConfigDirs,
    Json,
    Name,
    Note,
    Overrides,
    RunsDir,
    Tags,
    Yes,
    announce,
    columns,
    confirm,
    find_sweep_only,
    print_json,
    run_or_sweep_names,
    say,
    with_runs_dir,
    write,
)
from hlatctl.cli.drivers import Detach, DriverAs, submit_of
from hlatctl.cli.sweep import start
from hlatctl.cli.train import drive
from hlatctl.run.errors import ConfigError
from hlatctl.run.labels import change
from hlatctl.units import count, counted, duration

if TYPE_CHECKING:
    from flows.sweep.create import Prepared


def ladder(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show and price the rungs and the target; start nothing.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="LADDER", help="Train the target of this ladder.", autocompletion=run_or_sweep_names
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate every run; nothing is trained.")] = False,
    ladder_id: Annotated[str | None, typer.Option(help="Id of the ladder.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    yes: Yes = False,
    detach: Detach = False,
    driver_as: DriverAs = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Train smaller models, and forecast a larger one from them.

    The configuration is the larger model, the target. The ladder.* keys describe the smaller ones, the rungs:
    ladder.sizes, ladder.by, ladder.tokens_per_parameter and how learning rate and batch follow. With
    model.mup_base_width, one learning rate serves all widths. When all rungs have
    ended, the forecast of the target's loss and scores is recorded. --target trains the target after that, and `status`
    and the report compare the result with the forecast. A ladder is a sweep: `status`, `stop`, `resume` and
    `sweep-report` take its id, and the sweep.* keys set sweep.parallel, sweep.seeds and sweep.objective.
    """
    from flows.sweep import create

    labels = change(name=name, tags=tag or (), note=note)
    if as_json and not plan:
        raise ConfigError("--json: prints the plan", hint="add --plan; `hlatctl status LADDER --json` has the results")
    if target is not None:
        if overrides or plan or dry_run or ladder_id:
            raise ConfigError(
                f"--target={target}: the ladder has fixed its target, so it takes no other arguments",
                hint=f"hlatctl ladder --target {target}; --runs-dir names another folder of runs",
            )
        _train_target(target, runs_dir, yes=yes, detach=detach, driver_as=driver_as)
        return
    prepared = create.prepare(
        with_runs_dir(overrides, runs_dir), folder=Path.cwd(), simulated=dry_run, is_ladder=True, to_start=not plan
    )
    if plan:
        _print_plan(prepared, as_json=as_json)
        return
    start(prepared, ladder_id, labels, "the ladder", yes=yes, detach=detach, driver_as=driver_as)


def _train_target(name: str, runs_dir: Path | None, *, yes: bool, detach: bool, driver_as: str | None) -> None:
    from flows.sweep import create

    found = find_sweep_only(name, runs_dir, "--target")
    prepared = create.prepare_target(found)
    submit = submit_of(prepared.cluster, driver_as, detach=detach)
    announce(found)
    say(f"the target: {prepared.plan.text()}")
    confirm(prepared.plan.expense, prepared.cluster, "the target", yes=yes, dry_run=prepared.simulated)
    create.extend(found, prepared, argv=sys.argv)
    drive(found, detach=detach, submit=submit)


_HEADER = ["RUN", "PARAMETERS", "TOKENS", "STEPS", "BATCH", "LR", "FLOPS", "OF TARGET", "TIME", "NODE-HOURS", "USD"]


def _print_plan(prepared: Prepared, *, as_json: bool) -> None:
    from conf.sizes import parameters
    from flows.sweep.create import price

    rows, records = [], []
    whole = prepared.configs[-1]
    costs = price(prepared)
    from hlatctl.plan.budget import total_flops

    for index, (config, cost) in enumerate(zip(prepared.configs, costs, strict=True)):
        is_target = config is whole
        flops = total_flops(config)
        record = {
            "run": "target" if is_target else f"rung {index}",
            "parameters": parameters(config.model).total,
            "tokens": config.total_tokens,
            "steps": config.total_steps,
            "global_batch_size": config.train.global_batch_size,
            "lr": config.optimizer.lr,
            "flops": flops,
            "flops_of_target": flops / total_flops(whole),
            "trials": prepared.space.seeds_of(index),
            "days": cost and cost.days,
            "node_hours": cost and cost.node_hours,
            "usd": cost and cost.usd,
            "point": prepared.space.points[index],
        }
        records.append(record)
        rows.append(
            [
                str(record["run"]),
                count(parameters(config.model).total),
                count(config.total_tokens),
                f"{config.total_steps:,}",
                f"{config.train.global_batch_size:,}",
                f"{config.optimizer.lr:.3g}",
                f"{flops:.3g}",
                f"{100 * flops / total_flops(whole):.3g} %",
                duration(cost.days * 86400) if cost else "unknown",
                f"{cost.node_hours:.3g}" if cost else "unknown",
                f"{cost.usd:,.2f}" if cost and cost.usd is not None else "–",
            ]
        )
    if as_json:
        print_json({"rungs": records[:-1], "target": records[-1], "plan": dataclasses.asdict(prepared.plan)})
        return
    write(columns([_HEADER, *rows]))
    seeds = prepared.space.settings.seeds
    say(f"{counted(len(rows) - 1, 'rung')}{f' x {seeds} seeds' if seeds > 1 else ''}: {prepared.plan.text()}")
