"""Proves that a run's checkpoint continues as the run did: trains some of its steps again and compares the losses.

The steps are trained in a private folder with the run's own launcher, from the run's own checkpoint. The run's journal
and checkpoints are only read.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import conf.load
from conf.amend import amended_skips
from conf.of_run import of_run
from conf.schema import Config
from flows.checkpoint_link import adopt_checkpoint
from flows.launchers import launcher_for
from flows.runtime.context import FlowContext, is_mock
from flows.runtime.jobs import run_job
from flows.stages.train import training_job
from hlatctl.run import files, runs
from hlatctl.run.errors import CheckpointError, ConfigError, DataError, RunBusyError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import Event, no_steps, read_events, train_writer, writer_events
from hlatctl.run.lease import driver, hold_driver
from hlatctl.run.manifest import checkpoint_steps
from hlatctl.run.paths import RunPaths, cache_dir
from hlatctl.run.provenance import package_versions
from hlatctl.run.scratch import private_folder
from hlatctl.run.state import RunState

#: Processors and devices round differently: the largest relative difference of a loss between two of them.
TOLERANCE = 1e-3
#: More steps than any run, so that no checkpoint is written.
_NEVER_STEPS = 1 << 40

#: Loss and gradient norm of steps.
Steps = dict[int, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of training steps again.

    Args:
        from_step: the checkpoint.
        steps: how many were compared.
        equal: how many have exactly the same loss and gradient norm.
        first_different: the first step that has not; None: all have.
        largest: relative difference of a loss; 0 if all are equal.
        conditions: what differs from the run's own attempt, such as the device; empty: nothing.
        must_equal: nothing differs and the device always computes the same, so every bit must be equal.
    """

    from_step: int
    steps: int
    equal: int
    first_different: int | None
    largest: float
    conditions: list[str]
    must_equal: bool

    @property
    def holds(self) -> bool:
        """Whether the checkpoint continues as the run did."""
        return self.first_different is None or (not self.must_equal and self.largest <= TOLERANCE)


def verify(
    run: RunPaths, *, most_steps: int, step: int | None = None, say: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Train the steps after a checkpoint again and compare them with the journal.

    Args:
        run: the run directory; nothing in it changes.
        most_steps: how many steps at most.
        step: of the checkpoint; None: the newest one with steps after it.
        say: shows a line of progress.

    Raises:
        ConfigError: the run is simulated, or has no such checkpoint.
        CheckpointError: no checkpoint has steps after it.
        RunBusyError: the run has a driver.
        HlatctlError: the training failed.
    """
    state = read_state(run)
    if is_mock(of_run(run)):
        raise ConfigError(f"{run.run_id}: is simulated, so there are no losses to compare", hint="choose another run")
    if holder := driver(run):
        raise RunBusyError(
            f"run {run.run_id}: {holder} drives it; training again would compete with it",
            hint=f"`hlatctl stop {run.run_id}`, then try again",
        )
    base, attempt, expected = _segment(run, state, most_steps, step)
    config = of_run(run, number=_config_number(state, attempt))
    say(f"training steps {base + 1} to {max(expected)} again, from the checkpoint of step {base}")
    cache = cache_dir(run.root.parent)
    cache.mkdir(exist_ok=True)  # the run may have been moved
    with private_folder("verify", within=os.fspath(cache)) as own:
        again = RunPaths(own.path / run.run_id)
        _prepare(run, again, config, base)
        _train(again, config, last=max(expected))
        losses = {s: pair for s, pair in _losses(read_state(again)).items() if s in expected}
        different = _conditions(run, attempt, again)
    if not losses:
        raise DataError(f"{run.run_id}: no step was trained again", hint=f"see `hlatctl logs {run.run_id}`")
    return _compare(base, {s: expected[s] for s in losses}, losses, different, config)


def _segment(run: RunPaths, state: RunState, most: int, wanted: int | None) -> tuple[int, int, Steps]:
    """Return a checkpoint's step, the attempt that trained the steps after it, and these steps."""
    steps, attempts, losses, norms = state.steps.columns("step", "attempt", "loss", "grad_norm")
    kept = checkpoint_steps(run)
    if wanted is not None and wanted not in kept:
        raise ConfigError(
            f"--step={wanted}: {run.run_id} has no checkpoint of it",
            hint=f"it has those of steps {', '.join(map(str, kept[-5:])) or 'none'}",
        )
    at = {step: index for index, step in enumerate(steps)}
    for base in [wanted] if wanted is not None else reversed(kept):
        first = at.get(base + 1)
        if first is None:
            continue
        attempt = attempts[first]
        within = [i for i in range(first, min(first + most, len(steps))) if attempts[i] == attempt]
        return base, int(attempt), {int(steps[i]): (losses[i], norms[i]) for i in within}
    raise CheckpointError(
        f"{run.run_id}: no checkpoint that is left has a trained step after it, so there is nothing to compare",
        hint="checkpoint.keep=3 keeps earlier checkpoints of a run too",
    )


def _config_number(state: RunState, attempt: int) -> int:
    return next((a.config_number for a in state.attempts if a.number == attempt), 0)


def _prepare(run: RunPaths, again: RunPaths, config: Config, base: int) -> None:
    """Make a run directory that continues from the checkpoint, with the same data and without evaluations."""
    skips = amended_skips(read_events(run, wanted=no_steps))
    checkpoint = replace(
        config.checkpoint, every_steps=_NEVER_STEPS, keep_every_tokens=None, mirror_url=None, fast_dir=None
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
        adopt_checkpoint(run, again, base)


def _train(again: RunPaths, config: Config, *, last: int) -> None:
    with hold_driver(again):
        ctx = FlowContext(again, of_run(again), launcher_for(config))
        ctx.event("attempt_started", attempt=1, handle={})
        try:
            job = training_job(ctx.config, again, 1)
            run_job(ctx, replace(job, excluded_hosts=ctx.place().left_out), until=lambda: ctx.refresh().step >= last)
        finally:
            ctx.launcher.release(again.root)
            ctx.close()


def _losses(state: RunState) -> Steps:
    steps, losses, norms = state.steps.columns("step", "loss", "grad_norm")
    return {int(step): (loss, norm) for step, loss, norm in zip(steps, losses, norms, strict=True)}


def _conditions(run: RunPaths, attempt: int, again: RunPaths) -> list[str]:
    """Return in what the machine at hand differs from that of the run's attempt."""
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
    relative = (abs(losses[s][0] - expected[s][0]) / max(abs(expected[s][0]), 1e-12) for s in different)
    largest = max((value if math.isfinite(value) else math.inf for value in relative), default=0.0)
    return Comparison(
        from_step=base,
        steps=len(losses),
        equal=len(expected) - len(different),
        first_different=min(different, default=None),
        largest=largest,
        conditions=conditions,
        must_equal=not conditions and config.backend.device == "cpu",
    )
