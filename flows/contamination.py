"""Looks for evaluation items in the part of the corpus that a run has read.

The evaluator renders the items, because only it knows the harness. The trainer's package reads the corpus
(``eval.item_texts``, ``trainer.data.overlap``). Both processes run at low priority, because training may run on the
same machine.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config
from flows.runtime.programs import ask, ask_about
from hlatctl.run import files
from hlatctl.run.checkpoint import MANIFEST, checkpoint_steps
from hlatctl.run.errors import CheckpointError, DataError, EvaluationError, cannot_write
from hlatctl.run.evaluations import find_milestone
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from hlatctl.units import count

#: Hexadecimal digits in the name of an items file.
_NAME_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Upto:
    """A milestone, and the checkpoint that records what was read: the milestone's own or, without one, the next."""

    milestone_tokens: int
    step: int
    is_later: bool


def upto(run: RunPaths, state: RunState, tokens: int | None) -> Upto:
    """Return a milestone that was reached; by default the newest one.

    Raises:
        DataError, EvaluationError, ConfigError, CheckpointError: nothing says what the run had read there.
    """
    _check_corpus(run, state)
    if not state.milestones:
        raise EvaluationError(
            f"{run.run_id}: has reached no milestone", hint=f"`hlatctl status {run.run_id}` shows its progress"
        )
    error = f"--at={count(tokens or 0)}: {run.run_id} has no milestone of {tokens or 0:,} tokens"
    chosen = max(state.milestones) if tokens is None else find_milestone(tokens, state.milestones, error)
    step = state.milestones[chosen].step
    there = sorted(s for s in checkpoint_steps(run) if s >= step and (run.checkpoint(s) / MANIFEST).is_file())
    if not there:
        raise CheckpointError(
            f"{run.run_id}: no checkpoint of step {step} or later says what was read up to {count(chosen)} tokens",
            hint=f"`hlatctl checkpoint ls {run.run_id}` lists the existing ones; choose an earlier milestone with --at",
        )
    return Upto(milestone_tokens=chosen, step=there[0], is_later=there[0] > step)


def search(
    run: RunPaths, config: Config, point: Upto, *, workers: int | None, shard: str, chunks: int | None
) -> dict[str, Any]:
    """Render the items, scan the corpus up to a point, and return the summary of ``trainer.data.overlap``.

    Args:
        workers: number of processes; None: one per core, fewer if memory is scarce.
        shard: the part to search, as ``I/N``.
        chunks: maximum number of chunks; None: all.
    """
    folder = run.contamination(point.milestone_tokens)
    with files.created_like(run.root):
        items = _rendered(config, folder)
        argv = ["--run-dir", os.fspath(run.root.absolute()), "--step", str(point.step), "--shard", shard]
        argv += ["--items", os.fspath(items.absolute()), "--to", os.fspath(folder.absolute())]
        argv += ["--workers", str(workers)] if workers else []
        argv += ["--chunks", str(chunks)] if chunks else []
        answer: dict[str, Any] = json.loads(ask("trainer.data.overlap", *argv, show_talk=True, yields=True))
    return answer


def _rendered(config: Config, folder: Path) -> Path:
    """Write the items and return their file. Its name has a hash, so that scans of other items keep theirs."""
    new = folder / f".items-{uuid.uuid4().hex}.jsonl"
    try:
        ask_about("eval.item_texts", config, "--to", os.fspath(new.absolute()), show_talk=True, yields=True)
        return new.replace(folder / f"items-{files.sha256_file(new)[:_NAME_DIGITS]}.jsonl")
    except OSError as error:
        raise cannot_write(folder, error) from None
    finally:
        new.unlink(missing_ok=True)


def _check_corpus(run: RunPaths, state: RunState) -> None:
    if state.evaluates:
        raise DataError(
            f"{run.run_id}: evaluates an external model, whose training corpus is unknown",
            hint="name a run that `hlatctl train` has made; `hlatctl runs` lists them",
        )
    if state.simulated:
        raise DataError(
            f"{run.run_id}: is simulated, so it has no corpus",
            hint="choose a run that is not simulated; `hlatctl runs` marks simulated ones",
        )
    if not run.dataset.is_file():
        raise DataError(
            f"{run.dataset}: no such file, so the run's corpus is unknown",
            hint=f"`hlatctl status {run.run_id}` shows whether the run has prepared its data",
        )
