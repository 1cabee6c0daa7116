"""Changes the configuration of an existing run.

Each amendment is checked like a new run's configuration and journalled.
"""

from __future__ import annotations

import math
import os
import reprlib
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from conf import compose, tracking
from conf.amendments import IN_WORDS, Changes, When, begins, changes_between, fields_of, rule_of, waiting
from conf.fork import have_same_tensors, is_of_weights
from conf.of_run import CONFIG_AMENDED, newest_amendment, of_run, write_amended
from conf.origins import overridden_keys
from conf.schema import Config
from conf.training_rules import learning_rate
from conf.validate import without_effect
from flows.runtime.amended import next_start, train_like
from flows.runtime.context import is_simulated, refuse_archived
from flows.runtime.programs import ask_about
from flows.stages.validate import check, check_remote, check_shape
from hlatctl.plan.pace import seconds_per_step
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, EvaluationError, RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import OPERATOR_WRITER, JournalWriter
from hlatctl.run.lease import driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.redact import hide
from hlatctl.run.state import RunState

_TIMEOUT_S = 120
#: Time for an order to reach the trainer: the driver looks every 0.5 s, rank 0 every 2 s, and both do other work too.
_NOTICE_S = 5.0
#: Time for a person to repeat the command, whose checks take some seconds.
_HINT_S = 60.0
#: Keys that change the learning rate.
_OF_THE_RATE = ("optimizer.", "train.tokens", "train.max_steps")
#: Keys that only steps of training read.
_OF_TRAINING = ("optimizer.", "precision.", "parallel.", "train.", "data.", "checkpoint.", "backend.")
_value = reprlib.Repr()
_value.maxstring = _value.maxother = _value.maxdict = 60


@dataclass(frozen=True)
class Amended:
    """An amendment that was made, or that turned out not to be needed.

    Args:
        number: number of the amendment; 0: nothing changes, so none was made.
        changes: old and new value of each changed key.
        begins: when the amendment takes effect.
        at_step: the step after which it takes effect; None: as ``begins`` says.
        step: the run's newest step.
        is_driven: the run has a driver.
        before, after: the run's configuration.
    """

    number: int
    changes: Changes
    begins: When
    at_step: int | None
    step: int
    is_driven: bool
    before: Config
    after: Config


def amend(
    run: RunPaths,
    overrides: Sequence[str],
    *,
    by: str,
    why: str = "",
    at: int | str | None = None,
    number: int | None = None,
    only_check: bool = False,
) -> Amended:
    """Change a run's configuration. Nothing is written if the new configuration equals the old one or is refused.

    Args:
        overrides: as for `hlatctl train`; empty: begin pending amendments now.
        by: name of the user, for the journal.
        why: reason, for the journal.
        at: step after which the change takes effect, or ``now``; None: as soon as each key may change.
        number: the amendment's number when it was checked; None: it was not.
        only_check: write nothing, and return what would be amended.

    Raises:
        ConfigError: the new configuration breaks a rule, or a key may not change.
        DataError, DependencyError, LaunchError, EvaluationError: as for a new run with this configuration.
        RunBusyError: another amendment was made in the meantime.
        StorageError: the journal can't be written.
    """
    known, before = newest_amendment(run), of_run(run)
    if number is not None and known + 1 != number:
        raise _changed_meanwhile(run)
    _check_run(run, read_state(run), before, driver(run) is not None)
    after = compose.amend(before, overrides)
    if not overrides and at is None:
        raise ConfigError("no key is given, so nothing changes", hint=f"`hlatctl amend {run.run_id} optimizer.lr=1e-4`")

    def check_state() -> Amended:
        return _check_state(run, before, after, overrides, at, known + 1)

    found = check_state()
    if not found.number:
        return found
    _check_like_new(run, before, after, found.changes)  # this takes seconds, during which a running run keeps training
    return found if only_check else _write(run, known, check_state, by=by, why=hide(why))


