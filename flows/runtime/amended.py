"""Amendments of a run's configuration, as its driver follows them.

Each attempt begins with one configuration, ``config.yaml`` or ``config-<n>.yaml``. Later amendments of keys that may
change during an attempt are put into the context while the flow runs. Changes that the trainer must know are written to
the attempt's file of orders: new values of :data:`conf.amendments.LIVE`, and the step after which it ends for an
amendment. ``train_like`` returns the command for a new run, for hints about what an amendment can't change.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from conf.amendments import beginning_at, ends_after, live, live_values, new_values, with_changes
from conf.of_run import of_run, write_amended
from conf.schema import Config
from flows.runtime.context import FlowContext
from flows.runtime.driver import Clock
from hlatctl.report.run_list import overrides_of
from hlatctl.run import files
from hlatctl.run.errors import StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.paths import ProfileOrder, RunPaths
from hlatctl.run.state import AmendmentState, AttemptState, ProfileState, RunState

#: Seconds between touches of the file of orders while the trainer is to end for an amendment. It doesn't end if the
#: file was not touched recently: without a driver, nobody would start the next attempt.
_TOUCH_S = 20.0


def adopt(ctx: FlowContext) -> Config:
    """Put the configuration of the running or else the next attempt into a context, and return the previous one."""
    state, before = ctx.refresh(), ctx.config
    attempt = state.attempt
    if attempt is not None and attempt.ended_unix_s is None:
        number = attempt.config_number
    else:
        number = beginning_at(state.amendments, next_start(state))
    newest = _newest(ctx, number)
    if (number, newest) != (ctx.config_number, ctx.newest_live):  # a simulation has thousands of attempts
        ctx.config_number, ctx.newest_live = number, newest
        ctx.config = _in_force(ctx)
    return before


def next_start(state: RunState) -> int:
    """Return the step from which a run's next attempt would continue; 0: from the beginning."""
    newest = state.attempt
    ceiling = newest.next_max_checkpoint_step if newest else None
    return max((step for step in state.checkpoints if ceiling is None or step <= ceiling), default=0)


def config_words(ctx: FlowContext) -> tuple[str, str]:
    """Return the words of a job's command that name its configuration file, and write that file if it is missing."""
    file = ctx.when_there_is_room(lambda: write_amended(ctx.run, ctx.config_number))
    return "--config", os.fspath(file)


def follow(ctx: FlowContext) -> None:
    """Put amendments that take effect immediately into the context, and journal that they have begun."""
    newest = _newest(ctx, ctx.config_number)
    if newest != ctx.newest_live:
        ctx.newest_live = newest
        ctx.config = _in_force(ctx)
        ctx.clock.let_work(ctx.config.eval.concurrent)
    for amendment in live(ctx.state.amendments, ctx.config_number):
        # The trainer journals those that it applies itself.
        if amendment.applied_step is None and not (live_values([amendment]) and ctx.training_lives()):
            _begun(ctx, amendment, ctx.state.step)


def note_begun(ctx: FlowContext, attempt: AttemptState) -> None:
    """Journal that an attempt has begun with its amendments, once it has started to train."""
    start = attempt.resumed_from_step
    if start is None:
        return
    for amendment in ctx.state.amendments:
        applied = amendment.applied_step
        if amendment.number <= attempt.config_number and (applied is None or applied > start):
            _begun(ctx, amendment, start)


def _begun(ctx: FlowContext, amendment: AmendmentState, step: int) -> None:
    ctx.event("amendment_applied", number=amendment.number, step=step)
    keys = ", ".join(amendment.changes)
    late = f" ({amendment.late})" if amendment.late else ""
    ctx.message(f"amendment {amendment.number} is in force after step {step}{late}" + f": {keys}" * bool(keys))


