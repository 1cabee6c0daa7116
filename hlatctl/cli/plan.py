"""`hlatctl plan`, `forecast` and `speedtest`: what `train` would run and need, when a run ends, and how fast it is."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hlatctl.cli.common import (
    ConfigDirs,
    Json,
    Overrides,
    RunsDir,
    Yes,
    columns,
    confirm,
    find_run,
    no_effects,
    place,
    print_json,
    run_names,
    say,
    with_runs_dir,
    write,
)
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, TrainingError
from hlatctl.run.labels import MARK, WARNING
from hlatctl.run.paths import RunPaths
from hlatctl.units import counted, duration

if TYPE_CHECKING:
    from conf.schema import Config
    from flows.describe import FlowDescription
    from hlatctl.plan.sections import Section


_SIMULATED = (
    f"{MARK}: cluster.launcher=simulated starts no jobs. `hlatctl train` with this configuration needs --dry-run;\n"
    "the launch script below is for {launcher}."
)


def plan(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank the layouts that fit the nodes, cheapest first.")
    ] = False,
    of: Annotated[
        str | None,
        typer.Option("--of", metavar="RUN", help="Plan the rest of this run with OVERRIDES.", autocompletion=run_names),
    ] = None,
    show_config: Annotated[bool, typer.Option("--config", help="Also print the resolved configuration.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show what `train` would run, without changing anything.

    Prints the memory, time, money and disk space that the run needs, its stages, and the launch script. Each figure is
    marked as given, derived, calibrated or measured.
    """
    from conf.compose import compose

    if of is not None:
        _rest(find_run(of, runs_dir), overrides or [], as_json=as_json)
        return
    config = compose(with_runs_dir(overrides, runs_dir), to_start=False)
    if search:
        _search(config, overrides or [], as_json)
        return
    from flows.describe import describe
    from flows.launch.base import launcher_for
    from flows.runtime.spending import typed_hardware
    from flows.stages.data import prepared_dataset
    from flows.stages.validate import refused
    from hlatctl import machine_checks
    from hlatctl.plan.budget import budget, epochs
    from hlatctl.plan.calibration import calibrated, speed_section
    from hlatctl.plan.sections import corpus_section, measured, sections

    planned, speed = measured(config)
    planned, test = calibrated(planned, typed_hardware(overrides or ()))
    flow, tables = describe(config), sections(planned, compose, speed)
    tables += [speed_section(test)] if test else []
    dataset = prepared_dataset(config)
    known = epochs(config, dataset)
    tables += _evaluation(planned)
    tables += [corpus_section(known)] if known or not dataset else []
    missing = [str(error) for error in refused(config)]
    skipped, interruption = machine_checks.skipped_code_tasks(config), launcher_for(config).interruption(config)
    warnings = [
        *([interruption] if interruption else []),
        *no_effects(config, overrides),
        *([skipped] if skipped else []),
        *dataset.get("warnings", []),
        *(row.warning for row in known if row.warning),
    ]
    if as_json:
        print_json(
            {
                "simulated": flow.simulated,
                "warnings": warnings,
                "missing_to_start": missing,
                "config": dataclasses.asdict(config),
                "stages": [dataclasses.asdict(stage) for stage in flow.stages],
                "launch_script": flow.launch_script,
                "nodes_script": flow.nodes_script,
                "environment_collisions": flow.collisions,
                "budget": budget(config),
                "plan": {
                    section.title: [dataclasses.asdict(figure) for figure in section.figures] for section in tables
                },
            }
        )
        return
    for title, text in _texts(config, flow, tables, warnings, missing, show_config=show_config):
        write(f"# {title}\n{text.rstrip()}\n")


def _evaluation(config: Config) -> list[Section]:
    """Return the section about milestones: by the data in ``eval.data_dir`` if it has all, else by published sizes."""
    from flows.describe import workload
    from hlatctl.plan.evaluation import evaluation_cost, evaluation_section
    from hlatctl.plan.step_time import step_time_s

    if not config.milestones:
        return []
    records, problem = workload(config)
    if problem:
        say(f"note: the evaluation is reckoned with published sizes: {problem}")
    cost = evaluation_cost(config, step_time_s(config), records)
    return [evaluation_section(config, cost, measured=bool(records))]


