"""Scores and items of evaluations: scores that fit in one line, columns of the items' files, and milestones by tokens.

``eval.scores`` computes the scores. The columns of ``items-<task>.parquet`` are for evaluations, imports and readers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hlatctl.run.errors import ConfigError
from hlatctl.units import count, number

#: Prefix of the scores on a run's held-out text: one loss in several units.
HELD_OUT = "validation_"
_LOSS = "validation_loss"
#: Accuracies of ranked choices: of the likeliest, and of the likeliest per character, per byte and per token.
ACCURACIES = ("acc", "acc_norm", "acc_bytes", "acc_per_token")
#: Metric of right answers and of held-out text.
BITS_PER_BYTE = "bits_per_byte"
#: Metrics for which less is better.
LOWER_IS_BETTER = frozenset({BITS_PER_BYTE, "loss_nats_per_token", "perplexity", "word_perplexity", "byte_perplexity"})
#: Ends the name of the bits per byte of right answers.
_BITS = "_bpb"


def bits_of(name: str) -> str:
    """Return the name of the bits per byte of a task's or group's right answers."""
    return f"{name}{_BITS}"


def is_better_low(name: str) -> bool:
    """Return whether less is better for a score of this name: held-out text, and bits per byte."""
    return name.startswith(HELD_OUT) or name.endswith(_BITS)


def headlines(names: Collection[str]) -> list[str]:
    """Return the names that no other name summarizes.

    A name summarizes those that it begins: ``mmlu`` is a group with ``mmlu_anatomy``, and ``gsm8k`` the first metric
    before ``gsm8k_flexible_extract``.
    """
    known = frozenset(names)

    def is_summarized(name: str) -> bool:
        if name.startswith(HELD_OUT):
            return name != _LOSS and _LOSS in known
        return any(name[:end] in known for end, letter in enumerate(name) if letter == "_")

    return [name for name in names if not is_summarized(name)]


def in_words(scores: dict[str, dict[str, Any]], *, with_noise: bool = False) -> str:
    """Return the headlines in one line, and the number of other scores.

    Args:
        with_noise: add standard errors and the scores of guessing, where they are known.
    """
    shown = headlines(scores)
    left_out = f" (and {len(scores) - len(shown)} more)" if len(shown) < len(scores) else ""
    noise = {name: _noise(scores[name]) if with_noise else "" for name in shown}
    return ", ".join(f"{name} {number(scores[name], 'value'):.3f}{noise[name]}" for name in shown) + left_out


def skipped_in_words(skipped: Mapping[str, str]) -> list[str]:
    """Return a line for each reason why tasks of an evaluation could not run."""
    by_reason: dict[str, list[str]] = {}
    for task, why in skipped.items():
        by_reason.setdefault(why, []).append(task)
    return [f"{', '.join(tasks)}: skipped, {why}" for why, tasks in by_reason.items()]


def _noise(score: dict[str, Any]) -> str:
    error, chance = number(score, "stderr"), number(score, "chance")
    known = f" ± {error:.3f}" if math.isfinite(error) else ""
    return known + (f" (guessing {chance:.3f})" if math.isfinite(chance) else "")


#: Column, its type in Arrow, and its meaning.
COLUMNS = {
    "task": ("string", "name of the task"),
    "item": ("string", "number in the dataset, or the problem's id"),
    "filter": ("string", "the harness's filter of the answer; `none` without one"),
    "document": ("string", "the dataset's record as JSON; empty for a program"),
    "prompt": ("string", "text before the answer, with solved examples"),
    "target": ("string", "the right answer, as the task defines it"),
    "choices": ("list<string>", "the ranked continuations; empty if the model wrote its answer"),
    "loglikelihoods": ("list<double>", "of the choices, in nats"),
    "answer": ("string", "what the model wrote, after the filter"),
    "metrics": ("map<string, double>", "value of each metric that is a number for one item"),
    "result": ("string", "what became of a program; empty for other items"),
}


def schema(pyarrow: Any) -> Any:
    """Return the schema of a file; the caller passes the module, because this package has no dependencies."""
    types = {
        "string": pyarrow.string(),
        "list<string>": pyarrow.list_(pyarrow.string()),
        "list<double>": pyarrow.list_(pyarrow.float64()),
        "map<string, double>": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
    }
    return pyarrow.schema([pyarrow.field(name, types[kind]) for name, (kind, _) in COLUMNS.items()])


#: Maximum number of milestones that an error suggests.
_NEAREST = 3


def find_milestone(tokens: int, milestones: Collection[int], error: str) -> int:
    """Return the milestone that has exactly these tokens, or the only one that is printed like them.

    So 2.51M finds the milestone of 2,506,752 tokens.

    Args:
        tokens: tokens as a person typed them.
        milestones: tokens of at least one milestone.
        error: message if none or several match.

    Raises:
        ConfigError: none or several match; the hint lists the nearest.
    """
    if tokens in milestones:
        return tokens
    alike = [milestone for milestone in milestones if count(milestone) == count(tokens)]
    if len(alike) == 1:
        return alike[0]
    nearest = sorted(sorted(milestones, key=lambda milestone: abs(milestone - tokens))[:_NEAREST])
    raise ConfigError(error, hint=f"nearest: {', '.join(f'{count(near)} ({near})' for near in nearest)}")
