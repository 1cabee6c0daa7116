"""Checks that resuming from a checkpoint reproduces the original run: trains some of its steps again and compares them.

The steps are trained in a private folder, with the run's launcher and from the run's checkpoint. Their losses and
gradient norms are compared with the journal. If the run has a checkpoint among these steps, its weights and moments are
compared too: a wrong moment of a row that no step uses changes no loss. The run itself is only read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import conf.load
from conf.data_changes import added_skips
from conf.of_run import of_run
from conf.schema import Config
from conf.training_rules import LOSS_TOLERANCE, NORM_TOLERANCE, TENSOR_TOLERANCE, relative_difference
from flows.launch.base import launcher_for
from flows.pretrain import adopt_checkpoint
from flows.runtime.context import FlowContext, is_simulated
from flows.runtime.jobs import run_job
from flows.runtime.programs import ask
from flows.stages.attempt import training_job
from hlatctl.run import files, runs
from hlatctl.run.checkpoint import checkpoint_steps
from hlatctl.run.errors import CheckpointError, ConfigError, DataError, RunBusyError
from hlatctl.run.files import private_folder
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, no_steps, read_events, train_writer, writer_events
from hlatctl.run.lease import driver, hold_driver
from hlatctl.run.paths import RunPaths, cache_dir
from hlatctl.run.provenance import package_versions
from hlatctl.run.state import RunState

#: More steps than any run has, so that no checkpoint is written.
_NEVER_STEPS = 1 << 40
#: More checkpoints than the training writes: one at the end of the steps, and one when it stops.
_KEEP = 10

#: Loss and gradient norm by step.
Steps = dict[int, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of training steps again.

    Args:
        from_step: step of the checkpoint.
        steps: number of compared steps.
        equal: number of steps with exactly the same loss and gradient norm.
        first_different: the first step that differs; None: all are equal.
        largest: largest relative difference of a loss; 0 if all are equal.
        largest_norm: largest relative difference of a gradient norm; 0 if all are equal.
        conditions: what differs from the run's attempt, such as the device; empty: nothing.
        must_equal: nothing differs, and the device is a CPU or has computed the same losses and norms, so every bit
            must be equal.
        tensors_at: the step after which weights and moments were compared; None: they were not.
        tensors: number of compared tensors.
        equal_tensors: number of tensors with exactly the same bits.
        first_tensor: name of the first tensor that differs; None: all are equal.
        largest_tensor: largest relative difference of a tensor; 0 if all are equal.
    """

    from_step: int
    steps: int
    equal: int
    first_different: int | None
    largest: float
    largest_norm: float
    conditions: list[str]
    must_equal: bool
    tensors_at: int | None = None
    tensors: int = 0
    equal_tensors: int = 0
    first_tensor: str | None = None
    largest_tensor: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether resuming reproduced the original run."""
        if self.must_equal:
            return self.first_different is None and self.first_tensor is None
        measured = (self.largest, self.largest_norm, self.largest_tensor)
        return all(
            m <= most for m, most in zip(measured, (LOSS_TOLERANCE, NORM_TOLERANCE, TENSOR_TOLERANCE), strict=True)
        )


def verify(
    run: RunPaths, *, most_steps: int, step: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Train the steps after a checkpoint again and compare them with the journal. Nothing in the run changes.

    Args:
        most_steps: maximum number of steps.
        step: step of the checkpoint; None: the newest one with a later checkpoint among the steps to train, or else the
            newest one with steps after it.
        say: called with messages about the progress.

    Raises:
        ConfigError: the run is simulated, or has no such checkpoint.
        CheckpointError: no checkpoint has steps after it.
        RunBusyError: the run has a driver.
        HlatctlError: the training failed.
    """
    state = read_state(run)
    if is_simulated(of_run(run)):
        raise ConfigError(f"{run.run_id}: is simulated, so there are no losses to compare", hint="choose another run")
    if holder := driver(run):
        raise RunBusyError(
            f"run {run.run_id}: {holder} drives it; training again would compete with it",
            hint=f"`hlatctl stop {run.run_id}`, then try again",
        )
    base, attempt, expected = _segment(run, state, most_steps, step)
    config = of_run(run, number=_config_number(state, attempt))
    at = max((kept for kept in checkpoint_steps(run) if kept in expected), default=None)
    say(f"training steps {base + 1} to {max(expected)} again, from the checkpoint of step {base}")
    cache = cache_dir(run.root.parent)
    cache.mkdir(exist_ok=True)  # the run may have been moved
    with private_folder("verify", within=os.fspath(cache)) as own:
        again = RunPaths(own.path / run.run_id)
        _prepare(run, again, config, base, save_at=at)
        _train(again, config, last=max(expected), save_at=at)
        losses = {s: pair for s, pair in _losses(read_state(again)).items() if s in expected}
        different = _conditions(run, attempt, again)
        if not losses:
            raise DataError(f"{run.run_id}: no step was trained again", hint=f"see `hlatctl logs {run.run_id}`")
        found = _compare(base, {s: expected[s] for s in losses}, losses, different, config)
        return found if at is None else _compare_tensors(found, run, again, at, say)


