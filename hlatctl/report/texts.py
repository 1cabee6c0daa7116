"""How a run's texts change over training: the continuations of each prompt, by milestone, for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hlatctl.run.continuations import Kept
from hlatctl.units import count, printable

#: A prompt, and the tokens and the text of each milestone.
Table = tuple[str, list[tuple[str, str]]]
_BLANK = "(only blank lines)"


def by_prompt(kept: Sequence[Kept]) -> list[Table]:
    """Return the continuations of each prompt, without control characters and without more than one blank line."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for each in kept:
        for one in each.continuations:
            rows.setdefault(printable(one.prompt), []).append((count(each.milestone_tokens), _compact(one.text)))
    return list(rows.items())


def evenly(kept: Sequence[Kept], most: int) -> list[Kept]:
    """Return at most ``most`` milestones at equal distances, with the first and the last."""
    if len(kept) <= most:
        return list(kept)
    return [kept[at * (len(kept) - 1) // (most - 1)] for at in range(most)]


def _compact(text: str) -> str:
    return re.sub(r"\n\s*\n", "\n\n", printable(text)).rstrip() or _BLANK
