"""Selects the scores of an evaluation that fit in one line. ``eval.scores`` computes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hlatctl.run.journal import number

#: Prefix of the scores on a run's held-out text: one loss in several units.
HELD_OUT = "validation_"
_LOSS = "validation_loss"


def headlines(names: Collection[str]) -> list[str]:
    """Return the names that no other name summarizes.

    A name summarizes those that it begins: ``mmlu`` is a group with ``mmlu_anatomy``, and ``gsm8k`` the first metric
    before ``gsm8k_flexible_extract``.
    """

    def is_summarized(name: str) -> bool:
        if name.startswith(HELD_OUT):
            return name != _LOSS and _LOSS in names
        return any(name.startswith(f"{other}_") for other in names)

    return [name for name in names if not is_summarized(name)]


def in_words(scores: dict[str, dict[str, Any]]) -> str:
    """Return the headlines in one line, and the number of other scores."""
    shown = headlines(scores)
    left_out = f" (and {len(scores) - len(shown)} more)" if len(shown) < len(scores) else ""
    return ", ".join(f"{name} {number(scores[name], 'value'):.3f}" for name in shown) + left_out
