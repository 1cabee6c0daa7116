"""Continues prompts with a run's checkpoint or a Hugging Face model, in a separate process that imports torch.

A checkpoint is first exported to a private folder, which is removed at the end. The process imports torch meanwhile.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.of_run import of_run
from conf.sampling import Sampling
from flows.runtime.context import is_simulated
from flows.runtime.programs import Conversation, ask, conversation
from flows.targets import FolderTarget, Target
from hlatctl.run.checkpoint import folder_steps
from hlatctl.run.errors import CheckpointError, ConfigError, DependencyError, EvaluationError, LaunchError, install
from hlatctl.run.files import private_folder
from hlatctl.run.fold import read_state
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.units import count, size

#: Default device of a model, and the one to use if the requested device is missing.
_EVERYWHERE = "cpu"
#: How often to retry with a newer checkpoint because training deleted the one being exported.
_EXPORTS = 3
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to continue prompts with.

    Args:
        run: the run whose checkpoint is used; None: ``folder`` has the model.
        step: step of the checkpoint; None: the newest valid one.
        context_tokens: context length in training; None: as the model's configuration says.
        yields: a driver trains the run, so that this process must not slow it.
    """

    run: RunPaths | None = None
    step: int | None = None
    folder: Path | None = None
    device: str = _EVERYWHERE
    context_tokens: int | None = None
    yields: bool = False


class Model:
    """A loaded model.

    Args:
        facts: ``device``, ``parameters`` and ``context_tokens``; ``run_id``, ``step`` and ``tokens`` of a checkpoint,
            or ``model``, the folder.
    """

    def __init__(self, talk: Conversation, facts: dict[str, Any]) -> None:
        self._talk, self.facts = talk, facts

    def generate(self, prompt: str, sampling: Sampling, write: Callable[[str], None]) -> dict[str, Any]:
        """Continue a prompt and return the end of the answer: the fields of ``eval.generate.Text``, and ``wall_s``.

        Args:
            write: called with each piece of the text as soon as it is generated. It can contain control characters.

        Raises:
            EvaluationError: the prompt doesn't fit, or the model can't generate.
        """
        self._talk.say(prompt=prompt, sampling=dataclasses.asdict(sampling))
        while "end" not in (answer := self._talk.hear()):
            if "refused" in answer:
                raise EvaluationError(str(answer["refused"]), hint=str(answer["hint"]))
            write(answer["text"])
        end: dict[str, Any] = answer["end"]
        return end

    @property
    def is_running(self) -> bool:
        """Whether the process is running and takes another prompt."""
        return self._talk.is_running

    def stop(self) -> None:
        """Stop generating; the pending call returns the text so far."""
        self._talk.interrupt()


def source_of(target: Target, *, step: int | None, device: str | None) -> Source:
    """Return the model that a target names; by default the newest checkpoint, and the CPU while the run is training.

    Raises:
        ConfigError: a step was given for something other than a run, or the run is simulated.
        CheckpointError: the run has no such checkpoint.
    """
    if step is not None and (isinstance(target, FolderTarget) or target.step is not None):
        raise ConfigError(
            f"--step={step}: chooses a checkpoint of a run, but TARGET is a single model", hint="omit --step"
        )
    if isinstance(target, FolderTarget):
        return Source(folder=target.folder, device=device or _EVERYWHERE)
    run, config = target.run, of_run(target.run)
    if is_simulated(config):
        raise ConfigError(
            f"run {run.run_id}: is simulated, so it has no weights", hint="`hlatctl runs` lists runs that were trained"
        )
    state = read_state(run)
    if state.imported:
        raise ConfigError(
            f"run {run.run_id}: has scores that were imported, and no model", hint="name a run, or a model's folder"
        )
    if evaluates := state.evaluates:
        return source_of(FolderTarget(Path(evaluates)), step=step, device=device)
    is_trained_now = driver_pid(run) is not None
    wanted = target.step if step is None else step
    _refuse_missing(run, wanted)
    return Source(
        run=run,
        step=wanted,
        device=device or (_EVERYWHERE if is_trained_now else _of_generation(config.backend.device)),
        context_tokens=config.train.seq_len,
        yields=is_trained_now,
    )


def _of_generation(device: str) -> str:
    """Return the device to generate on for a training device. Neuron would compile a graph for every length."""
    return _EVERYWHERE if device == "neuron" else device


def _refuse_missing(run: RunPaths, step: int | None) -> None:
    steps = folder_steps(run)
    if not steps:
        raise CheckpointError(
            f"run {run.run_id}: has no checkpoint yet", hint=f"`hlatctl status {run.run_id}` shows its progress"
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"--step={step}: run {run.run_id} has no such checkpoint",
            hint=f"steps with a checkpoint: {', '.join(map(str, steps))}",
        )


@contextmanager
def opened(source: Source, *, needs_device: bool, say: Say) -> Iterator[Model]:
    """Load a model and yield it; end its process and remove its files at the end of the block.

    If the source's device is missing, the CPU is used unless the device is needed. ``say`` gets messages of progress.

    Raises:
        DependencyError, CheckpointError, EvaluationError, StorageError: the model can't be exported or loaded.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise DependencyError(f"the package {package} is not installed", hint=install("eval"))
    with private_folder("generate") as own:
        scratch = os.fspath(own.path)
        with conversation("eval.generate", "--scratch", scratch, folder=own.path, yields=source.yields) as talk:
            folder, facts = _model_of(source, own.path / "model", say)
            say(f"loading {source.folder or 'it'} on {source.device}")
            talk.say(
                model=os.fspath(folder),
                context_tokens=source.context_tokens,
                device=source.device,
                needs_device=needs_device,
                after_document=source.run is not None,
            )
            ready = talk.hear()["ready"]
            if not str(ready["device"]).startswith(source.device):
                say(f"this machine has no device {source.device}, so the model runs on {ready['device']}")
            yield Model(talk, {**facts, **ready})


def _model_of(source: Source, scratch: Path, say: Say) -> tuple[Path, dict[str, Any]]:
    if source.run is None:
        assert source.folder is not None
        return source.folder, {"model": os.fspath(source.folder)}
    run_id = source.run.run_id
    say(f"exporting {'the newest checkpoint' if source.step is None else f'step {source.step}'} of run {run_id}")
    written = _export(source, source.run, scratch)
    what = f"{count(written['tokens'])} tokens, {count(written['parameters'])} parameters, {size(written['bytes'])}"
    say(f"step {written['step']} of run {run_id}: {what}")
    return scratch, {"run_id": run_id, "step": written["step"], "tokens": written["tokens"]}


def _export(source: Source, run: RunPaths, to: Path) -> dict[str, Any]:
    """Export a checkpoint. If training has deleted the newest one in the meantime, export the one after it."""
    chosen = ("--step", str(source.step)) if source.step is not None else ()
    argv = ("--run-dir", os.fspath(run.root), "--to", os.fspath(to), *chosen)
    for left in reversed(range(_EXPORTS)):
        before = folder_steps(run)
        try:
            written: dict[str, Any] = json.loads(ask("trainer.convert.export", *argv, yields=source.yields))
            return written
        except (CheckpointError, LaunchError):
            if source.step is not None or not left or folder_steps(run) == before:
                raise
    raise AssertionError("the last export returns or raises")
