"""Which of an evaluation's scores a line of text has room for. What a score is, ``eval.scores`` says."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hlatctl.run.journal import number

#: Names of the scores on a run's own held-out text begin so; they are one loss in several units.
HELD_OUT = "validation_"
_LOSS = "validation_loss"


def headlines(names: Collection[str]) -> list[str]:
    """The names that no other sums up: a group's figure stands for its tasks, a first metric for the others.

    The names tell: ``mmlu`` for ``mmlu_anatomy``, ``gsm8k`` for ``gsm8k_flexible_extract``.
    """

    def summed_up(name: str) -> bool:
        if name.startswith(HELD_OUT):
            return name != _LOSS and _LOSS in names
        return any(name.startswith(f"{other}_") for other in names)

    return [name for name in names if not summed_up(name)]


def in_words(scores: dict[str, dict[str, Any]]) -> str:
    """The headlines in a line, and how many more there are."""
    shown = headlines(scores)
    left_out = f" (and {len(scores) - len(shown)} more)" if len(shown) < len(scores) else ""
    return ", ".join(f"{name} {number(scores[name], 'value'):.3f}" for name in shown) + left_out
