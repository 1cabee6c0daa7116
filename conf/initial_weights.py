"""Are the weights that a run begins with (``train.init_from``) whole, and are they this model's? Reads no tensor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError, ConfigError
from hlatctl.run.manifest import why_invalid
from hlatctl.run.reading import DAMAGED

#: In the folder of every checkpoint: the keys of ``model`` that it was written with.
MODEL = "model.json"
#: These say nothing of the weights: a label, and how random ones are drawn.
_FREE_KEYS = ("name", "initializer_range", "scaled_initialization")


def check_initial_weights(config: Config, *, checksums: bool) -> None:
    """Check that the folder is there, complete, and of a model with the configuration's keys.

    Args:
        config: a configuration; one without ``train.init_from`` passes.
        checksums: read every file of the folder, instead of comparing sizes alone.

    Raises:
        ConfigError: there is no such folder, or the weights are another model's; every differing key is named.
        CheckpointError: a file of the folder is missing or not as it was written.
    """
    if config.train.init_from is None:
        return
    folder = Path(config.train.init_from)
    if not folder.is_dir():
        raise ConfigError(
            f"train.init_from={folder}: no such folder",
            hint="`hlatctl checkpoint import` makes one from a Hugging Face folder; a run has them in checkpoints/",
        )
    reason = why_invalid(folder, checksums=checksums, of_run=False)
    if reason:
        raise CheckpointError(f"train.init_from={folder}: {reason}", hint="import the model, or copy the folder, again")
    theirs = _model_of(folder)
    ours = {key: value for key, value in asdict(config.model).items() if key not in _FREE_KEYS}
    differing = [key for key, value in ours.items() if theirs.get(key) != value]
    if differing:
        told = ", ".join(f"model.{key}={ours[key]} (the weights: {theirs.get(key)})" for key in differing)
        raise ConfigError(
            f"train.init_from={folder}: its weights are another model's: {told}",
            hint=" ".join(model_overrides({key: theirs.get(key) for key in differing})),
        )


def model_overrides(model: dict[str, Any]) -> list[str]:
    """The overrides that ask for a model, as a person types them; a label and random values are left out."""
    shown = {key: str(value).lower() if isinstance(value, bool) else value for key, value in model.items()}
    return [f"model.{key}={value}" for key, value in shown.items() if key not in _FREE_KEYS]


def _model_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(files.read_json(folder / MODEL))
    except (OSError, *DAMAGED):
        raise CheckpointError(
            f"train.init_from={folder}: no readable {MODEL}, which says what model its weights are of",
            hint="a checkpoint of a simulated run holds no weights; import the model, or name another checkpoint",
        ) from None
