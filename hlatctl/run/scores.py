"""Which of an evaluation's scores a line of text has room for. What a score is, ``eval.scores`` says."""

from __future__ import annotations

from typing import Any

from hlatctl.run.journal import number

#: Names of the scores on a run's own held-out text begin so; they are one loss in several units.
HELD_OUT = "validation_"
_LOSS = "validation_loss"

Scores = dict[str, dict[str, Any]]


def headlines(scores: Scores) -> Scores:
    """The scores that no other sums up: a group's figure stands for its tasks, a first metric for the others.

    Their names tell: ``mmlu`` for ``mmlu_anatomy``, ``gsm8k`` for ``gsm8k_flexible_extract``.
    """

    def summed_up(name: str) -> bool:
        if name.startswith(HELD_OUT):
            return name != _LOSS and _LOSS in scores
        return any(name.startswith(f"{other}_") for other in scores)

    return {name: score for name, score in scores.items() if not summed_up(name)}


def in_words(scores: Scores) -> str:
    """The headlines in a line, and how many more there are."""
    shown = headlines(scores)
    left_out = f" (and {len(scores) - len(shown)} more)" if len(shown) < len(scores) else ""
    return ", ".join(f"{name} {number(score, 'value'):.3f}" for name, score in shown.items()) + left_out
