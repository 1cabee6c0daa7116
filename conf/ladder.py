"""A ladder's rungs by its rule: smaller models of the target's shape, with tokens, learning rate and batch.

A ladder is a sweep whose arms are listed instead of multiplied out. The target is the configuration that is typed; each
rung is an arm with the keys in which it differs from the target, and the target is the last arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf import folders
from conf.compose import compose
from conf.schema import Config, LadderConfig, ModelConfig, SweepConfig
from conf.sizes import flops_per_token, multiplied_parameters
from conf.space import Axis, Space, expand, parse_override, settings_of
from hlatctl.run.errors import ConfigError

#: Least rungs: as many as the law of compute has constants.
LEAST_RUNGS = 3
#: Least optimizer steps of a rung: below, the loss is that of a warm-up.
_LEAST_STEPS = 50
#: The feed-forward layer's width is a multiple of this.
_MULTIPLE = 8
#: Powers of the parameters for learning rate and batch (OLMo's ladder, arXiv 2412.04403).
_OLMO = (-1 / 3, 2 / 3)
#: Settings of a sweep that have no meaning for rungs, whose sizes differ.
_OF_SWEEPS = ("sampler", "trials", "direction", "pruner", "startup_trials")
#: Keys that the rule sets.
_BY_RULE = ("model.", "train.tokens", "train.global_batch_size", "optimizer.lr")


def parse(arguments: Sequence[str], folder: Path) -> Space:
    """Parse the arguments of a ladder, and return its rungs and its target as the arms of a sweep.

    Args:
        arguments: ``ladder=NAME`` stands for those in ``conf/ladder/NAME.yaml``; the last argument of a key counts.
        folder: base of relative paths.

    Raises:
        ConfigError: bad grammar, an unknown key, a size that the heads don't divide, too few rungs, or a rung that is
            not smaller than the target.
    """
    parsed: dict[str, Any] = {}
    for text in expand(arguments, folders.LADDER):
        override = parse_override(text)
        parsed.pop(override.key_or_group, None)
        parsed[override.key_or_group] = override
    ladder, settings = settings_of(LadderConfig, parsed, "ladder."), settings_of(SweepConfig, parsed, "sweep.")
    others = [one for key, one in parsed.items() if not key.startswith(("ladder.", "sweep."))]
    for one in others:
        if one.is_sweep_override():
            raise ConfigError(
                f"{one.input_line}: has several values, and all rungs of a ladder share it",
                hint="write one value; `hlatctl sweep` compares several, and ladder.sizes lists the rungs' sizes",
            )
    _check_settings(settings)
    overrides = [str(one.input_line) for one in others]
    target = compose(overrides, folder)
    points = [*_rungs(ladder, target, overrides, folder), {}]
    keys = list(dict.fromkeys(key for point in points for key in point))
    points[-1] = {key: _text(_value_of(target, key)) for key in keys}
    points = [{key: point.get(key, points[-1][key]) for key in keys} for point in points]
    keys = [key for key in keys if len({point[key] for point in points}) > 1]
    points = [{key: point[key] for key in keys} for point in points]
    axes = [Axis(key=key, values=list(dict.fromkeys(point[key] for point in points))) for key in keys]
    dirs = [str(path) for path in folders.checked_folders()]
    return Space(
        overrides=overrides,
        axes=axes,
        settings=settings,
        folder=str(folder),
        config_dirs=dirs,
        points=points,
        ladder=ladder,
    )


def _check_settings(settings: SweepConfig) -> None:
    defaults = SweepConfig()
    for name in _OF_SWEEPS:
        if (value := getattr(settings, name)) != getattr(defaults, name):
            raise ConfigError(
                f"sweep.{name}={value}: rungs differ in size, so a ladder runs all of them and compares none",
                hint=f"remove sweep.{name}; sweep.stop_diverged ends a rung that diverges",
            )


def _rungs(ladder: LadderConfig, target: Config, overrides: list[str], folder: Path) -> list[dict[str, str]]:
    """Return the values of every rung, by compute."""
    _check_target(target)
    _check_sizes(ladder, target)
    for key in ladder.set:
        if key.startswith(_BY_RULE):
            raise ConfigError(f"ladder.set: {key} follows from the ladder's rule", hint=f"remove {key} from ladder.set")
    shared = {key: _text(value) for key, value in ladder.set.items()}
    for key in shared:
        _value_of(target, key)
    length = target.train.seq_len
    base = compose([*overrides, *(f"{key}={value}" for key, value in shared.items())], folder) if shared else target
    most, whole = multiplied_parameters(target.model), flops_per_token(target.model, length) * target.total_tokens
    limit = ladder.max_compute_fraction
    found: list[tuple[int, dict[str, str]]] = []
    for index, size in enumerate(ladder.sizes):
        model = _model(ladder, size, target.model)
        parameters = multiplied_parameters(model)
        if parameters >= most:
            raise ConfigError(
                f"ladder.sizes={ladder.sizes}: the rung of size {size} has {parameters:,} parameters, which must be "
                f"fewer than the target's {most:,}",
                hint=f"sizes below {_size(ladder, target.model)}, or a larger target",
            )
        ratios = ladder.tokens_per_parameter or [target.total_tokens / most]
        for tokens in ladder.tokens or [max(1, round(ratio * parameters)) for ratio in ratios]:
            work = flops_per_token(model, length) * tokens
            if limit is not None and work > limit * whole:
                continue
            values = {
                **shared,
                **_shape(model, target.model),
                **_training(ladder, index, parameters, tokens, base, target),
            }
            _check_rung(size, tokens, int(values["train.global_batch_size"]) * length, target)
            found.append((work, values))
    found.sort(key=lambda one: one[0])
    if len(found) < LEAST_RUNGS:
        raise ConfigError(
            f"ladder.max_compute_fraction={limit}: leaves {len(found)} rungs, and a law with {LEAST_RUNGS} constants "
            f"needs at least {LEAST_RUNGS}",
            hint="raise it, or list smaller ladder.sizes or ladder.tokens",
        )
    if found[-1][0] >= whole:
        raise ConfigError(
            f"train.tokens={target.train.tokens}: the target must have more compute than every rung, whose largest has "
            f"{found[-1][0] / whole:.3g} times the target's",
            hint="more train.tokens, smaller ladder.sizes, or ladder.max_compute_fraction=0.03",
        )
    return [values for _, values in found]


def _check_target(target: Config) -> None:
    model, train = target.model, target.train
    refused = {
        f"model.module={model.module}": model.module is not None,
        f"model.num_experts={model.num_experts}": model.num_experts > 0,
        f"model.kv_lora_rank={model.kv_lora_rank}": model.kv_lora_rank is not None,
        "train.stages": bool(train.stages),
        f"train.max_steps={train.max_steps}": train.max_steps is not None,
        f"train.init_from={train.init_from}": train.init_from is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{name}: a ladder can't scale it down; its rungs are dense models of one stage, and their tokens set "
                "their length",
                hint=f"remove {name.partition('=')[0]} from the target",
            )


def _check_sizes(ladder: LadderConfig, target: Config) -> None:
    sizes, ratios = ladder.sizes, ladder.tokens_per_parameter
    if ratios and ladder.tokens:
        raise ConfigError(
            f"ladder.tokens={ladder.tokens} and ladder.tokens_per_parameter={ratios}: both set the rungs' tokens",
            hint="remove one of them",
        )
    by_powers = not ladder.lr and ladder.lr_by_parameters is None
    if target.model.mup_base_width is not None and ladder.by != "width" and by_powers:
        raise ConfigError(
            f"ladder.by={ladder.by} and model.mup_base_width={target.model.mup_base_width}: muP keeps the best "
            "learning rate at every width, but not at every depth",
            hint="ladder.by=width; or set ladder.lr_by_parameters, or ladder.lr for each size",
        )
    rungs = len(sizes) * max(1, len(ratios or ladder.tokens))
    listed: tuple[tuple[str, list[Any]], ...] = (
        ("sizes", sizes),
        ("tokens_per_parameter", ratios),
        ("tokens", ladder.tokens),
    )
    for name, values in listed:
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"ladder.{name}={values}: lists {twice} twice")
    if rungs < LEAST_RUNGS:
        raise ConfigError(
            f"ladder.sizes={sizes}: {rungs} rungs, and a law with {LEAST_RUNGS} constants needs at least {LEAST_RUNGS}",
            hint="list five sizes, such as ladder.sizes=[4,6,8,10,12]",
        )
    for name, table in (("lr", ladder.lr), ("batch", ladder.batch)):
        if table and len(table) != len(sizes):
            raise ConfigError(
                f"ladder.{name}={table}: {len(table)} values for {len(sizes)} sizes",
                hint=f"one value for each of ladder.sizes={sizes}, or none for the rule",
            )


def _check_rung(size: int, tokens: int, step_tokens: int, target: Config) -> None:
    steps = -(-tokens // step_tokens)
    if steps < _LEAST_STEPS:
        raise ConfigError(
            f"ladder.sizes: the rung of size {size} has {tokens:,} tokens, {steps} steps of {step_tokens:,}; it needs "
            f"at least {_LEAST_STEPS}",
            hint="larger sizes, more ladder.tokens_per_parameter, or a smaller batch (ladder.batch, train.seq_len)",
        )


def _size(ladder: LadderConfig, model: ModelConfig) -> int:
    return model.hidden_size if ladder.by == "width" else model.num_layers


def _model(ladder: LadderConfig, size: int, target: ModelConfig) -> ModelConfig:
    """Return the model of a size."""
    if ladder.by == "depth":
        return dataclasses.replace(target, num_layers=size)
    head, sharing = target.head_width, target.num_heads // target.num_kv_heads
    unit = sharing * head * target.hidden_size // target.query_width  # width of a group of heads that share keys
    in_proportion = max(1, round(size * target.hidden_size / target.num_layers / unit)) * unit
    width = in_proportion if ladder.by == "shape" else size
    if width % unit or not width:
        below, above = max(unit, width // unit * unit), (width // unit + 1) * unit
        group = f"{sharing} heads that share keys and values" if sharing > 1 else "a head"
        raise ConfigError(
            f"ladder.sizes: {size} is not a multiple of {unit}, the width of {group}",
            hint=f"use {below} or {above}; model.head_dim and the target's heads set the width",
        )
    groups = width // unit
    feed_forward = max(1, round(width * target.intermediate_size / target.hidden_size / _MULTIPLE)) * _MULTIPLE
    return dataclasses.replace(
        target,
        num_layers=size if ladder.by == "shape" else target.num_layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_heads=groups * sharing,
        num_kv_heads=groups,
    )


def _shape(model: ModelConfig, target: ModelConfig) -> dict[str, str]:
    return {
        f"model.{field.name}": _text(value)
        for field in dataclasses.fields(model)
        if (value := getattr(model, field.name)) != getattr(target, field.name)
    }


def _training(
    ladder: LadderConfig, index: int, parameters: int, tokens: int, base: Config, target: Config
) -> dict[str, str]:
    """Return the values of a rung's training.

    Args:
        base: the target's configuration with the values of all rungs.
    """
    size = parameters / multiplied_parameters(target.model)
    length = tokens / target.total_tokens
    has_one_rate = target.model.mup_base_width is not None and ladder.by == "width"
    lr_power, batch_power = (0.0, 0.0) if has_one_rate else _OLMO
    lr_power = lr_power if ladder.lr_by_parameters is None else ladder.lr_by_parameters
    batch_power = batch_power if ladder.batch_by_parameters is None else ladder.batch_by_parameters
    lr = target.optimizer.lr * size**lr_power * length**ladder.lr_by_tokens
    batch = target.train.global_batch_size * size**batch_power * length**ladder.batch_by_tokens
    replicas, micro = base.data_parallel_size, base.train.micro_batch_size
    least = replicas * (micro or 1)
    sequences = ladder.batch[index] if ladder.batch else max(replicas, round(batch / replicas) * replicas)
    if not ladder.batch and sequences > least:
        sequences = round(sequences / least) * least
    values: dict[str, Any] = {
        "train.tokens": tokens,
        "train.global_batch_size": sequences,
        "optimizer.lr": float(f"{ladder.lr[index] if ladder.lr else lr:.3g}"),
    }
    if micro is not None and sequences < least:
        values["train.micro_batch_size"] = max(1, sequences // replicas)
    if base.optimizer.warmup_tokens is not None:
        values["optimizer.warmup_tokens"] = round(base.optimizer.warmup_tokens * length)
    else:
        steps = -(-tokens // (sequences * base.train.seq_len))
        values["optimizer.warmup_steps"] = round(base.optimizer.warmup_steps * steps / target.total_steps)
    if base.eval.enabled and base.eval.every_tokens < target.total_tokens:
        values["eval.every_tokens"] = max(1, round(base.eval.every_tokens * length))
    return {key: _text(value) for key, value in values.items()}


def _value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        if not dataclasses.is_dataclass(value) or not hasattr(value, name):
            raise ConfigError(
                f"ladder.set: {key} is not a key",
                hint="written as {SECTION.KEY:VALUE}; `hlatctl config keys` lists them",
            )
        value = getattr(value, name)
    if not isinstance(value, str | int | float | None):
        raise ConfigError(f"ladder.set: {key} is not a single value", hint="set it in the target for all rungs")
    return value


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
