"""What a person means by the TARGET of an evaluation: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hlatctl.run import runs
from hlatctl.run.errors import CheckpointError, ConfigError, EvaluationError, RunNotFoundError
from hlatctl.run.manifest import MANIFEST, read_manifest, steps_in, why_invalid
from hlatctl.run.model_folder import lacking
from hlatctl.run.paths import RunPaths

_KINDS = "TARGET is a run, a checkpoint's folder (.../checkpoints/step-00001000), or a Hugging Face folder"


@dataclass(frozen=True)
class RunTarget:
    """A run, or with a step one of its checkpoints, and the tokens that it had consumed by then."""

    run: RunPaths
    step: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class FolderTarget:
    """A model from elsewhere, in Hugging Face's format."""

    folder: Path


Target = RunTarget | FolderTarget


def find(name: str, runs_dir: Path) -> Target:
    """The target of that name: a run's id, the beginning of one or ``latest``; else a folder.

    Raises:
        RunNotFoundError: there is neither such a run nor such a folder.
        CheckpointError: a checkpoint that is not complete.
        EvaluationError: a folder, or a file, that is none of these.
    """
    path = Path(name).expanduser()
    is_path = os.sep in name or name in (".", "..")
    if not is_path:
        try:
            return RunTarget(runs.find_run(runs_dir, name))
        except RunNotFoundError as error:
            if not path.exists():
                raise RunNotFoundError(error.message, hint=f"{error.hint}; {_KINDS}") from None
    if not path.exists():
        raise RunNotFoundError(f"TARGET={name}: no such folder", hint=_KINDS)
    return _of_folder(name, path.absolute())


def _of_folder(name: str, path: Path) -> Target:
    if not path.is_dir():
        raise EvaluationError(f"TARGET={name}: is a file", hint=_KINDS)
    if (path / "config.yaml").is_file():
        return RunTarget(RunPaths(path))
    if (path / MANIFEST).is_file() or (steps_in(path.parent) and path.name.startswith("step-")):
        return _checkpoint(name, path)
    if steps_in(path):
        raise EvaluationError(
            f"TARGET={name}: holds checkpoints and is none", hint=f"name one of them: {max(path.glob('step-*'))}"
        )
    what = lacking(path)
    if not what:
        return FolderTarget(path)
    if any(any(path.glob(pattern)) for pattern in ("config.json", "*.safetensors", "*.bin")):
        pickled = any(path.glob("*.bin"))
        why = "; *.bin files are pickles, which are never opened" if pickled and "safetensors" in what else ""
        raise EvaluationError(f"TARGET={name}: is no Hugging Face model, it has no {what}{why}", hint=_KINDS)
    raise EvaluationError(
        f"TARGET={name}: is neither a run (it has no config.yaml), nor a checkpoint (no {MANIFEST}), "
        "nor a Hugging Face model (no config.json)",
        hint=_KINDS,
    )


def _checkpoint(name: str, path: Path) -> RunTarget:
    run = RunPaths(path.parent.parent)
    if path.parent != run.checkpoints or not run.config.is_file():
        raise EvaluationError(
            f"TARGET={name}: is a checkpoint outside of a run, so that its tokenizer is not known",
            hint="an imported model is evaluated as the Hugging Face folder that it came from",
        )
    reason = why_invalid(path, checksums=False)
    if reason:
        raise CheckpointError(
            f"TARGET={name}: {reason}", hint=f"`hlatctl checkpoint ls {run.run_id}` lists the good ones"
        )
    manifest = read_manifest(path)
    return RunTarget(run, manifest.step, manifest.tokens)


def refuse_at(target: Target, at: int | None) -> None:
    """Refuse ``--at`` where there is nothing to choose from.

    Raises:
        ConfigError: the target is a single model.
    """
    if at is not None and (isinstance(target, FolderTarget) or target.step is not None):
        raise ConfigError(
            f"--at={at}: chooses a milestone of a run, and TARGET is one model already", hint="leave it out"
        )
