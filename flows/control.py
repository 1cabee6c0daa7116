"""Asks a run or a sweep to stop, or for a profile of its training, from any process that shares its runs folder.

The requests go through files only: the run's journal, which its driver reads, and the driver's file of orders.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conf.devices import DEVICES
from conf.of_run import of_run
from conf.schema import Config
from flows.launch.base import AwayError, Drivers, drivers_for, launcher_for
from flows.runtime.context import is_simulated, live_training, refuse_archived
from flows.runtime.spending import Expense, of_training, typed_in, used_up
from flows.stages.attempt import STOP_GRACE_S, next_attempt
from hlatctl.driver_job import DriverJob, driver_job
from hlatctl.run import files, stopping
from hlatctl.run.errors import ConfigError, HlatctlError, RunBusyError, StorageError
from hlatctl.run.fold import apply, follow, read_state
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver, holder, is_held, wait_until_undriven
from hlatctl.run.paths import MOST_RANKS, MOST_STEPS, RunPaths, SweepPaths, table_name
from hlatctl.run.state import ProfileState, RunState
from hlatctl.run.sweep import fold as fold_sweep
from hlatctl.units import size


def request_stop(run: RunPaths, *, by: str, wait_s: float) -> RunState:
    """Ask a run to write a checkpoint and stop, wait for its driver to end, and return the state after that.

    The run's driver reads the request from the journal. If the driver is dead, a training job that is still running is
    cancelled directly, even on a full disk, and the run's kept nodes are released. Jobs that wait to drive the run are
    cancelled first.

    Raises:
        StorageError: the request can't be written to the journal, so the driver can't read it.
    """
    as_job = end_driver_jobs(run)
    try:
        with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER) as journal:
            stopping.request(run, journal, by=by)
    except StorageError as error:
        if driven_by := driver(run):
            if driven_by.pid:
                on = f" on {driven_by.host}" if driven_by.is_elsewhere else ""
                error.hint = f"`kill -INT {driven_by.pid}`{on} asks the run's driver to stop; or free space"
            raise
    wait_until_undriven(run, wait_s)
    if driver(run) is None:
        if as_job:
            as_job.end(run.driver_job)  # one that has started and doesn't drive yet
        launcher = launcher_for(of_run(run))
        if job := live_training(read_state(run), launcher):
            launcher.cancel(job, grace_s=STOP_GRACE_S)
        launcher.release(run.root)
    return read_state(run)


def request_sweep_stop(sweep: SweepPaths, *, by: str, wait_s: float) -> int:
    """Ask a sweep to stop all its trials, each with a checkpoint, wait for it, and return how many trials still run.

    The sweep's driver reads the request from the journal. If the driver is dead, the trials that still run are asked
    directly; they continue when the sweep is resumed. Jobs that wait to drive the sweep are cancelled first.

    Args:
        by: name of the requester, for the journals.
        wait_s: seconds to wait.
    """
    until_s = time.monotonic() + wait_s
    as_job = end_driver_jobs(sweep)
    with files.created_like(sweep.root), JournalWriter(sweep, OPERATOR_WRITER) as journal:
        stopping.request(sweep, journal, by=by)
        if driver(sweep) is None:
            for number, trial in fold_sweep(read_events(sweep)).trials.items():
                if trial.status == "running":
                    journal.append("trial_paused", durable=True, trial=number)
                    request_stop(sweep.trial(number), by=by, wait_s=0.0)
    wait_until_undriven(sweep, wait_s)
    if as_job and driver(sweep) is None:
        as_job.end(sweep.driver_job)  # one that has started and doesn't drive yet
    paused = [n for n, trial in fold_sweep(read_events(sweep)).trials.items() if not trial.ended]
    while (left := sum(driver(sweep.trial(number)) is not None for number in paused)) and time.monotonic() < until_s:
        time.sleep(_LOOK_EVERY_S)
    return left


def is_complete(run: RunPaths, config: Config) -> bool:
    """Return whether a run has nothing left to do with this configuration.

    Raises:
        CheckpointError: it is archived, so it can't continue.
    """
    state = read_state(run)
    refuse_archived(run, state)
    return state.status == "finished" and not state.evaluates and next_attempt(state, config) is None


def cost_of_rest(run: RunPaths, config: Config, overrides: Sequence[str] = ()) -> Expense | None:
    """Return what the rest of a run's training costs; None if continuing the run submits nothing, or is refused anyway.

    Args:
        config: the run's configuration, with the amendments to make, which are ``overrides``.

    Raises:
        BudgetError: the run's budget is used up.
    """
    state = read_state(run)
    if state.evaluates or state.archived or driver(run) or next_attempt(state, config) is None:
        return None  # other rules refuse it, or it has trained
    before = of_run(run)  # has the nodes whose hours are counted
    cluster = replace(before.cluster, price_usd_per_node_hour=config.cluster.price_usd_per_node_hour)
    if over := used_up(run.run_id, state, replace(before, budget=config.budget, cluster=cluster)):
        raise over
    if state.simulated or (state.attempt and state.attempt.ended_unix_s is None and not state.queued):
        return None  # nothing runs, or its job was running, so the driver takes it over
    return of_training(config, done=state.step, typed=[*typed_in(run), *overrides])


def end_driver_jobs(run: RunPaths, *, running: bool = False) -> Drivers | None:
    """Let no further job drive a run, and cancel those that wait; a running one too if asked for.

    Returns:
        What submitted them; None if no job was to drive the run.
    """
    chain = driver_job(run.driver_job)
    if chain is None:
        return None
    drivers = drivers_for(chain.launcher)
    (drivers.end if running else drivers.end_waiting)(run.driver_job)
    return drivers


def stop_evaluator_jobs(run: RunPaths, wait_s: float) -> bool:
    """Stop the jobs that evaluate a run, and wait for their end; return whether they have ended or there was none."""
    chain = driver_job(run.evaluator_job)
    if chain is not None:
        drivers_for(chain.launcher).interrupt(run.evaluator_job)
        deadline = time.monotonic() + wait_s
        while is_held(run.evaluator_lock) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
    return not is_held(run.evaluator_lock)


def evaluating_process(run: RunPaths) -> str:
    """Return which process evaluates a run, and what stops it; empty if none does. Requests to stop don't reach it."""
    held = holder(run.evaluator_lock)
    return f"{held} evaluates it; Ctrl-C there, or `kill -INT {held.pid}`, stops that" if held else ""


