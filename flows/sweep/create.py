"""Creates or extends a sweep or a ladder, after everything is checked, and predicts its trials, hours and dollars."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf import ladder as ladders
from conf import simulation, tracking
from conf import space as spaces
from conf.compose import local_cores, local_processes
from conf.folders import LADDER, SWEEP
from conf.schema import ClusterConfig, Config, SimulationConfig
from conf.space import Space, Variations
from flows.runtime.programs import ask_about
from flows.runtime.spending import Expense, Pace, step_time_of, total
from flows.stages.validate import check as check_inputs
from flows.stages.validate import check_shape, refuse_simulation
from flows.sweep.study import Objective, check, objective
from hlatctl.plan.budget import Cost, cost
from hlatctl.plan.memory import check_memory
from hlatctl.run import files, runs
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError
from hlatctl.run.journal import FLOW_WRITER, JournalWriter, read_events
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import SweepPaths
from hlatctl.run.redact import hide
from hlatctl.run.sweep import fold
from hlatctl.units import duration


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep takes at most; trials that are ended early take less.

    Args:
        arms, seeds, trials: number of each.
        parallel: number of simultaneous trials.
        steps, tokens: totals of all trials.
        wall_s: time of training; None if the time of a step is unknown.
        measured: an earlier run measured the time of a step for every arm.
        process_hours: total of all processes; None if the time of a step is unknown.
        expense: what the nodes of all trials cost.
    """

    arms: int
    seeds: int
    trials: int
    parallel: int
    steps: int
    tokens: int
    wall_s: float | None
    measured: bool
    process_hours: float | None
    expense: Expense

    def text(self) -> str:
        """Return the plan as one sentence."""
        seeds = f" x {self.seeds} seeds" if self.seeds > 1 else ""
        took = "time unknown: no earlier run has these shapes, and cluster.hardware is incomplete"
        if self.wall_s is not None and self.process_hours is not None:
            source = "measured by an earlier run" if self.measured else "predicted"
            took = f"at most {duration(self.wall_s)} of training, {self.process_hours:.2g} process-hours, {source}"
        usd, unknown = self.expense.usd, ", cost unknown" if self.expense.priced else ""
        dollars = f", {usd:,.2f} USD" if usd is not None else unknown
        return (
            f"{self.trials} trials ({self.arms} arms{seeds}), {self.parallel} at once: {self.steps:,} steps, "
            f"{self.tokens:,} tokens; {took}{dollars}"
        )


def plan(space: Space, arms: Iterable[Config], runs_dir: Path) -> SweepPlan:
    """Predict what a sweep takes.

    Args:
        arms: the configuration of each known arm; a single one represents all arms if they are drawn later.
        runs_dir: the folder of the earlier runs.
    """
    known, pace = list(arms), Pace(runs_dir)
    if space.points:  # every run is listed
        known, each = [known[arm] for arm in range(space.arms) for _ in range(space.seeds_of(arm))], 1.0
    else:
        each = space.trials / len(known)
    measured = [pace.step_s(config) for config in known]
    step_times = [step_time_of(config, pace, space.overrides)[0] for config in known]
    costs = [cost(config, step_s) for step_s, config in zip(step_times, known, strict=True) if step_s is not None]
    complete = len(costs) == len(known)
    days = sum(one.days for one in costs)
    priced = any(config.cluster.price_usd_per_node_hour for config in known)
    return SweepPlan(
        arms=space.arms,
        seeds=space.settings.seeds,
        trials=space.trials,
        parallel=space.settings.parallel,
        steps=round(each * sum(config.total_steps for config in known)),
        tokens=round(each * sum(config.total_tokens for config in known)),
        wall_s=each * days * 86400 / space.settings.parallel if complete else None,
        measured=all(measured),
        process_hours=each * sum(one.accelerator_hours for one in costs) if complete else None,
        expense=total(costs if complete else [None], times=each, priced=priced),
    )


def price(prepared: Prepared) -> list[Cost | None]:
    """Return what one run of each known arm costs; None if the time of its steps is unknown."""
    pace = Pace(prepared.runs_dir)
    steps_s = [step_time_of(config, pace, prepared.space.overrides)[0] for config in prepared.configs]
    return [
        None if step_s is None else cost(config, step_s)
        for config, step_s in zip(prepared.configs, steps_s, strict=True)
    ]


