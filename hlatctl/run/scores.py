"""Selects the scores of an evaluation that fit in one line. ``eval.scores`` computes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hlatctl.run.journal import number

#: Prefix of the scores on a run's held-out text: one loss in several units.
HELD_OUT = "validation_"
_LOSS = "validation_loss"
#: Accuracies of ranked choices: of the likeliest, and of the likeliest per character, per byte and per token.
ACCURACIES = ("acc", "acc_norm", "acc_bytes", "acc_per_token")
#: Metric of right answers and of held-out text.
BITS_PER_BYTE = "bits_per_byte"
#: Metrics of which less is better.
LOWER_IS_BETTER = frozenset({BITS_PER_BYTE, "loss_nats_per_token", "perplexity", "word_perplexity", "byte_perplexity"})
#: Ends the name of the bits per byte of right answers.
_BITS = "_bpb"


def bits_of(name: str) -> str:
    """Return the name of the bits per byte of a task's or group's right answers."""
    return f"{name}{_BITS}"


def is_better_low(name: str) -> bool:
    """Return whether less is better of a score of this name: held-out text, and bits per byte."""
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
