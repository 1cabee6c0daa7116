"""`hlatctl train`, `resume`, `stop`, `amend`, `fork` and `profile`: create, drive, change, branch and profile runs."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hlatctl.cli.common import (
    Changes,
    ConfigDirs,
    Name,
    Note,
    Overrides,
    RunName,
    RunOrSweepName,
    RunsDir,
    Tags,
    Yes,
    announce,
    columns,
    confirm,
    find_run,
    find_sweep,
    say,
    warn_of_no_effect,
    with_runs_dir,
    write,
)
from hlatctl.cli.drivers import Detach, DriverAs, Submit, detach_driver, submit_driver, submit_of, what_is
from hlatctl.cli.evaluate import evaluate_run
from hlatctl.cli.progress import observer_for
from hlatctl.cli.status import end_lines
from hlatctl.driver_job import CHAIN_ENV, driver_job
from hlatctl.report.run_view import sweep_at_rest, view_run, view_sweep
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.labels import change, write_label
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.processes import user_name
from hlatctl.run.state import ProfileState
from hlatctl.units import counted, size

if TYPE_CHECKING:
    from conf.schema import Config


#: Arms of a sweep that are shown when it has ended.
_MOST_ROWS = 20


def drive(run: RunPaths, *, detach: bool, submit: Submit | None = None, yes: bool = False) -> None:
    """Print the id of a run or a sweep and drive it to its end: here, in a separate process, or as a job."""
    write(run.run_id)
    sys.stdout.flush()
    if submit:
        submit_driver(run, submit)
    elif detach:
        detach_driver(run)
    elif isinstance(run, SweepPaths):
        _drive_sweep(run)
    elif read_state(run).evaluates:
        evaluate_run(run, yes=yes)
    else:
        _drive_run(run)


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

    say(f"{view_sweep(sweep)[0].noun} {sweep.run_id} in {sweep.root}")
    driver.drive(sweep, say)
    state, _ = view_sweep(sweep)
    rows = report.rows(state)
    say()
    say(columns([report.header(state), *rows[:_MOST_ROWS]]))
    if len(rows) > _MOST_ROWS:
        say(f"and {len(rows) - _MOST_ROWS} more arms: hlatctl status {sweep.run_id}")
    say()
    say(columns([list(fact) for fact in report.facts(state)]))


_SIMULATE = "add --dry-run to simulate it, or run `hlatctl plan` with the same configuration"


def train(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Simulate every stage; nothing is trained.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Id of the run.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    yes: Yes = False,
    detach: Detach = False,
    driver_as: DriverAs = None,
    runs_dir: RunsDir = None,
) -> None:
    """Train and evaluate a model, and write its report.

    Prints the run's id. Ctrl-C stops the run with a checkpoint. With --dry-run, the simulation.* keys describe the
    simulated cluster (simulation.seed, simulation.failures.*, ...); see `hlatctl config keys simulation`.
    """
    from conf import simulation
    from conf.compose import compose
    from conf.origins import origins

    labels = change(name=name, tags=tag or (), note=note)
    typed, simulated = with_runs_dir(overrides, runs_dir), None
    if dry_run:
        typed, simulated = simulation.split(typed)
    config = compose(typed)
    warn_of_no_effect(config, typed)
    from flows import pretrain
    from flows.runtime.spending import of_training
    from flows.stages.validate import refuse_simulation

    submit = submit_of(config.cluster, driver_as, detach=detach)
    if not dry_run:
        refuse_simulation(config, hint=_SIMULATE)
    made_from = origins(typed, config)

    def agree() -> None:
        confirm(of_training(config, typed=typed), config.cluster, "the run", yes=yes, dry_run=dry_run)

    run = pretrain.create(config, argv=sys.argv, run_id=run_id, origins=made_from, simulated=simulated, confirm=agree)
    write_label(run, labels, by=user_name())
    announce(run)
    drive(run, detach=detach, submit=submit)


Why = Annotated[str, typer.Option("--why", help="Reason, for the journal.")]


def _show_table(given: bool) -> None:
    if given:
        from conf.amendments import IN_WORDS, RULES

        rows = [[row.keys.rstrip(".") + ".*" * row.keys.endswith("."), IN_WORDS[row.when], row.redoes] for row in RULES]
        write(columns([["key", "changes", "redoes, or why not"], *rows]))
        raise typer.Exit


def amend(
    run: RunName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    why: Why = "",
    at: Annotated[
        str | None,
        typer.Option(metavar="STEP|now", help="Write a checkpoint after this step, and restart with the change."),
    ] = None,
    runs_dir: RunsDir = None,
    table: Annotated[
        bool,
        typer.Option("--table", callback=_show_table, is_eager=True, help="Print which keys may change, and when."),
    ] = False,
) -> None:
    """Change the configuration of a run.

    The run may be running. Some keys change immediately, others with the run's next attempt, and some never:
    `hlatctl amend --table` lists them. The new configuration is checked first. config.yaml stays as it was.
    """
    make(find_run(run, runs_dir), overrides or [], why=why, at=at)


def make(run: RunPaths, overrides: list[str], *, why: str, at: str | None = None, resumes: bool = False) -> None:
    """Amend a run and print what changes, and when.

    Args:
        at: step after which the change begins, or ``now``.
        resumes: the caller continues the run next.
    """
    from flows import amendments

    amended = amendments.amend(run, overrides, by=user_name(), why=why, at=at)
    if not amended.number:
        say(f"run {run.run_id}: nothing changes" + (", the run has these values" if overrides else ""))
        return
    for line in amendments.effects(run, amended, overrides, resumes=resumes):
        say(line)


def resume(
    run: RunOrSweepName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    why: Why = "",
    yes: Yes = False,
    detach: Detach = False,
    driver_as: DriverAs = None,
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
    submit = None
    if sweep:
        if driver_as:
            from flows.sweep.book import example

            submit = submit_of(example(sweep).cluster, driver_as, detach=detach)
    else:
        from conf.compose import amend as amended
        from conf.of_run import of_run

        config = of_run(paths)
        if overrides and not driver(paths):  # refused below
            config = amended(config, overrides)
        submit = submit_of(config.cluster, driver_as, detach=detach)
        from flows.control import cost_of_rest, is_complete

        if submit and is_complete(paths, config):
            say(f"run {paths.run_id} is finished")
            return

        if expense := cost_of_rest(paths, config, overrides or []):
            confirm(expense, config.cluster, "the rest of the run", yes=yes)
    if overrides:
        _amend(paths, overrides, why)
    announce(paths)
    if not submit and (taken := _take_over(paths)):
        say(taken)
    drive(paths, detach=detach, submit=submit, yes=yes)


def _take_over(run: RunPaths) -> str:
    """End the jobs that wait to drive a run, unless this process was started by one; return what was done."""
    chain = driver_job(run.driver_job)
    if chain is None or os.environ.get(CHAIN_ENV) == chain.token or driver(run):
        return ""
    from flows.control import end_driver_jobs

    end_driver_jobs(run, running=True)
    return f"{what_is(run)} {run.run_id}: the jobs that were to drive it are cancelled, because this process does now"


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

    Also stops a job that evaluates the run (`hlatctl eval --driver`). Works from any machine that shares the runs
    folder with the driver.
    """
    from flows.control import evaluating_process, request_stop, stop_evaluator_jobs

    if swept := find_sweep(run, runs_dir):
        _stop_sweep(swept, wait)
        return
    paths = find_run(run, runs_dir)
    if driver_job(paths.evaluator_job):
        ended = stop_evaluator_jobs(paths, wait)
        so_far = "is stopped; finished tasks are kept" if ended else f"is asked to stop; still running after {wait:g} s"
        say(f"{paths.run_id}: its evaluation {so_far}")
    elif by := evaluating_process(paths):
        say(f"{paths.run_id}: {by}")
    before = view_run(paths)
    if before.at_rest and not driver_job(paths.driver_job):
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
    kept = "finished tasks are kept" if view.state.evaluates else f"newest checkpoint: {newest}"
    say(f"{paths.run_id}: {view.status} at step {view.state.step}; {kept}")
    if view.can_resume:
        say(f"hlatctl resume {paths.run_id}   continues the run")


