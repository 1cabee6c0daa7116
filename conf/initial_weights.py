"""Check that the initial weights (``train.init_from``) are complete and fit the model. Reads no tensor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import read_manifest, why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError
from hlatctl.run.files import DAMAGED

#: File in every checkpoint with the ``model`` keys of its configuration.
MODEL = "model.json"
#: Keys that don't describe the weights: a label, how random weights are drawn, and how learning rates follow the width.
_FREE_KEYS = ("name", "initializer_range", "scaled_initialization", "mup_base_width")


def check_initial_weights(config: Config) -> None:
    """Check that the folder exists, is complete, and contains the configuration's model. Checksums aren't verified.

    A configuration without ``train.init_from`` passes.

    Raises:
        ConfigError: there is no such folder, or the weights belong to a different model (names every differing key), or
            another engine wrote them.
        CheckpointError: a file is missing or has changed.
    """
    if config.train.init_from is None:
        return
    folder = Path(config.train.init_from)
    if not folder.is_dir():
        raise ConfigError(
            f"train.init_from={folder}: no such folder",
            hint="`hlatctl checkpoint import` makes one from a Hugging Face folder; a run has them in checkpoints/",
        )
    reason = why_invalid(folder, checksums=False, of_run=False)
    if reason:
        raise damaged(folder, reason)
    backend, written = config.backend.name, read_manifest(folder).format
    if written not in (None, wanted := BACKENDS[backend].checkpoint_format):
        raise ConfigError(
            f"train.init_from={folder}: its format is {written}; backend.name={backend} reads {wanted}",
            hint=f"`hlatctl fork RUN backend={backend}` converts a run's checkpoint, and `hlatctl checkpoint import "
            f"HF_FOLDER --to DIR --backend {backend}` imports a model in this format",
        )
    theirs, model = _model_of(folder), asdict(config.model)
    # The shape of a model with a name is for the planner.
    keys = ("module", "flavor") if config.model.module else [key for key in model if key not in _FREE_KEYS]
    ours = {key: model[key] for key in keys}
    differing = [key for key, value in ours.items() if theirs.get(key) != value]
    if differing:
        differences = ", ".join(f"model.{key}={ours[key]} (the weights: {theirs.get(key)})" for key in differing)
        raise ConfigError(
            f"train.init_from={folder}: its weights belong to a different model: {differences}",
            hint=" ".join(model_overrides({key: theirs.get(key) for key in differing})),
        )


def damaged(folder: Path, reason: str) -> CheckpointError:
    """Return the error for initial weights that are incomplete or have changed."""
    return CheckpointError(f"train.init_from={folder}: {reason}", hint="import the model, or copy the folder, again")


def model_overrides(model: dict[str, Any]) -> list[str]:
    """Return a model as overrides, without its label and the settings of random weights."""
    words: dict[Any, str] = {True: "true", False: "false", None: "null"}
    shown = {key: words[value] if isinstance(value, bool | None) else value for key, value in model.items()}
    return [f"model.{key}={value}" for key, value in shown.items() if key not in _FREE_KEYS]


def _model_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(files.read_json(folder / MODEL))
    except (OSError, *DAMAGED):
        raise CheckpointError(
            f"train.init_from={folder}: no readable {MODEL}, which describes the model of its weights",
            hint="a checkpoint of a simulated run contains no weights; import the model, or name another checkpoint",
        ) from None