def effects(run: RunPaths, amended: Amended, overrides: Sequence[str], *, resumes: bool = False) -> list[str]:
    """Return lines for a person: what an amendment changes, what follows from it, and when it begins.

    Args:
        resumes: the caller continues the run next.
    """
    lines = [f"{key}: {_value.repr(old)} -> {_value.repr(new)}" for key, (old, new) in amended.changes.items()]
    typed = (key for text in overrides for key in overridden_keys(text))
    lines += [f"warning: {text}" for text in without_effect(amended.after, typed)]
    begins = "begins now, or with the next attempt" if resumes else _when(run, amended)
    return [*lines, *_consequences(amended), f"amendment {amended.number} {begins}"]


def _consequences(amended: Amended) -> list[str]:
    lines = []
    step = max(amended.at_step or 0, amended.step) + 1
    trains = any(key.startswith(_OF_TRAINING) for key in amended.changes)
    if trains and step > max(amended.before.total_steps, amended.after.total_steps):
        lines.append(
            f"training ended with step {amended.step}: this has an effect only if a larger train.tokens or "
            "train.max_steps continues it"
        )
    elif any(key.startswith(_OF_THE_RATE) for key in amended.changes):
        before, after = (
            f"{learning_rate(step, config):.4g}" if step <= config.total_steps else "none"
            for config in (amended.before, amended.after)
        )
        lines.append(f"learning rate of step {step}: {before} -> {after}")
    if amended.before.total_steps != amended.after.total_steps:
        lines.append(f"last step: {amended.before.total_steps} -> {amended.after.total_steps}")
    redone = dict.fromkeys(rule_of(key).redoes for key in amended.changes)
    redone.pop("nothing", None)
    return [*lines, f"redoes: {'; '.join(redone)}"] if redone else lines


def _when(run: RunPaths, amended: Amended) -> str:
    ahead = amended.at_step is not None and amended.at_step > amended.step
    if ahead or (amended.at_step is not None and amended.is_driven):
        after = f"step {amended.at_step}" if ahead else "the current step"
        return f"begins after {after}: a checkpoint is written there, and training restarts from it"
    if not amended.is_driven:
        return f"begins when the run continues: `hlatctl resume {run.run_id}`"
    if amended.begins != "next_attempt":
        return f"begins {IN_WORDS[amended.begins]}"
    late = next(key for key in amended.changes if rule_of(key).when == "next_attempt")
    return f"begins with the next attempt, because of {late}; `hlatctl amend {run.run_id} --at now` begins it now"


def _changed_meanwhile(run: RunPaths) -> RunBusyError:
    return RunBusyError(
        f"run {run.run_id}: another amendment was made meanwhile",
        hint=f"`hlatctl logs {run.run_id}` shows it; then try again",
    )


def _check_state(
    run: RunPaths, before: Config, after: Config, overrides: Sequence[str], at: int | str | None, number: int
) -> Amended:
    """Check an amendment against the run's current state. Its number is 0 if it isn't needed."""
    state, is_driven, changes = read_state(run), driver(run) is not None, changes_between(before, after)
    _check_run(run, state, before, is_driven)
    at_step = _at_step(state, at, changes, before, after, is_driven=is_driven)
    is_new = bool(changes) or (not overrides and any(a.applied_step is None for a in state.amendments))
    if is_new:
        _check_keys(run, state, changes, overrides)
        _check_values(run, state, before, after)
        _check_precision(run, state, before, after, overrides, is_driven=is_driven)
        if is_driven:
            _check_running(run, before, after, changes, at_step)
        _check_order(state, changes, at_step)
    return Amended(number if is_new else 0, changes, begins(changes), at_step, state.step, is_driven, before, after)


def _check_run(run: RunPaths, state: RunState, config: Config, is_driven: bool) -> None:
    refuse_archived(run, state)
    if state.evaluates:
        raise ConfigError(
            f"{run.run_id}: evaluates a model and trains none", hint="`hlatctl eval MODEL` with other eval.* keys"
        )
    if is_simulated(config) and is_driven:
        raise ConfigError(
            f"{run.run_id}: is simulated and runs now; its simulated cluster can't change",
            hint=f"`hlatctl stop {run.run_id}`, then `hlatctl resume {run.run_id} key=value`",
        )