def _stop_sweep(sweep: SweepPaths, wait_s: float) -> None:
    from flows.control import request_sweep_stop

    state, pid = view_sweep(sweep)
    if sweep_at_rest(state, pid) and not driver_job(sweep.driver_job):
        say(f"{sweep.run_id}: is already {state.status}")
        return
    left = request_sweep_stop(sweep, by=user_name(), wait_s=wait_s)
    state, pid = view_sweep(sweep)
    if left or pid is not None:
        still = counted(left, "trial") if left else f"the {state.noun}'s driver"
        running = f"still running after {wait_s:g} s: {still}"
        say(f"{sweep.run_id}: stop requested; {running} (`hlatctl status {sweep.run_id}`)")
        return
    say(f"{sweep.run_id}: {state.status}; {counted(state.count('paused'), 'trial')} paused")
    if state.status != "finished":
        say(f"hlatctl resume {sweep.run_id}   continues the {state.noun}")


def fork(
    run: RunName,
    overrides: Changes = None,
    config_dir: ConfigDirs = None,
    at: Annotated[
        str, typer.Option(metavar="STEP|TOKENS|latest", help="The checkpoint, such as 5000 or 200B.")
    ] = "latest",
    decay: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Only decay the learning rate, over this share of all steps, such as 10%."),
    ] = None,
    restart_data: Annotated[bool, typer.Option("--restart-data", help="Read the corpus from its beginning.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Id of the new run.  [default: made from name and time]")] = None,
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    yes: Yes = False,
    detach: Detach = False,
    driver_as: DriverAs = None,
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
    from flows.runtime.spending import of_training, typed_in

    labels = change(name=name, tags=tag or (), note=note)
    parent = find_run(run, runs_dir)
    submit: Submit | None = None

    def agree(config: Config) -> None:
        nonlocal submit
        submit = submit_of(config.cluster, driver_as, detach=detach)
        typed = [*typed_in(parent), *(overrides or [])]
        confirm(of_training(config, typed=typed), config.cluster, "the rest of the training", yes=yes)

    new = create(
        parent,
        at,
        overrides or [],
        argv=sys.argv,
        run_id=run_id,
        restart_data=restart_data,
        decay_share=None if decay is None else _share(decay),
        confirm=agree,
    )
    write_label(new, labels, by=user_name())
    from conf.of_run import of_run

    config = of_run(new)
    warn_of_no_effect(config, overrides)
    origin = config.fork
    say(f"forked from {parent.run_id} at step {origin.step}, {origin.tokens:,} tokens")
    for key, (before, after) in differences(parent, new).items():
        say(f"{key}: {before} -> {after}")
    say("data: from the beginning of the corpus" if origin.restarts_data else "data: continue after the checkpoint's")
    drive(new, detach=detach, submit=submit)