def _rest(run: RunPaths, overrides: list[str], *, as_json: bool) -> None:
    """Print what overrides would change in a run that has begun, and the rest of the run."""
    from conf.amendments import IN_WORDS, changes_between, rule_of
    from conf.compose import amend, compose
    from conf.of_run import of_run
    from flows.runtime.spending import typed_hardware, typed_in
    from hlatctl.plan.calibration import calibrated
    from hlatctl.plan.sections import MEMORY, TIME, continuation_section, measured, rate_chart, sections
    from hlatctl.run.fold import read_state
    from hlatctl.units import value_text

    before, step = of_run(run), read_state(run).step
    after = amend(before, overrides) if overrides else before
    changes = changes_between(before, after)
    rest = continuation_section(before, after, step)
    planned, speed = measured(after)
    planned, _ = calibrated(planned, typed_hardware([*typed_in(run), *overrides]))
    others = [section for section in sections(planned, compose, speed) if section.title in (MEMORY, TIME)]
    if as_json:
        figures = {section.title: [dataclasses.asdict(f) for f in section.figures] for section in [rest, *others]}
        print_json({"run_id": run.run_id, "changes": changes, "plan": figures})
        return
    rows = [
        [key, value_text(old), value_text(new), IN_WORDS[rule_of(key).when], rule_of(key).redoes]
        for key, (old, new) in changes.items()
    ]
    if rows:
        write(f"# changes\n{columns([['KEY', 'FROM', 'TO', 'BEGINS', 'REDOES, OR WHY NOT'], *rows])}\n")
    for section in [rest, *others]:
        write(f"# {section.title}\n{columns([[f.name, f.kind, f.text] for f in section.figures])}\n")
        if section is rest:
            write(f"# learning rate: * with the changes, . without\n{rate_chart(before, after, step)}\n")


def _texts(
    config: Config,
    flow: FlowDescription,
    tables: list[Section],
    warnings: list[str],
    missing: list[str],
    *,
    show_config: bool,
) -> list[tuple[str, str]]:
    from conf.load import dump
    from conf.registries import LAUNCHERS

    first, *others = [
        (section.title, columns([[f.name, f.kind, f.text] for f in section.figures])) for section in tables
    ]
    only = [("simulation only", _SIMULATED.format(launcher=_launcher(config)))] if flow.simulated else []
    return [
        *([("needed before `hlatctl train`", "\n".join(missing))] if missing else []),
        *only,
        first,
        *([("warnings", "\n".join(warnings))] if warnings else []),
        *others,
        ("stages", columns([["STAGE", "WOULD", "FINGERPRINT", "WHY"], *(_stage_row(stage) for stage in flow.stages)])),
        *([("script that keeps the nodes for training", flow.nodes_script)] if flow.nodes_script else []),
        (f"{LAUNCHERS[config.cluster.launcher].script} of the first training attempt", flow.launch_script),
        *([("environment variables that it overrides", "\n".join(flow.collisions))] if flow.collisions else []),
        *([("configuration", dump(config))] if show_config else []),
    ]


def _launcher(config: Config) -> str:
    return "one machine" if config.cluster.nodes == 1 else "Slurm, and cluster.launcher=slurm submits it"


def _stage_row(stage: Any) -> list[str]:
    return [stage.name, "run" if stage.will_run else "skip", stage.fingerprint, stage.why]


def _search(config: Config, overrides: list[str], as_json: bool) -> None:
    from flows.runtime.spending import typed_hardware
    from hlatctl.plan.calibration import calibrated
    from hlatctl.plan.search import search, search_records, search_rows

    if config.train.stages:
        train = max((stage.config.train for stage in config.stages), key=lambda one: one.seq_len)
        raise ConfigError(
            f"train.stages: has {len(config.train.stages)} stages of one layout, and --search compares layouts for one "
            "length of sequences",
            hint="search for the stage with the longest sequences: train.stages=[] "
            f"train.seq_len={train.seq_len} train.global_batch_size={train.global_batch_size}",
        )
    config, test = calibrated(config, typed_hardware(overrides))
    if test:
        say(f"note: uses the speed test of {test.cluster} on {test.date}")
    layouts = search(config)
    if as_json:
        print_json(search_records(layouts))
    elif layouts:
        write(columns(search_rows(layouts)))
    else:
        write(f"no layout fits {config.cluster.nodes} nodes of {config.cluster.name}")


