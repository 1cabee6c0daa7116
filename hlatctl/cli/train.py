"""`hlatctl train`, `resume`, `stop` and `fork`: create, continue, stop and branch runs.

Progress is a line that is redrawn on a terminal, and plain lines elsewhere. A summary is printed at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hlatctl.cli.amend import Why, make
from hlatctl.cli.common import (
    Changes,
    ConfigDirs,
    Detach,
    Name,
    Note,
    Overrides,
    RunName,
    RunOrSweepName,
    RunsDir,
    Tags,
    announce,
    columns,
    find_run,
    find_sweep,
    say,
    user_name,
    warn_of_no_effect,
    with_runs_dir,
    write,
)
from hlatctl.cli.status import end_lines
from hlatctl.report.run_view import view_run, view_sweep
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.labels import change, leading, write_label
from hlatctl.run.lease import driver
from hlatctl.run.pace import seconds_per_step, training_left_s
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.units import count, duration, number, one_line, printable, queued

if TYPE_CHECKING:
    from rich.progress import Progress

    from conf.schema import Config
    from flows.runtime.observer import Observer
    from hlatctl.run.state import RunState


#: Minimum time between two plain lines. Each tenth of the run gets a line regardless.
_PLAIN_EVERY_S = 10.0


@contextmanager
def observer_for(
    stream: TextIO, *, live: type[LiveObserver] | None = None, plain: type[PlainObserver] | None = None
) -> Iterator[Observer]:
    """Yield an observer for a stream: one line that is redrawn on a terminal, plain lines elsewhere.

    Args:
        live, plain: the classes of observers; None: those for training.
    """
    if not stream.isatty():
        yield (plain or PlainObserver)(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    progress = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        console=Console(file=stream),
        transient=True,
        redirect_stdout=False,
    )
    with progress:
        yield (live or LiveObserver)(progress)


class LiveObserver:
    """Redraws one line. Messages scroll above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)

    def update(self, state: RunState, config: Config) -> None:
        """Redraw."""
        total = config.total_steps if state.steps else None
        self._progress.update(self._task, total=total, completed=state.step, description=describe(state, config))

    def message(self, text: str) -> None:
        """Print above the line."""
        self._progress.console.print(printable(text), markup=False, highlight=False)


class PlainObserver:
    """Prints every message and every tenth of the run, and otherwise at most one line in ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_step = 0
        self._shown_s = float("-inf")

    def update(self, state: RunState, config: Config) -> None:
        """Print a line if there is a new step and a line is due."""
        if state.step == self._shown_step:
            return
        tenth = 10 * state.step // config.total_steps > 10 * self._shown_step // config.total_steps
        if tenth or time.monotonic() - self._shown_s >= _PLAIN_EVERY_S:
            self._shown_step, self._shown_s = state.step, time.monotonic()
            self.message(describe(state, config))

    def message(self, text: str) -> None:
        """Print."""
        print(printable(text), file=self._stream, flush=True)


def describe(state: RunState, config: Config) -> str:
    """Return a run's state in one line."""
    return leading(one_line(_where(state, config)), simulated=state.simulated)


def _where(state: RunState, config: Config) -> str:
    stages, last, attempt = state.running_stages, state.last_step, state.attempt
    if waits := [f"{name} {queued(job.reason, None)}" for name, job in state.queued.items()]:
        return ", ".join([*stages, *waits])
    if stages:
        return ", ".join(stages)
    if last is None:
        return f"training, attempt {attempt.number}: no step yet" if attempt else "starting"
    parts = [
        f"step {state.step}/{config.total_steps}",
        f"{count(state.tokens)} tokens",
        f"loss {number(last, 'loss'):.3f}",
        *_pace(state, config),
        *_milestones(state, config),
    ]
    return " · ".join(parts)


def _pace(state: RunState, config: Config) -> list[str]:
    pace_s = seconds_per_step(state)
    if not pace_s:
        return []
    left_s = training_left_s(state, config.total_steps)
    return [f"{count(config.tokens_per_step / pace_s)} tok/s", *([f"{duration(left_s)} left"] if left_s else [])]


