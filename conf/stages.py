"""The stages of a run, such as pre-training, mid-training and long context (``train.stages``); pure.

A stage is a planned amendment: the attempt that trains a stage ends with its last step and a checkpoint, and the next
attempt continues from there with the values that the next stage sets. So recovery, resuming and looking up batches need
no rules of their own. Steps and tokens are counted over all stages.

``Config.during(step)`` has the values in force for a step. What is counted over the whole run, such as milestones, is
the same for the run's configuration and for that of each of its stages, because :func:`layout` writes the values of all
stages into each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from conf.amendments import fields_of, with_changes
from conf.constraints import violations
from conf.fork import ROTARY
from conf.schema import Config, ForkConfig, StageConfig
from hlatctl.run.errors import ConfigError, suggest

#: Keys of the learning rate. A stage that sets one begins a schedule of its own; others continue the previous one.
_OF_SCHEDULE = (
    "optimizer.lr",
    "optimizer.min_lr_fraction",
    "optimizer.warmup_steps",
    "optimizer.warmup_tokens",
    "optimizer.schedule",
    "optimizer.wsd_decay_fraction",
)
#: A later schedule has no warm-up, unless its stage sets one: the weights are trained.
_NO_WARMUP: dict[str, Any] = {"optimizer.warmup_steps": 0, "optimizer.warmup_tokens": None}
#: Keys that change the graphs, which torch-xla compiles before the run.
_OF_GRAPHS = (
    "data.mask_across_documents",
    *ROTARY,
    "parallel.activation_checkpointing",
    "parallel.activation_memory_budget",
    "parallel.reshard_after_forward",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.seq_len",
)
#: What a stage may set.
KEYS = (
    *_OF_SCHEDULE,
    *_OF_GRAPHS,
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "data.weights",
    "train.z_loss",
    "train.on_nonfinite",
    "train.on_spike",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_MOST = 100


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a run.

    Args:
        number: its place in ``train.stages``, from 1.
        config: the run's configuration with the stage's values.
        after_step: the step that it begins after.
        last_step: its last step; the end of ``train.max_steps`` may come before.
        after_tokens: tokens that the optimizer has consumed when it begins.
        schedule: a run of the steps that share the stage's schedule, and nothing else.
        schedule_after_step: the step that this schedule begins after.
    """

    number: int
    name: str
    config: Config
    after_step: int
    last_step: int
    after_tokens: int
    schedule: Config
    schedule_after_step: int

    @property
    def steps(self) -> int:
        """Number of its optimizer steps."""
        return self.last_step - self.after_step

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return self.steps * self.config.tokens_per_step

    @property
    def last_tokens(self) -> int:
        """Tokens that the optimizer has consumed at its end."""
        return self.after_tokens + self.tokens


def layout(config: Config) -> tuple[Stage, ...]:
    """Return the stages that a run reaches, in order; see ``Config.stages``.

    Raises:
        ConfigError: there are too many, or a stage sets an unknown key, one that it may not set, or an invalid value.
    """
    if not config.train.stages:
        return ()
    if len(config.train.stages) > _MOST:
        raise ConfigError(
            f"train.stages: has {len(config.train.stages)} stages, must have at most {_MOST}", hint="use fewer"
        )
    whole = _resolved(config)
    plain = [dataclasses.asdict(stage) for stage in whole]
    configs = [_with(config, index, {**stage.set, "train.stages": plain}) for index, stage in enumerate(whole)]
    limit, bounds, step, tokens = config.train.max_steps, [], 0, 0
    for stage, own in zip(whole, configs, strict=True):
        last = step - -stage.tokens // own.tokens_per_step
        last = last if limit is None else min(last, limit)
        bounds.append((step, last, tokens))
        step, tokens = last, tokens + (last - step) * own.tokens_per_step
    stages = []
    for index, (own, (after, last, begun)) in enumerate(zip(configs, bounds, strict=True)):
        if last == after:  # beyond train.max_steps
            break
        first = max(n for n in range(index + 1) if not whole[n].continues_schedule)
        end = next((n for n in range(index + 1, len(whole)) if not whole[n].continues_schedule), len(whole)) - 1
        stages.append(
            Stage(
                number=index + 1,
                name=whole[index].name,
                config=own,
                after_step=after,
                last_step=last,
                after_tokens=begun,
                schedule=_alone(configs[first], bounds[end][1] - bounds[first][0]),
                schedule_after_step=bounds[first][0],
            )
        )
    return tuple(stages)


def _resolved(config: Config) -> list[StageConfig]:
    """Return the stages with each value that any of them sets; so the values of one don't depend on the others'."""
    values, resolved = {}, []
    own_values = [_own(stage, index) for index, stage in enumerate(config.train.stages)]
    base = fields_of(config)
    for key in dict.fromkeys(key for own in own_values for key in (*own, *_NO_WARMUP)):
        values[key] = base[key]
    for index, (stage, own) in enumerate(zip(config.train.stages, own_values, strict=True)):
        continues = stage.continues_schedule
        if continues is None:
            continues = not any(key in own for key in _OF_SCHEDULE)
        continues = continues and index > 0
        if index and not continues and not any(key in own for key in _NO_WARMUP):
            values |= _NO_WARMUP
        values |= own
        resolved.append(dataclasses.replace(stage, set=dict(values), continues_schedule=continues))
    return resolved