def _at_step(
    state: RunState, at: int | str | None, changes: Changes, before: Config, after: Config, *, is_driven: bool
) -> int | None:
    if at is None:
        return None
    if is_simulated(before):
        raise ConfigError(f"--at={at}: simulated training doesn't end for an amendment", hint="leave out --at")
    if changes and begins(changes) == "at_once":
        raise ConfigError(
            f"--at={at}: {next(iter(changes))} changes immediately, without a restart", hint="leave out --at"
        )
    if at == "now":
        return next_start(state)
    if not str(at).isdecimal():
        raise ConfigError(f"--at={at}: must be a step or `now`", hint=f"--at {state.step + 100}")
    if int(at) <= state.step:
        raise ConfigError(
            f"--at={at}: is not after the newest step, {state.step}",
            hint="--at now begins as soon as a checkpoint is written",
        )
    soon = state.step + (_steps_in(state, before, _NOTICE_S) if is_driven else 0)
    if int(at) <= soon:
        raise ConfigError(
            f"--at={at}: is too soon; the run is at step {state.step} and can reach step {soon} before it knows",
            hint=f"--at {soon + max(100, _steps_in(state, before, _HINT_S))}, or --at now",
        )
    last = min(before.total_steps, after.total_steps)
    if int(at) >= last:
        raise ConfigError(f"--at={at}: training ends with step {last}", hint="name an earlier step")
    return int(at)


def _steps_in(state: RunState, config: Config, seconds: float) -> int:
    """Return how many steps the running attempt trains in this time; 0 if none is running or its pace is unknown."""
    attempt, pace_s = state.attempt, seconds_per_step(state, config)
    trains = attempt is not None and attempt.ended_unix_s is None
    return math.ceil(seconds / pace_s) if trains and pace_s else 0


def _check_keys(run: RunPaths, state: RunState, changes: Changes, overrides: Sequence[str]) -> None:
    for key, (old, new) in changes.items():
        row = rule_of(key)
        if row.when == "never":
            raise ConfigError(
                f"{key}={new}: can't change in a run that exists (it is {old}), because {row.redoes}",
                hint=_instead(run, state, key, overrides),
            )


def _instead(run: RunPaths, state: RunState, key: str, overrides: Sequence[str]) -> str:
    if key == "data.skip_steps":
        return f"`hlatctl data skip {run.run_id} --steps N`"
    if key == "train.stages":
        return f"`hlatctl fork {run.run_id}` continues the newest checkpoint's stage in a run without stages"
    if key.startswith("fork."):
        return f"`hlatctl fork {run.run_id} --at STEP` begins a new run from one of its checkpoints"
    anew = is_of_weights(key) or key in ("optimizer.name", "train.init_from")
    if anew or not state.checkpoints:
        return train_like(run, overrides, with_weights=key == "optimizer.name")
    restart = " --restart-data" * (key == "train.global_batch_size")
    command = f"hlatctl fork {run.run_id}{restart} {shlex.join(overrides)}"
    return f"`{command}` begins a new run from the newest checkpoint"


def _check_running(run: RunPaths, before: Config, after: Config, changes: Changes, at_step: int | None) -> None:
    if at_step is None and after.total_steps < before.total_steps:
        raise ConfigError(
            f"train.tokens={after.train.tokens}, train.max_steps={after.train.max_steps}: end training earlier, and "
            "the running attempt could pass that step",
            hint="--at now restarts training with the new end",
        )
    for key in sorted({"data.path", "tokenizer.path"} & set(changes)):
        new = changes[key][1]
        raise ConfigError(
            f"{key}={new}: is compared with the run's corpus first, and the run is running",
            hint=f"`hlatctl stop {run.run_id}`, then `hlatctl resume {run.run_id} {key}={new}`",
        )


