"""Resolves the TARGET of an evaluation: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hlatctl.report.run_list import called
from hlatctl.run import runs
from hlatctl.run.checkpoint import MANIFEST, read_manifest, steps_in, why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError, EvaluationError, RunNotFoundError
from hlatctl.run.files import why
from hlatctl.run.model_folder import check_sizes, lacking
from hlatctl.run.paths import RunPaths

_KINDS = "TARGET is a run, a checkpoint's folder (.../checkpoints/step-00001000), or a Hugging Face folder"


@dataclass(frozen=True)
class RunTarget:
    """A run or, with a step, one of its checkpoints and the tokens consumed until then."""

    run: RunPaths
    step: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class FolderTarget:
    """An external model in Hugging Face's format."""

    folder: Path


Target = RunTarget | FolderTarget


def find(name: str, runs_dir: Path) -> Target:
    """Return the target with this name: a run's id or its beginning, ``latest``, or else a folder.

    Raises:
        RunNotFoundError: no run and no folder has this name.
        CheckpointError: the checkpoint is incomplete.
        EvaluationError: the folder or file is not a target.
    """
    path = Path(name).expanduser()
    is_path = os.sep in name or name in (".", "..")
    if not is_path:
        try:
            return RunTarget(runs.find_run(runs_dir, name))
        except RunNotFoundError as error:
            if run := called(runs_dir, name):
                return RunTarget(run)
            if not name or not path.exists():
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
            f"TARGET={name}: contains checkpoints but isn't one", hint=f"name one of them: {max(path.glob('step-*'))}"
        )
    missing = lacking(path)
    if not missing:
        try:
            check_sizes(path)
        except OSError as error:
            what = f"{error.filename} can't be used ({why(error)})"
            raise EvaluationError(f"TARGET={name}: {what}", hint=_KINDS) from None
        return FolderTarget(path)
    if any(any(path.glob(pattern)) for pattern in ("config.json", "*.safetensors", "*.bin")):
        pickled = any(path.glob("*.bin"))
        note = "; *.bin files are pickles, which are never opened" if pickled and "safetensors" in missing else ""
        raise EvaluationError(f"TARGET={name}: is no Hugging Face model, it has no {missing}{note}", hint=_KINDS)
    raise EvaluationError(
        f"TARGET={name}: is neither a run (it has no config.yaml), nor a checkpoint (no {MANIFEST}), "
        "nor a Hugging Face model (no config.json)",
        hint=_KINDS,
    )


def _checkpoint(name: str, path: Path) -> RunTarget:
    run = RunPaths(path.parent.parent)
    if path.parent != run.checkpoints or not run.config.is_file():
        raise EvaluationError(
            f"TARGET={name}: is a checkpoint outside of a run, so its tokenizer is unknown",
            hint="to evaluate an imported model, name its original Hugging Face folder",
        )
    reason = why_invalid(path, checksums=False)
    if reason:
        raise CheckpointError(
            f"TARGET={name}: {reason}", hint=f"`hlatctl checkpoint ls {run.run_id}` lists the valid ones"
        )
    manifest = read_manifest(path)
    return RunTarget(run, manifest.step, manifest.tokens)


def refuse_at(target: Target, at: int | None) -> None:
    """Check that ``--at`` is used only with a run.

    Raises:
        ConfigError: the target is a single model.
    """
    if at is not None and (isinstance(target, FolderTarget) or target.step is not None):
        raise ConfigError(f"--at={at}: chooses a milestone of a run, but TARGET is a single model", hint="omit --at")
