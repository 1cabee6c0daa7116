"""Rules for a run that begins from another run's checkpoint; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from conf.load import flatten
from conf.schema import Config
from conf.training_rules import last_stable_step, learning_rate
from hlatctl.run.errors import ConfigError

#: Keys that don't change which documents come next.
_FREE_DATA = ("data.prefetch_batches", "data.skip_steps", "data.mask_across_documents", "data.on_corrupt")
#: Keys of the rotary embeddings.
ROTARY = (
    "model.rope_theta",
    "model.rope_scaling",
    "model.rope_scaling_factor",
    "model.rope_low_freq_factor",
    "model.rope_high_freq_factor",
    "model.rope_beta_slow",
    "model.rope_beta_fast",
    "model.rope_original_seq_len",
)
#: Keys of the model that don't affect its tensors.
_FREE_MODEL = (
    "model.name",
    *ROTARY,
    "model.rms_norm_eps",
    "model.initializer_range",
    "model.scaled_initialization",
    "model.mup_base_width",
)
#: Formats whose checkpoints have the same tensors.
SAME_TENSORS = (frozenset({"fp32", "mixed", "fp8"}), frozenset({"bf16_sr", "bf16"}))


def of_stage(config: Config, step: int, *, restart_data: bool) -> Config:
    """Return the configuration of a checkpoint's stage as that of a run without stages, which ends with the stage.

    Raises:
        ConfigError: the corpus is read in other rows than the stage's batch has, and a fork is to continue it.
    """
    stage = config.stage_at(step)
    if stage is None:
        return config
    batch = stage.config.train.global_batch_size
    if batch != config.data_rows and not restart_data:
        raise ConfigError(
            f"train.global_batch_size={batch}: stage {stage.name} reads the corpus in the first stage's "
            f"{config.data_rows} rows, and a fork has no stages",
            hint="add --restart-data to read the corpus from its beginning",
        )
    return replace(stage.config, train=replace(stage.config.train, stages=[], tokens=stage.last_tokens))


def is_of_data(before: Config, after: Config) -> bool:
    """Return whether a position in one configuration's data has the same meaning in the other's."""
    return _data(before) == _data(after)


def is_of_weights(key: str) -> bool:
    """Return whether a checkpoint's weights depend on the value of a key."""
    return key.startswith(("model.", "tokenizer.")) and key not in _FREE_MODEL


def have_same_tensors(precision: str, other: str) -> bool:
    """Return whether a checkpoint of one number format can be continued in the other."""
    return precision == other or any({precision, other} <= same for same in SAME_TENSORS)


def decay(before: Config, after: Config, share: float) -> list[str]:
    """Return the overrides with which a fork only decays its learning rate, from the checkpoint to 0 or the final rate.

    Args:
        before: configuration of the run that wrote the checkpoint.
        after: configuration of the fork, with its ``fork``.
        share: length of the decay, as a share of all steps of the fork, those before the checkpoint included.

    Raises:
        ConfigError: the rate has not reached its peak at the checkpoint, or has begun to decay.
    """
    step, peak = after.fork.step, before.optimizer.lr
    rate = learning_rate(step, before)
    if rate != peak or after.optimizer.lr != peak:
        what = (
            f"{rate:.4g} there, and its peak {peak:.4g}"
            if rate != peak
            else f"{peak:.4g}, here {after.optimizer.lr:.4g}"
        )
        raise ConfigError(
            f"--decay: continues from the peak of the learning rate; at step {step} of {after.fork.run} it is {what}",
            hint="choose a checkpoint of the stable phase of optimizer.schedule=wsd (--at); without --decay a fork may "
            "have any schedule",
        )
    near = int(step / (1 - share))
    total = next(last for last in range(max(near - 2, step + 1), near + 3) if last_stable_step(last, share) == step)
    return [
        "optimizer.schedule=wsd",
        f"optimizer.wsd_decay_fraction={share}",
        f"train.tokens={after.tokens_at(total)}",
        "train.max_steps=null",
    ]


def check_continues(before: Config, after: Config, *, anew: Callable[[bool], str]) -> None:
    """Check that a run can continue from a checkpoint that was written with another configuration.

    Args:
        before: configuration of the run that wrote it.
        after: configuration of the new run, with its ``fork``.
        anew: returns a hint to begin a new run instead, from initial weights or from the checkpoint's.

    Raises:
        ConfigError: it can't; names key and rule.
    """
    for error in _errors(before, after, anew):
        raise error


def _errors(before: Config, after: Config, anew: Callable[[bool], str]) -> Iterator[ConfigError]:
    old, new = flatten(before), flatten(after)
    for key in new:
        if is_of_weights(key) and new[key] != old.get(key):
            what = "tokens" if key.startswith("tokenizer.") else "shape"
            yield ConfigError(
                f"{key}={new[key]}: the checkpoint's weights are of another {what} ({old.get(key)})", hint=anew(False)
            )
    if not have_same_tensors(before.precision.name, after.precision.name):
        yield ConfigError(
            f"precision.name={after.precision.name}: the checkpoint has the weights and moments of "
            f"{before.precision.name}, which {after.precision.name} can't continue",
            hint=anew(True),
        )
    if before.optimizer.name != after.optimizer.name:
        yield ConfigError(
            f"optimizer.name={after.optimizer.name}: the checkpoint has the moments of {before.optimizer.name}",
            hint=anew(True),
        )
    if before.optimizer.ema_decay is None and after.optimizer.ema_decay is not None:
        yield ConfigError(
            f"optimizer.ema_decay={after.optimizer.ema_decay}: the checkpoint has no average of its weights",
            hint=anew(True),
        )
    old_batch, new_batch = before.train.global_batch_size, after.train.global_batch_size
    if old_batch != new_batch and not after.fork.restarts_data:
        yield ConfigError(
            f"train.global_batch_size={new_batch}: the checkpoint has the positions of {old_batch} sequences in the "
            "corpus",
            hint="add --restart-data to read the corpus from its beginning",
        )


def _data(config: Config) -> dict[str, Any]:
    values = flatten(
        dataclasses.replace(config, data=dataclasses.replace(config.data, path=None, sources=[], weights={}))
    )
    keys = {key: value for key, value in values.items() if key.startswith("data.") and key not in _FREE_DATA}
    inputs = [(source.path, source.text_column) for source in config.data.inputs]
    # Weights are relative, so those of a single source don't matter.
    total = sum(config.data.source_weights)
    weights = [weight / total for weight in config.data.source_weights]
    return {**keys, "inputs": inputs, "weights": weights, "seed": config.seed}