def job_text(place: Path) -> str:
    """Return the state of a chain of jobs (``hlatctl.driver_job``) in words; empty if there is none."""
    chain = driver_job(place)
    if chain is None:
        return ""
    try:
        return drivers_for(chain.launcher).state(place) or none_left(place, chain)
    except AwayError:
        return "unknown: the scheduler does not answer"
    except HlatctlError as error:
        return f"unknown: {error.message}"


def none_left(place: Path, chain: DriverJob) -> str:
    """Return that none of the jobs of a chain is left, and the command that submits one."""
    run = RunPaths(place.parent)
    command = "eval" if place == run.evaluator_job else "resume"
    again = f"`hlatctl {command} {run.run_id} --driver {chain.launcher}` submits one"
    return f"none of its jobs waits or runs any more; {again}"


#: Seconds between two reads of the journal.
_LOOK_EVERY_S = 0.5
#: Bytes of a compressed trace for each layer of each micro-batch of a step, with the operators of the optimizer.
#: Measured on a CPU: 15 KiB; a GPU adds a kernel for each operator.
_LAYER_BYTES = 32 << 10
#: Training steps that must remain besides the recorded ones: those until the order arrives, and those of warm-up.
_SPARE_STEPS = 4


def request_profile(run: RunPaths, *, steps: int, ranks: list[int] | None, memory: bool, by: str) -> ProfileState:
    """Request a profile of some ranks of a run's training, or of all. Nothing is written if it can't be made.

    Raises:
        ConfigError: the run isn't training, has no such ranks, or its backend has a profiler of its own.
        RunBusyError: another profile is being made.
        StorageError: the disk is too small, or the journal can't be written.
    """
    config, state = of_run(run), read_state(run)
    _check_backend(run, config, state)
    chosen = _checked_ranks(config, ranks)
    _check_steps(steps)
    attempt = _check_training(run, config, state, steps)
    _check_room(run, config, steps, len(chosen))
    with files.created_like(run.root), JournalWriter(run, OPERATOR_WRITER, attempt) as journal:
        state = read_state(run)  # the journal's lock excludes other requests
        attempt = journal.attempt = _check_training(run, config, state, steps)
        if asked := state.open_profile:
            raise RunBusyError(
                f"run {run.run_id}: profile {asked.number} is being made, for {asked.by}",
                hint=f"`hlatctl logs {run.run_id}` shows its end; then try again",
            )
        number = max((profile.number for profile in state.profiles), default=0) + 1
        asked = ProfileState(number, attempt, steps, chosen, memory, by)
        journal.append(
            "profile_requested", durable=True, number=number, steps=steps, ranks=chosen, memory=memory, by=by
        )
    return asked