def _milestones(state: RunState, config: Config) -> list[str]:
    running = [milestone for milestone in state.milestones.values() if milestone.status == "running"]
    if running:
        return [f"evaluating {count(running[0].milestone_tokens)}"]
    coming = [tokens for step, tokens in config.milestones.items() if step > state.step]
    return [f"milestone at {count(min(coming))}"] if coming else []


#: Arms of a sweep that are shown when it has ended.
_MOST_ROWS = 20


def drive(run: RunPaths, *, detach: bool) -> None:
    """Print the id of a run or a sweep and drive it to its end, here or in a separate process.

    Raises:
        HlatctlError: the flow's own error.
    """
    write(run.run_id)
    sys.stdout.flush()
    if detach:
        _detach(run)
    elif isinstance(run, SweepPaths):
        _drive_sweep(run)
    elif read_state(run).evaluates:
        from hlatctl.cli.evaluate import evaluate_run

        evaluate_run(run)
    else:
        _drive_run(run)


def _detach(run: RunPaths) -> None:
    from flows.runtime import programs

    driver = programs.start_driver(run)
    is_sweep = isinstance(run, SweepPaths)
    say(f"the {'sweep' if is_sweep else 'run'}'s driver is process {driver.pid}; it continues if this terminal closes")
    say(f"hlatctl status {run.run_id}     shows its state")
    if not is_sweep:  # its trials have logs
        say(f"hlatctl logs {run.run_id} -f    prints its output")
    say(f"hlatctl stop {run.run_id}       stops it with a checkpoint")


def _drive_run(run: RunPaths) -> None:
    from conf.amendments import with_resume
    from flows import pretrain

    say(f"run {run.run_id} in {run.root}; Ctrl-C stops it with a checkpoint")
    try:
        with observer_for(sys.stderr) as observer:
            pretrain.drive(run, observer)
    except HlatctlError as error:
        error.hint = with_resume(error.hint, run.run_id)
        raise
    for line in end_lines(view_run(run)):
        say(line)


def _drive_sweep(sweep: SweepPaths) -> None:
    from flows.sweep import driver
    from hlatctl.report import sweep as report
    from hlatctl.report.run_view import view_sweep

    say(f"sweep {sweep.run_id} in {sweep.root}")
    driver.drive(sweep, say)
    state, _ = view_sweep(sweep)
    rows = report.rows(state)
    say()
    say(columns([report.header(state), *rows[:_MOST_ROWS]]))
    if len(rows) > _MOST_ROWS:
        say(f"and {len(rows) - _MOST_ROWS} more arms: hlatctl status {sweep.run_id}")
    say()
    say(columns([list(fact) for fact in report.facts(state)]))


#: Added by --dry-run: a simulated cluster plays every job; the stages and the journal are real.
_DRY_RUN_OVERRIDE = "cluster.launcher=mock"
_SIMULATE = "add --dry-run to simulate it, or run `hlatctl plan` with the same configuration"


def train(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate every stage; nothing is trained.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Id of the run.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    detach: Detach = False,
    runs_dir: RunsDir = None,
) -> None:
    """Train and evaluate a model, and write its report.

    Prints the run's id. Ctrl-C stops the run with a checkpoint.
    """
    from conf.compose import compose
    from conf.origins import origins

    labels = change(name=name, tags=tag or (), note=note)
    typed = [*with_runs_dir(overrides, runs_dir), *([_DRY_RUN_OVERRIDE] if dry_run else [])]
    config = compose(typed)
    warn_of_no_effect(config, overrides)
    from flows import pretrain
    from flows.stages.validate import refuse_simulation

    if not dry_run:
        refuse_simulation(config, hint=_SIMULATE)
    run = pretrain.create(config, argv=sys.argv, run_id=run_id, origins=origins(typed, config))
    write_label(run, labels, by=user_name())
    announce(run)
    drive(run, detach=detach)


def resume(
    run: RunOrSweepName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    why: Why = "",
    detach: Detach = False,
    runs_dir: RunsDir = None,
) -> None:
    """Continue a run or a sweep after a stop or a failure.

    Continues from the newest checkpoint, or re-attaches to a job that is still running. Finished stages and
    evaluations are not repeated. With OVERRIDES, the run's configuration is amended first (see `hlatctl amend`).
    """
    sweep = find_sweep(run, runs_dir)
    if sweep and overrides:
        raise ConfigError(
            f"{overrides[0]}: a sweep's configuration can't change, because its trials are compared",
            hint=f"`hlatctl sweep --extend {sweep.run_id}` adds arms; `hlatctl resume TRIAL key=value` amends a trial",
        )
    paths = sweep or find_run(run, runs_dir)
    if overrides:
        _amend(paths, overrides, why)
    announce(paths)
    drive(paths, detach=detach)