def _own(stage: StageConfig, index: int) -> dict[str, Any]:
    """Return what a stage sets, by dotted key."""
    return dict(_flat(stage.set, "", f"train.stages[{index}].set"))


def _flat(values: dict[str, Any], prefix: str, here: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in _known():
            if key not in KEYS:
                hint = f"a stage may set {', '.join(KEYS)}"
                if key.startswith(("parallel.", "cluster.", "precision.")):
                    hint = (
                        f"all stages have the same nodes, layout and precision; `hlatctl amend RUN {key}={value} "
                        "--at STEP` changes them with a stage, where STEP is the last one of the stage before"
                    )
                raise ConfigError(f"{here}.{key}={value}: a stage can't change it", hint=hint)
            yield key, value
        elif isinstance(value, dict) and any(known.startswith(f"{key}.") for known in _known()):
            yield from _flat(value, f"{key}.", here)
        else:
            raise ConfigError(f"{here}.{key}: unknown key", hint=suggest(key, KEYS))


@cache
def _known() -> frozenset[str]:
    return frozenset(fields_of(Config()))


def _with(config: Config, index: int, values: dict[str, Any]) -> Config:
    try:
        changed = with_changes(config, values)
        of_run = {error.message for error in violations(config)}  # they are no stage's
        for error in violations(changed):
            if error.message not in of_run:
                raise error
        return changed
    except ConfigError as error:
        hint = error.hint or "`hlatctl config keys` says what each key accepts"
        raise ConfigError(f"train.stages[{index}].set.{error.message}", hint=hint) from None


def _alone(config: Config, steps: int) -> Config:
    tokens = max(1, steps) * config.tokens_per_step
    train = dataclasses.replace(config.train, stages=[], max_steps=None, tokens=tokens)
    return dataclasses.replace(config, train=train, fork=ForkConfig())


def source_tokens(config: Config, tokens: int) -> list[float]:
    """Return the tokens of each source that a run has trained on after ``tokens`` tokens in all."""
    weights = config.data.source_weights
    parts = [
        (stage.config.data.source_weights, min(max(0, tokens - stage.after_tokens), stage.tokens))
        for stage in config.stages
    ] or [(weights, tokens)]
    return [math.fsum(own[at] / sum(own) * part for own, part in parts) for at in range(len(weights))]


def stage_errors(config: Config, rules: Sequence[Callable[[Config], Iterable[ConfigError]]]) -> Iterator[ConfigError]:
    """Yield an error for each broken rule of ``train.stages``.

    Args:
        rules: of a whole configuration, which each stage's has to obey too.
    """
    names = [stage.name for stage in config.train.stages]
    if not names:
        return
    if config.fork.run is not None:
        yield ConfigError(
            f"train.stages: a fork has no stages, and it begins at step {config.fork.step} of {config.fork.run}",
            hint="train.stages=[], and give the fork the values that it shall train with",
        )
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            yield ConfigError(
                f"train.stages[{index}].name={name!r}: must be 1 to 40 letters, digits, `_`, `.` or `-`",
                hint="such as midtraining",
            )
        if name in names[:index]:
            yield ConfigError(f"train.stages[{index}].name={name}: another stage has this name", hint="use another")
    for before, after in itertools.pairwise(config.stages):
        old, new = fields_of(before.config), fields_of(after.config)
        for key in (key for key in _OF_SCHEDULE if old[key] != new[key]):
            if after.schedule_after_step < after.after_step:
                yield ConfigError(
                    f"train.stages[{after.number - 1}].set.{key}={new[key]}: the stage continues the schedule of the "
                    f"stage before it, where it is {old[key]}",
                    hint="leave out continues_schedule to begin a schedule",
                )
    rows, outside = config.data_rows, fields_of(config)
    for stage in config.stages:
        own = fields_of(stage.config)
        for key in (key for key in _OF_GRAPHS if own[key] != outside[key] and config.backend.kind.torch_xla):
            yield ConfigError(
                f"train.stages[{stage.number - 1}].set.{key}={own[key]}: with backend.name={config.backend.name} all "
                f"stages have the same graphs, and outside of them it is {outside[key]}",
                hint=f"set {key} for the whole run, or backend=torchtitan_neuron",
            )
        batch = stage.config.train.global_batch_size
        if rows % batch and batch % rows:
            yield ConfigError(
                f"train.stages[{stage.number - 1}].set.train.global_batch_size={batch}: must divide that of the first "
                f"stage, {rows}, or be a multiple of it: so every document goes on where it was",
                hint=f"use {rows * max(1, round(batch / rows))}",
            )
        here = f"train.stages[{stage.number - 1}] ({stage.name})"
        for error in itertools.chain.from_iterable(rule(stage.config) for rule in rules):
            yield ConfigError(f"{here}: {error.message}", hint=error.hint)