def pause_step(state: RunState, config: Config) -> int | None:
    """Return the step after which the newest attempt ends so that its nodes can evaluate; None: for no evaluation.

    It is the first milestone after the attempt's start that is not evaluated, except the last step.
    """
    if config.eval_placement != "between" or state.attempt is None:
        return None
    start, ceiling = state.attempt.resumed_from_step, state.attempt.max_checkpoint_step
    if start is None:  # it has not loaded its checkpoint yet
        start = max((step for step in state.checkpoints if ceiling is None or step <= ceiling), default=0)
    steps = (step for step in sorted(config.milestones) if start < step < config.total_steps)
    return next((step for step in steps if not _is_settled(state, config.milestones[step])), None)


def _is_settled(state: RunState, milestone_tokens: int) -> bool:
    milestone = state.milestones.get(milestone_tokens)
    return milestone is not None and (milestone.is_done or milestone.status == "failed")


class Orders:
    """The driver's orders to a running attempt about amendments and profiles: a small file that rank 0 reads."""

    def __init__(self, run: RunPaths, attempt: AttemptState, clock: Clock) -> None:
        self._path, self._attempt, self._clock = run.orders(attempt.number), attempt, clock
        self._written: dict[str, Any] = {}
        self._touched_s = 0.0

    def give(self, state: RunState, config: Config) -> None:
        """Write the file if there is something new. On a full disk it is written later."""
        amendments, number = state.amendments, self._attempt.config_number
        profile = self._profile(state.open_profile)
        later = [a for a in live(amendments, number) if live_values([a])]
        ends = (ends_after(amendments, number), pause_step(state, config))
        end = min((step for step in ends if step is not None), default=None)
        order = {"numbers": [a.number for a in later], "values": live_values(later), "end_after_step": end}
        order["profile"] = profile
        now_s = self._clock.monotonic_s()
        stale = end is not None and now_s - self._touched_s > _TOUCH_S
        if (later or end is not None or profile) and (order != self._written or stale):
            with suppress(StorageError):
                files.write_json(self._path, order)
                self._written, self._touched_s = order, now_s

    def _profile(self, asked: ProfileState | None) -> dict[str, Any] | None:
        if asked is None or asked.attempt != self._attempt.number:
            return None
        return asdict(ProfileOrder(asked.number, asked.steps, asked.ranks, asked.memory))


def _newest(ctx: FlowContext, number: int) -> int:
    return max([number, *(a.number for a in live(ctx.state.amendments, number))])


def _in_force(ctx: FlowContext) -> Config:
    config = of_run(ctx.run, number=ctx.config_number)
    return with_changes(config, new_values(live(ctx.state.amendments, ctx.config_number)))


_WORDS = {True: "true", False: "false", None: "null"}


def train_like(run: RunPaths, overrides: Sequence[str], *, with_weights: bool) -> str:
    """Return a hint with the command for a new run like an existing one, with other values of some keys.

    It begins with the weights of the newest checkpoint if that is wanted and there is one.
    """
    state = read_state(run)
    changes = [change for amendment in state.amendments for change in amendment.changes.items()]
    amended = [f"{key}={_text(new)}" for key, (_, new) in changes]
    step = next_start(state) if with_weights else 0
    weights = [f"train.init_from={run.checkpoint(step)}"] if step else []
    own = overrides_of(state.argv) if state.argv[1:2] == ["train"] else None
    begins = "begins a new run" + " with the weights alone" * bool(weights)
    words = _last_of_each([*(own or []), *amended, *overrides, *weights])
    if own is None:  # a fork, or a trial of a sweep: its command line is not the whole configuration
        shown = shlex.join([*overrides, *weights])
        return f"`hlatctl train` with {shown} and the values of `hlatctl show {run.run_id}` {begins}"
    return f"`{shlex.join(['hlatctl', 'train', *_folders(state.argv), *words])}` {begins}"


def _text(value: object) -> str:
    return _WORDS[value] if isinstance(value, bool | None) else str(value)


def _last_of_each(overrides: Sequence[str]) -> list[str]:
    """Return overrides without those that a later one replaces: an option of a group may be given only once."""
    return list({word.partition("=")[0]: word for word in overrides}.values())


def _folders(argv: Sequence[str]) -> list[str]:
    pairs = itertools.pairwise(argv)
    return [word for pair in pairs if pair[0] == "--config-dir" for word in pair]
