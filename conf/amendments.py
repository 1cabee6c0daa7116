"""Amendments of a run's configuration: which keys may change, when a change begins, and what it redoes. Pure.

``RULES`` has a row for every key; a row for a whole group ends with a dot, and the longest matching name counts. An
amendment is a ``config_amended`` event. Its keys are the fields of the schema, so a mapping such as ``backend.env``
changes as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from conf.constraints import field_types
from conf.load import decode_dataclass
from conf.schema import Config
from hlatctl.run.state import AmendmentState

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
When = Literal["at_once", "next_attempt", "next_driver", "never"]

#: When a change begins, in words.
IN_WORDS: dict[When, str] = {
    "at_once": "immediately, without a restart",
    "next_attempt": "with the next attempt",
    "next_driver": "with the next `hlatctl resume`",
    "never": "never",
}


@dataclass(frozen=True)
class AmendmentRule:
    """One row of the table.

    Args:
        keys: a key, or a group's name and a dot.
        when: when a change begins.
        redoes: the work that a change causes; for a key that never changes, the reason.
    """

    keys: str
    when: When
    redoes: str


_NOTHING = "nothing"
_GRAPHS = "compilation, copy of the cache, coverage"
_NODES = f"preflight, {_GRAPHS}"
_MODEL = "the checkpoints have weights of this shape"
_CORPUS = "the position in the corpus would mean other documents"

RULES: tuple[AmendmentRule, ...] = (
    AmendmentRule("experiment_name", "never", "the run's folder has the name"),
    AmendmentRule("runs_dir", "never", "the run is in this folder"),
    AmendmentRule("runs_mode", "never", "the run's folders exist; `chmod -R` changes them"),
    AmendmentRule("seed", "never", "it gave the initial weights and the order of documents"),
    AmendmentRule("model.", "never", _MODEL),
    AmendmentRule("tokenizer.", "never", "the weights belong to these tokens"),
    AmendmentRule("tokenizer.path", "next_attempt", "preparation of the corpus; `hlatctl data accept` if it differs"),
    AmendmentRule("data.", "never", _CORPUS),
    AmendmentRule("data.path", "next_attempt", "preparation of the corpus; `hlatctl data accept` if it differs"),
    AmendmentRule("data.mask_across_documents", "never", "the model has learned with this attention"),
    AmendmentRule(
        "data.skip_steps", "never", "`hlatctl data skip RUN --steps N` skips batches of a run that has begun"
    ),
    AmendmentRule("data.prefetch_batches", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.", "next_attempt", "compilation with backend.name=nxd"),
    AmendmentRule("optimizer.name", "never", "the checkpoints have the moments of this optimizer"),
    AmendmentRule("optimizer.ema_decay", "never", "the checkpoints have the average of this decay, or none"),
    AmendmentRule("optimizer.lr", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.min_lr_fraction", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.warmup_steps", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.warmup_tokens", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.schedule", "next_attempt", _NOTHING),
    AmendmentRule("optimizer.wsd_decay_fraction", "next_attempt", _NOTHING),
    AmendmentRule("precision.name", "next_attempt", _GRAPHS),
    AmendmentRule("precision.fp8_scaling", "next_attempt", _GRAPHS),
    AmendmentRule("parallel.", "next_attempt", _GRAPHS),
    AmendmentRule("train.init_from", "never", "the run has begun with these weights"),
    AmendmentRule("train.tokens", "next_attempt", "the schedule's remaining part"),
    AmendmentRule("train.stages", "never", "its stages are the run's plan, and those that were trained can't change"),
    AmendmentRule("train.max_steps", "next_attempt", "the schedule's remaining part"),
    AmendmentRule("train.global_batch_size", "never", "tokens and schedule are counted in steps of this size"),
    AmendmentRule("train.seq_len", "never", "tokens and packing are counted in sequences of this length"),
    AmendmentRule("train.micro_batch_size", "next_attempt", _GRAPHS),
    AmendmentRule("train.z_loss", "next_attempt", _NOTHING),
    AmendmentRule("train.on_nonfinite", "next_attempt", _NOTHING),
    AmendmentRule("train.on_spike", "next_attempt", _NOTHING),
    AmendmentRule("train.max_nonfinite_steps", "next_attempt", _NOTHING),
    AmendmentRule("fork.", "never", "the run has begun from this checkpoint"),
    AmendmentRule("checkpoint.mode", "next_attempt", _NOTHING),
    AmendmentRule("checkpoint.every_steps", "at_once", _NOTHING),
    AmendmentRule("checkpoint.keep", "at_once", _NOTHING),
    AmendmentRule("checkpoint.keep_every_tokens", "at_once", _NOTHING),
    AmendmentRule("checkpoint.when_busy", "at_once", _NOTHING),
    AmendmentRule("checkpoint.survived_after_steps", "at_once", _NOTHING),
    AmendmentRule("checkpoint.memory_every_steps", "next_attempt", _NOTHING),
    AmendmentRule("checkpoint.fast_dir", "next_attempt", _NOTHING),
    AmendmentRule("checkpoint.remote_url", "next_attempt", "copies of later checkpoints"),
    AmendmentRule("checkpoint.remote_keep", "at_once", _NOTHING),
    AmendmentRule("eval.", "at_once", "evaluations that begin later"),
    AmendmentRule("recovery.", "at_once", _NOTHING),
    AmendmentRule("recovery.straggler_factor", "next_attempt", _NOTHING),
    AmendmentRule("recovery.straggler_steps", "next_attempt", _NOTHING),
    AmendmentRule("recovery.corruption_check_steps", "next_attempt", _NOTHING),
    AmendmentRule("tracking.", "next_driver", _NOTHING),
    AmendmentRule("notify.", "next_driver", _NOTHING),
    AmendmentRule("notify.on", "at_once", _NOTHING),
    AmendmentRule("notify.digest_hour", "at_once", _NOTHING),
    AmendmentRule("backend.", "next_attempt", _NODES),
    AmendmentRule("cluster.", "next_attempt", _NODES),
    AmendmentRule("cluster.price_usd_per_node_hour", "at_once", _NOTHING),
    AmendmentRule("cluster.confirm_above_usd", "at_once", _NOTHING),
    AmendmentRule("cluster.confirm_above_node_hours", "at_once", _NOTHING),
    AmendmentRule("cluster.capacity_ends", "next_attempt", _NOTHING),
    AmendmentRule("budget.", "at_once", _NOTHING),
    AmendmentRule("cluster.hardware.", "at_once", _NOTHING),
    AmendmentRule("cluster.baseline.", "at_once", _NOTHING),
    AmendmentRule("preflight.", "at_once", "the next preflight"),
)

#: Keys that the trainer reads again while it trains. They change without a restart.
LIVE = (
    "checkpoint.every_steps",
    "checkpoint.keep",
    "checkpoint.keep_every_tokens",
    "checkpoint.when_busy",
    "checkpoint.survived_after_steps",
    "checkpoint.remote_keep",
    "eval.enabled",
    "eval.every_tokens",
)

_BY_KEYS = {row.keys: row for row in RULES}


def rule_of(key: str) -> AmendmentRule:
    """Return the row of a key.

    Raises:
        KeyError: it has none.
    """
    parts = key.split(".")
    groups = (".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1))
    row = next((_BY_KEYS[keys] for keys in (key, *groups) if keys in _BY_KEYS), None)
    if row is None:
        raise KeyError(key)
    return row


_PROTECTIONS = ("eval.code.allow_unsandboxed", "cluster.slurm.exclusive")


def is_harmless(key: str) -> bool:
    """Return whether a key's values are numbers, switches or fixed choices, or lists of them.

    No value of such a key names a file, an address, a command or code, and none gives a protection up.
    """
    *groups, name = key.split(".")
    kind: Any = Config
    for group in groups:
        kind = field_types(kind).get(group) if dataclasses.is_dataclass(kind) else None
    expected = field_types(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return expected is not None and key not in _PROTECTIONS and _is_harmless(expected)


def _is_harmless(expected: Any) -> bool:
    origin = get_origin(expected)
    if origin is Literal:
        return True
    if origin is None:
        return expected in (bool, int, float, NoneType)
    parts = get_args(expected)[:1] if hasattr(expected, "__metadata__") else get_args(expected)
    return origin is not dict and all(map(_is_harmless, parts))


def begins(keys: Iterable[str]) -> When:
    """Return when an amendment of these keys begins; its latest key decides."""
    order: tuple[When, ...] = ("at_once", "next_driver", "next_attempt", "never")
    return max((rule_of(key).when for key in keys), key=order.index, default="at_once")


def with_resume(hint: str, run_id: str) -> str:
    """Return the hint of a run's error with the command that continues the run with another value of a key it names.

    A hint without such a key stays as it is; an empty one becomes the command that continues the run.
    """
    if "hlatctl resume " in hint:
        return hint
    for name in re.findall(r"\b[a-z_]+(?:\.[a-z0-9_]+)+\b", hint):
        if name in _changeable():
            return f"{hint}: `hlatctl resume {run_id} {name}=VALUE`"
    return hint or f"`hlatctl resume {run_id}` continues the run"


@cache
def _changeable() -> frozenset[str]:
    return frozenset(key for key in fields_of(Config()) if rule_of(key).when != "never")


Changes = dict[str, list[Any]]


def fields_of(config: Config) -> dict[str, Any]:
    """Return the plain value of every field by dotted key."""
    return dict(_fields(config, dataclasses.asdict(config), ""))


def _fields(value: Any, plain: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(item):
            yield from _fields(item, plain[field.name], f"{key}.")
        else:
            yield key, plain[field.name]


def changes_between(before: Config, after: Config) -> Changes:
    """Return the old and new value of each field that differs."""
    old, new = fields_of(before), fields_of(after)
    return {key: [old[key], new[key]] for key in old if old[key] != new[key]}


def with_changes(config: _T, values: Mapping[str, Any], prefix: str = "") -> _T:
    """Return a configuration, or another dataclass of the schema, with other values of some fields.

    Args:
        prefix: beginning of all keys, such as ``"simulation."``.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    plain = dataclasses.asdict(config)
    for key, value in values.items():
        *groups, name = key.removeprefix(prefix).split(".")
        functools.reduce(dict.__getitem__, groups, plain)[name] = value
    return decode_dataclass(type(config), plain, prefix)


