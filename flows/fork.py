"""Starts a run from another run's checkpoint, with its weights, optimizer state and data position.

The checkpoint is put into the new run's directory, as hard links where the file system allows them. So its trainer
continues as after any restart, and the other run may delete its copy. If the new run's engine stores checkpoints in
another format, the checkpoint is converted first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conf import compose
from conf.data_changes import added_skips
from conf.fork import check_continues, decay, is_of_data, of_stage
from conf.load import flatten, token_count
from conf.of_run import of_run
from conf.registries import BACKENDS
from conf.schema import Config, ForkConfig
from flows import pretrain
from flows.runtime.amended import train_like
from flows.runtime.context import is_simulated
from flows.runtime.programs import ask
from hlatctl.run import files
from hlatctl.run.checkpoint import Manifest, checkpoint_steps, read_manifest, why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError
from hlatctl.run.journal import no_steps, read_events
from hlatctl.run.paths import RunPaths, step_name
from hlatctl.run.runs import LATEST
from hlatctl.units import count


def fork(
    parent: RunPaths,
    at: str,
    overrides: Sequence[str],
    *,
    argv: list[str],
    run_id: str | None = None,
    restart_data: bool = False,
    decay_share: float | None = None,
    confirm: Callable[[Config], None] = lambda _: None,
) -> RunPaths:
    """Create a run that continues from another run's checkpoint.

    Args:
        at: a step, tokens with a unit (``200B``), or ``latest``.
        overrides: changes to the other run's amended configuration.
        restart_data: read the corpus from its beginning. A different corpus is always read from its beginning.
        decay_share: only decay the learning rate, over this share of the new run's steps.
        confirm: called with the configuration before anything is created; raises an error to refuse it.

    Raises:
        ConfigError: the configuration breaks a rule, or can't continue the checkpoint.
        CheckpointError: there is no such checkpoint, or it is incomplete.
        DataError, DependencyError, LaunchError, RunExistsError, StorageError: as :func:`flows.pretrain.create`.
    """
    before = replace(of_run(parent), runs_dir=os.fspath(parent.root.parent))  # the parent may have been moved
    if is_simulated(before):
        raise ConfigError(
            f"{parent.run_id}: is simulated, so its checkpoints contain no weights", hint="fork a run that has trained"
        )
    manifest = _manifest(parent, before, at)
    before = of_stage(before, manifest.step, restart_data=restart_data)
    after = compose.amend(replace(before, fork=ForkConfig()), overrides)
    if after.fork != ForkConfig():
        raise ConfigError("fork: is set by the command", hint="--at names the checkpoint")
    origin = ForkConfig(run=parent.run_id, step=manifest.step, tokens=manifest.tokens)
    if decay_share is not None:
        ending = decay(before, replace(after, fork=origin), decay_share)
        after = compose.amend(replace(before, fork=ForkConfig()), [*overrides, *ending])
    fresh = restart_data or not is_of_data(before, after)
    config = replace(
        after,
        fork=replace(origin, restarts_data=fresh),
        data=replace(after.data, skip_steps=_skips(parent, before, after, fresh)),
    )
    check_continues(before, config, anew=lambda kept: train_like(parent, overrides, with_weights=kept))
    confirm(config)
    with _in_format_of(config, parent, manifest) as checkpoint:
        run = pretrain.create(config, argv=argv, run_id=run_id, forked=True)
        with files.created_like(run.root):
            pretrain.adopt_checkpoint(checkpoint, run)
    return run


@contextmanager
def _in_format_of(config: Config, parent: RunPaths, manifest: Manifest) -> Iterator[Path]:
    """Yield the folder of a checkpoint in the format of a configuration's engine, converted if it has another one."""
    if manifest.format in (None, BACKENDS[config.backend.name].checkpoint_format):
        yield parent.checkpoint(manifest.step)
        return
    with files.private_folder("fork", within=os.fspath(parent.root.parent)) as scratch:
        target = scratch.path / step_name(manifest.step)
        argv = ("--run-dir", os.fspath(parent.root), "--step", str(manifest.step), "--to", os.fspath(target))
        ask("trainer.convert.torchtitan", *argv)
        yield target


def differences(parent: RunPaths, run: RunPaths) -> dict[str, tuple[object, object]]:
    """Return the values in which a fork's configuration differs from its parent's, by key; not those of ``fork``."""
    before, after = flatten(of_run(parent)), flatten(of_run(run))
    pairs = {key: (before.get(key), value) for key, value in after.items() if not key.startswith("fork.")}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _manifest(parent: RunPaths, config: Config, at: str) -> Manifest:
    steps = checkpoint_steps(parent)
    if not steps:
        raise CheckpointError(
            f"{parent.run_id}: has no checkpoint", hint=f"`hlatctl checkpoint ls {parent.run_id}` shows what it had"
        )
    if at == LATEST:
        step = steps[-1]
    elif at.isdecimal():
        step = int(at)
    else:
        step = config.step_reaching(token_count(at, "--at"))
    if step not in steps:
        have = ", ".join(f"{step} ({count(config.tokens_at(step))} tokens)" for step in steps[-5:])
        asked = f"step {step}" if at.isdecimal() else f"{at} tokens (step {step})"
        raise CheckpointError(
            f"--at={at}: {parent.run_id} has no checkpoint of {asked}", hint=f"it has {len(steps)}, the newest: {have}"
        )
    folder = parent.checkpoint(step)
    if reason := why_invalid(folder, checksums=False):
        raise CheckpointError(
            f"{folder}: {reason}", hint=f"`hlatctl checkpoint verify {parent.run_id}` checks all of them"
        )
    return read_manifest(folder)


def _skips(parent: RunPaths, before: Config, after: Config, fresh: bool) -> list[int | str]:
    """Return the batches to skip, including the other run's if the fork continues with the same data."""
    own = [entry for entry in after.data.skip_steps if entry not in before.data.skip_steps]
    if fresh:
        return own
    added = added_skips(read_events(parent, wanted=no_steps))
    return list(dict.fromkeys([*after.data.skip_steps, *added]))