def wait_for_profile(run: RunPaths, number: int) -> Iterator[tuple[int, ProfileState]]:
    """Yield the run's newest step and the profile after each read, until the profile is made or has failed.

    Raises:
        RunBusyError: the profile failed, or the driver that would deliver the request has ended.
    """
    state, tail = follow(run)
    while (profile := next(one for one in state.profiles if one.number == number)).status == "asked":
        yield state.step, profile
        if driver(run) is None:
            raise RunBusyError(
                f"run {run.run_id}: its driver has ended, which passes the request on",
                hint=f"`hlatctl resume {run.run_id}`; training that still runs then makes the profile",
            )
        time.sleep(_LOOK_EVERY_S)
        for event in tail.read_new():
            apply(state, event)
    if profile.status == "failed":
        shutil.rmtree(run.partial_profile(number), ignore_errors=True)  # left by an attempt that was killed
        raise RunBusyError(
            f"run {run.run_id}: profile {number} was not made: {profile.message}",
            hint=f"`hlatctl profile {run.run_id}` asks again",
        )
    yield state.step, profile


def profile_table(run: RunPaths, profile: ProfileState) -> str:
    """Return the operators of the first rank of a profile, by time."""
    path = run.profile(profile.number) / table_name(profile.ranks[0])
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: can't be read ({error})", hint="`hlatctl profile` makes another one") from None


def _check_backend(run: RunPaths, config: Config, state: RunState) -> None:
    if state.evaluates:
        raise ConfigError(f"run {run.run_id}: evaluates a model and trains none", hint="name a run that trains")
    if is_simulated(config):
        raise ConfigError(
            f"run {run.run_id}: is simulated, and no process trains", hint="`hlatctl runs` lists the runs that train"
        )
    if config.backend.kind.torch_xla or not DEVICES[config.backend.device].profiled:
        raise ConfigError(
            f"run {run.run_id}: backend.name={config.backend.name}, backend.device={config.backend.device}: PyTorch's "
            "profiler does not see what the device does",
            hint="on a node, `neuron-profile capture` records a compiled graph, and `neuron-top` shows the cores",
        )


def _checked_ranks(config: Config, ranks: list[int] | None) -> list[int]:
    world = config.world_size
    chosen = list(range(world)) if ranks is None else sorted(set(ranks))
    if len(chosen) > MOST_RANKS:
        raise ConfigError(f"--ranks: {len(chosen)} ranks, and at most {MOST_RANKS} write traces", hint="--ranks 0,1")
    if not chosen or chosen[-1] >= world or chosen[0] < 0:
        raise ConfigError(f"--ranks={','.join(map(str, chosen))}: the run has ranks 0 to {world - 1}", hint="--ranks 0")
    return chosen


def _check_steps(steps: int) -> None:
    if not 0 < steps <= MOST_STEPS:
        raise ConfigError(
            f"--steps={steps}: must be from 1 to {MOST_STEPS}; a trace has every operator", hint="--steps 5"
        )


def _check_training(run: RunPaths, config: Config, state: RunState, steps: int) -> int:
    attempt = state.attempt
    if state.status == "finished":
        raise ConfigError(
            f"run {run.run_id}: is finished, so nothing trains",
            hint="`hlatctl runs --status running` lists the runs that train",
        )
    if driver(run) is None:
        raise ConfigError(
            f"run {run.run_id}: no driver is running, so nothing trains", hint=f"`hlatctl resume {run.run_id}`"
        )
    if attempt is None or attempt.ended_unix_s is not None or attempt.resumed_from_step is None or state.train_stopped:
        raise ConfigError(
            f"run {run.run_id}: no step is being trained now",
            hint=f"`hlatctl status {run.run_id}` shows when training starts",
        )
    left = config.total_steps - max(state.step, attempt.resumed_from_step)
    if left < steps + _SPARE_STEPS:
        raise ConfigError(
            f"--steps={steps}: training ends in {left} steps; a profile needs {_SPARE_STEPS} besides its own",
            hint="profile earlier, or name fewer steps",
        )
    return attempt.number


def _check_room(run: RunPaths, config: Config, steps: int, ranks: int) -> None:
    layers = config.model.num_layers * config.grad_accum_steps + config.model.num_layers
    needed_bytes, free_bytes = ranks * steps * layers * _LAYER_BYTES, shutil.disk_usage(run.root).free
    if free_bytes < needed_bytes:
        raise StorageError(
            f"{run.root}: {size(free_bytes)} are free, and traces of {steps} steps of {ranks} ranks can need "
            f"{size(needed_bytes)}",
            hint="free space, or name fewer --steps and --ranks",
        )