def new_values(amendments: Sequence[AmendmentState]) -> dict[str, Any]:
    """Return the values that amendments set, by key."""
    return {key: new for amendment in amendments for key, (_, new) in amendment.changes.items()}


def is_at_once(amendment: AmendmentState) -> bool:
    """Return whether every key of an amendment changes without a restart. One without keys only sets a time."""
    return bool(amendment.changes) and begins(amendment.changes) == "at_once"


def beginning_at(amendments: Sequence[AmendmentState], step: int) -> int:
    """Return the number of the newest amendment that applies to an attempt continuing after a step; 0: none.

    Amendments begin in order. One that begins at a later step delays later amendments, except those that change
    without a restart; one whose step has come also applies earlier ones.
    """
    ordered = [amendment for amendment in amendments if not is_at_once(amendment)]
    due = [a.number for a in ordered if a.applied_step is not None or (a.at_step is not None and a.at_step <= step)]
    number = max(due, default=0)
    for amendment in amendments:
        if amendment.number <= number:
            continue
        if amendment.at_step is not None:
            break
        number = amendment.number
    return number


def waiting(amendments: Sequence[AmendmentState], step: int) -> list[AmendmentState]:
    """Return the amendments that an attempt continuing after a step does not begin with."""
    number = beginning_at(amendments, step)
    return [a for a in amendments if a.number > number and not is_at_once(a)]


def ends_after(amendments: Sequence[AmendmentState], number: int) -> int | None:
    """Return the step after which an attempt ends for an amendment; None if it doesn't.

    Args:
        number: the newest amendment that the attempt began with.
    """
    later = (a for a in amendments if a.number > number and not is_at_once(a))
    return min((a.at_step for a in later if a.at_step is not None), default=None)


def live(amendments: Sequence[AmendmentState], number: int) -> list[AmendmentState]:
    """Return the amendments after a number that change without a restart."""
    return [a for a in amendments if a.number > number and is_at_once(a)]


def live_values(amendments: Sequence[AmendmentState]) -> dict[str, Any]:
    """Return the values of amendments that the trainer reads while it trains, by key."""
    return {key: value for key, value in new_values(amendments).items() if key in LIVE}