def forecast(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations per variant.")] = 20,
    figure: Annotated[Path | None, typer.Option(help="Draw the simulations into this SVG file.", parser=place)] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Forecast when a run ends and what it costs.

    Simulates the run once per seed, with the same flow as `train --dry-run`. Then simulates variants of it: other
    checkpoint intervals, other numbers of spare nodes, slower starts, and no automatic restarts. Prints the median of
    each variant, and the duration that 95 % of its simulations don't exceed (p95). Nothing is trained, and the
    simulations' files are removed. The simulation.* keys describe the simulated cluster (simulation.seed,
    simulation.failures.*, ...); see `hlatctl config keys simulation`.
    """
    from conf import simulation
    from conf.compose import compose
    from flows import forecast as simulations
    from hlatctl.report import forecast as report

    typed, settings = simulation.split(with_runs_dir(overrides, runs_dir))
    config = compose(typed)
    real = compose([text for text in typed if text != simulation.OVERRIDE], to_start=False)
    settings = simulations.with_stops(real, settings, time.time())
    say(WARNING)
    if settings.time_limit_s is not None:
        say(f"time limit: each training job is asked to stop after {duration(settings.time_limit_s)}")
    if settings.maintenance_after_s is not None:
        begins = f"begins {duration(settings.maintenance_after_s)} after the start"
        say(f"maintenance: {begins} and takes {duration(settings.maintenance_s)}")

    def tell(variant: str) -> None:
        say(f"{counted(seeds, 'simulation')}: {variant}")

    simulated = simulations.play_all(config, settings, seeds, tell)
    outlooks = {name: report.outlook(outcomes) for name, outcomes in simulated.items()}
    if figure:
        files.write_text(figure, report.figure(simulated).svg())
    first = next(iter(outlooks))
    if as_json:
        print_json({"simulated": True, "seeds": seeds, "variants": report.record(outlooks)})
    else:
        write(columns([[cell.upper() for cell in report.HEADER], *report.rows(outlooks)]) + "\n")
        write(columns([list(fact) for fact in report.facts(outlooks, seeds, time.time())]))
        if len(lost := report.loss_rows(simulated[first])) > 1:
            write("\n" + columns([[cell.upper() for cell in report.LOSSES_HEADER], *lost]))
    if outlooks[first] is None:
        raise TrainingError(
            f"none of {counted(seeds, 'simulation')} finished; the first: {simulated[first][0].message}",
            hint="`hlatctl train --dry-run` with the same configuration shows one of them in full",
        )


def speedtest(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    steps: Annotated[int, typer.Option(min=10, max=10_000, help="Steps to train on each number of nodes.")] = 20,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate it; nothing is trained or kept.")] = False,
    yes: Yes = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Measure a cluster's speed, and calibrate the planner.

    Trains a few steps of the configuration on all nodes, on two and on one, one run after the other, with the same
    batch per node. On Slurm, all of them use the nodes of one job. Prints tokens per second, MFU, scaling and the
    bandwidth of exchanges, next to the plan's and to the speed of the most similar published run. A budget holds for
    all runs together. The result is kept in your own folder; `hlatctl plan` uses it for this cluster with the same
    engine, device and precision.
    """
    from conf import simulation
    from conf.compose import compose
    from flows import speedtest as tests
    from flows.stages.validate import refuse_simulation
    from hlatctl.cli.progress import observer_for
    from hlatctl.plan.calibration import keep, speed_section
    from hlatctl.plan.published import nearest

    typed, simulated = with_runs_dir(overrides, runs_dir), None
    if dry_run:
        typed, simulated = simulation.split(typed)
    whole = compose([*typed, "eval.enabled=false"])
    if not dry_run:
        refuse_simulation(whole, hint="add --dry-run to simulate it")
    configs, batch = [], whole.train.global_batch_size
    for nodes in tests.sizes(whole.cluster.nodes):
        smaller = tests.overrides_for(whole, nodes, steps)
        try:
            configs += [compose([*typed, *smaller])] if smaller else []
            problem = "" if smaller else f"train.global_batch_size={batch} can't be reduced in proportion"
        except ConfigError as error:
            if nodes == whole.cluster.nodes:
                raise
            problem = error.message
        if problem:
            say(f"note: cluster.nodes={nodes} is not tested: {problem}")
    confirm(tests.expense(configs, typed), whole.cluster, "the speed test", yes=yes, dry_run=dry_run)
    with observer_for(sys.stderr) as observer:
        test = tests.measure_speed(configs, argv=sys.argv, observer=observer, simulated=simulated, say=say)
    if not dry_run:
        keep(test)
    published = nearest(configs[-1], compose)
    if as_json:
        print_json({**dataclasses.asdict(test), "published": published and published.speed})
        return
    section = speed_section(test, planned="planned", published=published)
    figures = section.figures[:-1] if dry_run else section.figures
    write(f"# {section.title}{' (simulated, not kept)' if dry_run else ''}")
    write(columns([[figure.name, figure.kind, figure.text] for figure in figures]))