def _segment(run: RunPaths, state: RunState, most: int, wanted: int | None) -> tuple[int, int, Steps]:
    steps, attempts, losses, norms = state.steps.columns("step", "attempt", "loss", "grad_norm")
    kept = checkpoint_steps(run)
    if wanted is not None and wanted not in kept:
        raise ConfigError(
            f"--step={wanted}: {run.run_id} has no checkpoint of it",
            hint=f"it has those of steps {', '.join(map(str, kept[-5:])) or 'none'}",
        )
    at, newest = {step: index for index, step in enumerate(steps)}, None
    for base in [wanted] if wanted is not None else reversed(kept):
        first = at.get(base + 1)
        if first is None:
            continue
        attempt = attempts[first]
        within = [i for i in range(first, min(first + most, len(steps))) if attempts[i] == attempt]
        segment = base, int(attempt), {int(steps[i]): (losses[i], norms[i]) for i in within}
        if not segment[2].keys().isdisjoint(kept):
            return segment
        newest = newest or segment
    if newest:
        return newest
    raise CheckpointError(
        f"{run.run_id}: no checkpoint that is left has a trained step after it, so there is nothing to compare",
        hint="checkpoint.keep=3 keeps earlier checkpoints of a run too",
    )


def _config_number(state: RunState, attempt: int) -> int:
    return next((a.config_number for a in state.attempts if a.number == attempt), 0)


def _prepare(run: RunPaths, again: RunPaths, config: Config, base: int, *, save_at: int | None) -> None:
    """Create a run directory that continues from the checkpoint, with the same data and without evaluations."""
    skips = added_skips(read_events(run, wanted=no_steps))
    checkpoint = replace(
        config.checkpoint,
        every_steps=save_at or _NEVER_STEPS,
        keep=_KEEP,
        keep_every_tokens=None,
        remote_url=None,
        fast_dir=None,
        memory_every_steps=None,
    )
    quiet = replace(
        config,
        data=replace(config.data, skip_steps=[*config.data.skip_steps, *skips]),
        checkpoint=checkpoint,
        eval=replace(config.eval, enabled=False),
        tracking=replace(config.tracking, enabled=False),
    )
    runs.create_run(again.root.parent, again.run_id, conf.load.dump(quiet), files.PRIVATE)
    for path, copy in ((run.dataset, again.dataset), (run.compile_cache, again.compile_cache)):
        if path.exists():
            shutil.copyfile(path, copy)
    with files.created_like(again.root):
        adopt_checkpoint(run.checkpoint(base), again)


def _train(again: RunPaths, config: Config, *, last: int, save_at: int | None) -> None:
    with hold_driver(again):
        ctx = FlowContext(again, of_run(again), launcher_for(config))
        ctx.event("attempt_started", attempt=1, handle={})
        try:
            job = training_job(ctx.config, again, 1)
            job = replace(job, excluded_hosts=ctx.nodes.place().left_out)
            run_job(ctx, job, until=lambda: ctx.refresh().step >= last and _is_saved(ctx, save_at))
        finally:
            ctx.launcher.release(again.root)
            ctx.close()


def _is_saved(ctx: FlowContext, step: int | None) -> bool:
    """Return whether a step's checkpoint is written, or is skipped because the disk is full."""
    if step is None or step in ctx.state.checkpoints:
        return True
    return any(event["kind"] == "checkpoint_skipped" for event in writer_events(ctx.run, train_writer(0)))


def _losses(state: RunState) -> Steps:
    steps, losses, norms = state.steps.columns("step", "loss", "grad_norm")
    return {int(step): (loss, norm) for step, loss, norm in zip(steps, losses, norms, strict=True)}


def _conditions(run: RunPaths, attempt: int, again: RunPaths) -> list[str]:
    before, now = _train_started(run, attempt), _train_started(again, 1)
    pairs = [(name, before.get(name), now.get(name)) for name in ("device", "world")]
    versions: Mapping[str, str] = {}
    if run.provenance.is_file():
        versions = dict(files.read_json(run.provenance)).get("packages", {})
    pairs.append(("torch", versions.get("torch"), package_versions(("torch",)).get("torch")))
    return [f"{name} {old}, now {new}" for name, old, new in pairs if old != new]


def _train_started(run: RunPaths, attempt: int) -> Event:
    starts = (e for e in writer_events(run, train_writer(0)) if e["kind"] == "train_started")
    return next((e for e in starts if e["attempt"] == attempt), {})


def _compare(base: int, expected: Steps, losses: Steps, conditions: list[str], config: Config) -> Comparison:
    different = [step for step in expected if expected[step] != losses[step]]
    pairs = [(losses[step], expected[step]) for step in different]
    largest, largest_norm = (
        max((relative_difference(now[i], then[i]) for now, then in pairs), default=0.0) for i in (0, 1)
    )
    return Comparison(
        from_step=base,
        steps=len(losses),
        equal=len(expected) - len(different),
        first_different=min(different, default=None),
        largest=largest,
        largest_norm=largest_norm,
        conditions=conditions,
        must_equal=not conditions and (config.backend.device == "cpu" or not different),
    )


def _compare_tensors(
    found: Comparison, run: RunPaths, again: RunPaths, step: int, say: Callable[[str], None]
) -> Comparison:
    """Add the comparison of a step's two checkpoints: the run's, and that of the repeated training."""
    if step not in checkpoint_steps(again):
        say(f"weights and moments are not compared: there was no room for a checkpoint of step {step}")
        return found
    say(f"comparing weights and moments with the checkpoint of step {step}")
    folders = (os.fspath(of.checkpoint(step)) for of in (run, again))
    answer = json.loads(ask("trainer.checkpoint.compare", *folders, yields=True))
    return replace(
        found,
        tensors_at=step,
        tensors=answer["tensors"],
        equal_tensors=answer["equal"],
        first_tensor=answer["first_different"],
        largest_tensor=answer["largest"],
    )