#: A share closer to 1 makes the run longer by orders of magnitude.
_LONGEST_DECAY = 0.99


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= _LONGEST_DECAY:
        raise ConfigError(f"--decay={text}: must be a share of all steps, above 0 and at most 99 %", hint="--decay 10%")
    return share


#: Reads of the journal between two progress lines: 10 s.
_LINE_EVERY_LOOKS = 20


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record, at most 20.")] = 5,
    ranks: Annotated[str, typer.Option(metavar="R,R|all", help="Ranks that record, at most 16.")] = "0",
    memory: Annotated[bool, typer.Option(help="Also record each allocation.")] = True,
    runs_dir: RunsDir = None,
) -> None:
    """Record a few steps of a running job, without a restart.

    Writes a trace of each rank and a table of its operators into the run's folder profiles/, and prints the table of
    the first rank. The traces open in https://ui.perfetto.dev. All ranks wait while the files are written.
    """
    from flows import control

    paths = find_run(run, runs_dir)
    asked = control.request_profile(paths, steps=steps, ranks=_ranks(ranks), memory=memory, by=user_name())
    say(f"profile {asked.number}: asked training for {steps} steps of {_which(asked)}; Ctrl-C stops only the waiting")
    made = _wait(paths, asked)
    write(control.profile_table(paths, made))
    folder = paths.profile(made.number)
    say(f"profile {made.number}: steps {made.first_step} to {made.last_step}, {size(made.bytes)} in {folder}")


def _wait(run: RunPaths, asked: ProfileState) -> ProfileState:
    from flows import control

    made = asked
    try:
        for look, (step, profile) in enumerate(control.wait_for_profile(run, asked.number), start=1):
            made = profile
            if look % _LINE_EVERY_LOOKS == 0:
                say(f"profile {asked.number}: waiting, training is at step {step}")
    except KeyboardInterrupt:
        say(f"profile {asked.number}: goes on; it will be in {run.profile(asked.number)}")
        raise
    return made


def _ranks(text: str) -> list[int] | None:
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--ranks={text}: must be numbers of ranks, or `all`", hint="--ranks 0,3")
    return [int(word) for word in words]


def _which(profile: ProfileState) -> str:
    ranks = profile.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