_PROCESSES = "cluster.processes_per_node"
#: Maximum number of arms that are checked before a sweep begins. Arms that are drawn later are checked then.
_MOST_CHECKED = 1000
_TIMEOUT_S = 120
#: torch takes seeds below this value.
_SEEDS = 2**64


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sweep that is checked and can be created.

    Args:
        configs: of the arms that are known; of a ladder all rungs and the target.
    """

    space: Space
    plan: SweepPlan
    configs: list[Config]
    objective: Objective
    runs_dir: Path
    runs_mode: str
    experiment_name: str
    cluster: ClusterConfig
    simulated: bool
    accelerators: bool
    simulation: SimulationConfig | None = None


def prepare(
    arguments: Sequence[str], *, folder: Path, simulated: bool, is_ladder: bool = False, to_start: bool = True
) -> Prepared:
    """Check the arguments of a new sweep or ladder; creates nothing.

    Args:
        arguments: arguments of ``conf.space.parse``, or of ``conf.ladder.parse``.
        folder: base of relative paths.
        simulated: the trials are only simulated.
        to_start: also check what only a start needs: a cluster, and the inputs of the trials.

    Raises:
        ConfigError, DataError: an axis, an arm, an input or the objective is wrong.
    """
    settings = None
    if simulated:
        arguments, settings = simulation.split(spaces.expand(arguments, LADDER if is_ladder else SWEEP))
        settings = dataclasses.replace(settings, shows_recovery=False)
    space = ladders.parse(arguments, folder) if is_ladder else spaces.parse(arguments, folder)
    prepared = _checked(_with_slots(space), simulated=simulated, to_start=to_start)
    return dataclasses.replace(prepared, simulation=settings)


def prepare_more(sweep: SweepPaths, arguments: Sequence[str]) -> Prepared:
    """Check additional values for a sweep; changes nothing.

    Raises:
        ConfigError: they change the sweep's search space, or an arm is wrong.
    """
    space = spaces.extend(spaces.load(sweep.space), arguments)
    return _checked(space, simulated=fold(read_events(sweep)).simulated)


def prepare_target(ladder: SweepPaths) -> Prepared:
    """Check the target of a ladder, to train it too; changes nothing.

    Raises:
        ConfigError: it is a sweep, or its target is already one of its trials, or is wrong.
    """
    space = spaces.load(ladder.space)
    if not space.points or space.ladder.train_target:
        problem = "its target is a trial already" if space.points else "it is a sweep, which has no target"
        raise ConfigError(f"--target={ladder.run_id}: {problem}", hint=f"hlatctl status {ladder.run_id}")
    space = dataclasses.replace(space, ladder=dataclasses.replace(space.ladder, train_target=True))
    prepared = _checked(space, simulated=fold(read_events(ladder)).simulated)
    once = dataclasses.replace(space.settings, seeds=1)
    alone = dataclasses.replace(space, points=space.points[-1:], settings=once)
    of_target = plan(alone, prepared.configs[-1:], prepared.runs_dir)
    return dataclasses.replace(prepared, plan=of_target)


def make(prepared: Prepared, *, sweep_id: str | None, argv: list[str]) -> SweepPaths:
    """Create a sweep's directory.

    Args:
        sweep_id: id of the sweep; None: made from the experiment's name and the time.
        argv: the command line.

    Raises:
        ConfigError, RunExistsError, StorageError: the directory can't be created.
    """
    noun = "ladder" if prepared.space.points else "sweep"
    sweep_id = sweep_id or runs.new_run_id(f"{prepared.experiment_name}-{noun}")
    created = {
        "sweep_id": sweep_id,
        "simulated": prepared.simulated,
        "argv": [hide(word) for word in argv],
        "folder": prepared.space.folder,
        "overrides": prepared.space.overrides,
        "objective": prepared.objective.name,
        "direction": "min" if prepared.objective.minimize else "max",
        "accelerators": prepared.accelerators,
        "plan": asdict(prepared.plan),
        **_space_fields(prepared.space),
    }

    def begin(sweep: SweepPaths) -> None:
        if prepared.simulation is not None:
            simulation.write(sweep, prepared.simulation)
        with JournalWriter(sweep, FLOW_WRITER) as journal:
            journal.append("sweep_created", durable=True, **created)

    space, mode = spaces.dump(prepared.space), int(prepared.runs_mode, 8)
    return runs.create_sweep(prepared.runs_dir, sweep_id, space, mode, begin)


def extend(sweep: SweepPaths, prepared: Prepared, *, argv: list[str]) -> None:
    """Replace a sweep's space by a larger one, which its next driver uses.

    Raises:
        RunBusyError: the sweep has a driver.
    """
    try:
        with files.created_like(sweep.root), hold_driver(sweep), JournalWriter(sweep, FLOW_WRITER) as journal:
            files.write_text(sweep.space, spaces.dump(prepared.space))
            journal.append(
                "sweep_extended", durable=True, argv=[hide(word) for word in argv], **_space_fields(prepared.space)
            )
    except RunBusyError as error:
        raise RunBusyError(error.message, hint=f"`hlatctl stop {sweep.run_id}` first") from None


def _space_fields(space: Space) -> dict[str, Any]:
    return {
        "axes": [asdict(axis) for axis in space.axes],
        "settings": {**asdict(space.settings), "sampler": space.sampler},
        "arms": space.arms,
        "trials": space.trials,
        "target": space.target,
    }


def _with_slots(space: Space) -> Space:
    """Divide this machine's cores among the trials that run simultaneously.

    Raises:
        ConfigError: together they need more cores than the machine has.
    """
    config = _variations(space).compose(space.example())
    parallel, cores = space.settings.parallel, local_cores()
    if config.cluster.jobs_run != "here" or parallel == 1:
        return space
    named = any(text.lstrip("+").split("=")[0] == _PROCESSES for text in space.overrides)
    if not named and parallel <= cores:
        return dataclasses.replace(space, overrides=[*space.overrides, f"{_PROCESSES}={local_processes(parallel)}"])
    each = config.cluster.processes_per_node * config.cluster.threads_per_process if named else 1
    if parallel * each > cores:
        raise ConfigError(
            f"sweep.parallel={parallel}: with {each} processes or threads each, the trials need {parallel * each} "
            f"cores, but this machine has {cores}",
            hint=f"sweep.parallel={max(1, cores // each)}" + (f", or fewer {_PROCESSES}" if each > 1 else ""),
        )
    return space


def _checked(space: Space, *, simulated: bool, to_start: bool = True) -> Prepared:
    variations = _variations(space)
    first = variations.compose(space.example())
    if first.seed + space.settings.seeds > _SEEDS:
        raise ConfigError(
            f"sweep.seeds={space.settings.seeds}: the last trial's seed must be below 2^64",
            hint=f"lower sweep.seeds or seed={first.seed}",
        )
    aim = objective(space.settings, first)
    if space.points and (not aim.minimize or aim.at_tokens is not None):
        raise ConfigError(
            f"sweep.objective={aim.name}: a ladder forecasts the final value of a loss",
            hint="sweep.objective=validation_loss, loss, or eval.TASK_bpb; scores are forecast from their losses",
        )
    configs = list(_arms(space, variations, aim)) or [first]
    tracking.check_mirrors(first)
    if to_start and not simulated:
        for config in configs:
            refuse_simulation(config, hint="add --dry-run to simulate every trial")
        _check_inputs(configs)
        check_shape(first)
        _check_task(aim, first)
    return Prepared(
        space=space,
        plan=plan(space, configs, Path(first.runs_dir)),
        configs=configs,
        objective=aim,
        runs_dir=Path(first.runs_dir),
        runs_mode=first.runs_mode,
        experiment_name=first.experiment_name,
        cluster=first.cluster,
        simulated=simulated,
        accelerators=first.backend.device != "cpu",
    )


def _arms(space: Space, variations: Variations, aim: Objective) -> Iterator[Config]:
    """Yield the configuration of every arm of a grid, or of a ladder with its target.

    Raises:
        ConfigError: an arm is wrong; the message names it.
    """
    if space.sampler != "grid":
        return
    for point in space.points or itertools.islice(space.grid(), _MOST_CHECKED):
        try:
            config = variations.compose(point)
            check(aim, config)
            check_memory(config)
        except ConfigError as error:
            arm = " ".join(f"{key}={value}" for key, value in point.items())
            raise ConfigError(f"{error.message} (in the arm {arm})", hint=error.hint) from None
        yield config


def _check_inputs(configs: list[Config]) -> None:
    """Check corpus, tokenizer, suite and initial weights, once for all arms that share them."""
    seen: list[Any] = []
    for config in configs:
        inputs = (config.data, config.tokenizer, config.eval, config.train.init_from, config.model.vocab_size)
        if inputs not in seen:
            seen.append(inputs)
            check_inputs(config)


def _check_task(aim: Objective, config: Config) -> None:
    if not aim.score or aim.score.startswith("validation"):
        return
    asked = dataclasses.replace(config, eval=dataclasses.replace(config.eval, tasks=[aim.score]))
    try:
        ask_about("eval.check", asked, timeout_s=_TIMEOUT_S)
    except HlatctlError as error:
        raise ConfigError(
            f"sweep.objective={aim.name}: no trial reports it ({error.message})", hint=error.hint
        ) from None


def _variations(space: Space) -> Variations:
    return Variations(space.overrides, Path(space.folder), config_dirs=space.config_dirs)