def _amend(run: RunPaths, overrides: list[str], why: str) -> None:
    if holder := driver(run):
        raise RunBusyError(
            f"run {run.run_id}: {holder} drives it", hint=f"`hlatctl amend {run.run_id} {' '.join(overrides)}`"
        )
    make(run, overrides, why=why, resumes=True)


def stop(
    run: RunOrSweepName,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the run to stop.", min=0)] = 60.0,
    runs_dir: RunsDir = None,
) -> None:
    """Save a checkpoint and stop a run, or all runs of a sweep.

    Works from any machine that shares the runs folder with the driver.
    """
    from flows.control import request_stop

    if swept := find_sweep(run, runs_dir):
        _stop_sweep(swept, wait)
        return
    paths = find_run(run, runs_dir)
    before = view_run(paths)
    if before.at_rest:
        say(f"{paths.run_id}: is already {before.status}")
        return
    if before.driver_elsewhere:
        say(f"{paths.run_id}: its driver is {before.driver_elsewhere}, which reads the request from the run's journal")
    request_stop(paths, by=user_name(), wait_s=wait)
    view = view_run(paths)
    if not view.ended:
        say(f"{paths.run_id}: stop requested; still running after {wait:g} s (`hlatctl status {paths.run_id}`)")
        return
    newest = f"step {max(view.state.checkpoints)}" if view.state.checkpoints else "none"
    say(f"{paths.run_id}: {view.status} at step {view.state.step}; newest checkpoint: {newest}")
    if view.can_resume:
        say(f"hlatctl resume {paths.run_id}   continues the run")


def _stop_sweep(sweep: SweepPaths, wait_s: float) -> None:
    from flows.sweep.book import request_stop

    before, driver = view_sweep(sweep)
    if driver is None and before.status in ("finished", "failed", "stopped") and not before.count("running"):
        say(f"{sweep.run_id}: is already {before.status}")
        return
    state = request_stop(sweep, by=user_name(), wait_s=wait_s)
    still = state.count("running", "stopping")
    if still:
        say(f"{sweep.run_id}: stop requested; {still} trials are still running after {wait_s:g} s")
        return
    say(f"{sweep.run_id}: {state.status}; {state.count('paused')} trials are paused")
    say(f"hlatctl resume {sweep.run_id}   continues the sweep")


def fork(
    run: RunName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    at: Annotated[
        str, typer.Option(metavar="STEP|TOKENS|latest", help="The checkpoint, such as 5000 or 200B.")
    ] = "latest",
    restart_data: Annotated[bool, typer.Option("--restart-data", help="Read the corpus from its beginning.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Id of the new run.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    detach: Detach = False,
    runs_dir: RunsDir = None,
) -> None:
    """Begin a new run from a checkpoint of another, and train it.

    It continues with the weights, the optimizer's state and the position in the data, and with the other run's
    configuration except OVERRIDES. Its steps and tokens continue those of the checkpoint. Prints the new run's id, and
    trains until the end like `hlatctl train`: Ctrl-C stops the run with a checkpoint, --detach runs it in the
    background.
    """
    from flows.fork import differences
    from flows.fork import fork as create

    labels = change(name=name, tags=tag or (), note=note)
    parent = find_run(run, runs_dir)
    new = create(parent, at, overrides or [], argv=sys.argv, run_id=run_id, restart_data=restart_data)
    write_label(new, labels, by=user_name())
    from conf.of_run import of_run

    config = of_run(new)
    warn_of_no_effect(config, overrides)
    origin = config.fork
    say(f"forked from {parent.run_id} at step {origin.step}, {origin.tokens:,} tokens")
    for key, (before, after) in differences(parent, new).items():
        say(f"{key}: {before} -> {after}")
    say("data: from the beginning of the corpus" if origin.restarts_data else "data: continue after the checkpoint's")
    drive(new, detach=detach)