def _check_values(run: RunPaths, state: RunState, before: Config, after: Config) -> None:
    trained = max(state.step, next_start(state))
    for key in changes_between(before, after) if before.stages else ():
        left = [stage.last_step for stage in after.stages if stage.last_step > trained]
        old, new = ([fields_of(config.during(step))[key] for step in left] for config in (before, after))
        if left and old == new:
            raise ConfigError(
                f"{key}={fields_of(after)[key]}: has no effect, because the stages that are left set it",
                hint=f"`hlatctl fork {run.run_id} {key}=VALUE` continues the current stage with another value",
            )
    if after.total_steps != before.total_steps and after.total_steps <= trained:
        length = f"train.tokens={after.train.tokens}, train.max_steps={after.train.max_steps}"
        raise ConfigError(
            f"{length}: end after step {after.total_steps}, and the run has trained {trained} steps",
            hint=f"`hlatctl stop {run.run_id}` ends it now; a later end needs more than "
            f"{after.tokens_at(trained)} tokens",
        )
    if is_simulated(before) != is_simulated(after):
        raise ConfigError(
            f"cluster.launcher={after.cluster.launcher}: a run is simulated from its beginning or not at all",
            hint="`hlatctl train` begins another run",
        )


def _check_precision(
    run: RunPaths, state: RunState, before: Config, after: Config, overrides: Sequence[str], *, is_driven: bool
) -> None:
    """Refuse a different precision if checkpoints exist, or an attempt will write one before the amendment begins."""
    old, new = before.precision.name, after.precision.name
    if have_same_tensors(old, new) or not (state.checkpoints or before.fork.run or (is_driven and state.attempts)):
        return
    raise ConfigError(
        f"precision.name={new}: the checkpoints have the weights and moments of {old}, which {new} can't continue",
        hint=train_like(run, overrides, with_weights=True),
    )


def _check_order(state: RunState, changes: Changes, at_step: int | None) -> None:
    """Refuse an amendment that would begin before one that waits for a step, unless it begins immediately."""
    held = waiting(state.amendments, next_start(state))
    later = next((a for a in held if a.at_step is not None), None)
    if later is None or begins(changes) == "at_once":
        return
    assert later.at_step is not None
    if at_step is None:
        raise ConfigError(
            f"amendment {later.number} waits for step {later.at_step}, and amendments begin in order",
            hint=f"--at {later.at_step} begins both there; --at now begins both now",
        )


def _check_like_new(run: RunPaths, before: Config, after: Config, changes: Changes) -> None:
    check(after, begun=True)
    if not is_simulated(after):
        check_shape(after)
    if after.checkpoint.remote_url != before.checkpoint.remote_url:
        check_remote(after, run.run_id)
    if any(key.startswith("tracking.") for key in changes):
        tracking.check_mirrors(after)
    if after.eval.enabled and run.contract.is_file() and any(key.startswith("eval.") for key in changes):
        _check_contract(run, after)


def _check_contract(run: RunPaths, config: Config) -> None:
    if is_simulated(config):
        return
    try:
        ask_about("eval.check", config, "--run-dir", os.fspath(run.root), timeout_s=_TIMEOUT_S)
    except EvaluationError as error:
        error.hint = (
            f"a run's own evaluations keep their contract; `hlatctl eval {run.run_id} KEY=VALUE --new-contract` "
            "evaluates under another one"
        )
        raise


def _write(run: RunPaths, known: int, check_state: Callable[[], Amended], *, by: str, why: str) -> Amended:
    """Journal the amendment, then write its configuration file. Readers recreate a lost file from the event."""
    with files.created_like(run.root):
        with JournalWriter(run, OPERATOR_WRITER) as journal:  # the journal's lock excludes other operators
            if newest_amendment(run) != known:
                raise _changed_meanwhile(run)
            made = check_state()
            if not made.number:
                return made
            fields = {"at_step": made.at_step, "newest_step": made.step, "by": by, "why": why}
            journal.append(CONFIG_AMENDED, durable=True, number=made.number, changes=made.changes, **fields)
        with suppress(OSError):  # a full disk: the amendment is made, and each reader recreates the file
            write_amended(run, made.number)
    return made
