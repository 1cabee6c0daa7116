"""How a run's milestones continue the prompts of ``eval.prompts``. ``eval.tasks`` writes these files.

The texts come from a model: they can contain any characters, so show them with ``hlatctl.units``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hlatctl.run import files
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt and the text that a model generated; ``stop`` says why it ended, as in ``eval.generate``."""

    prompt: str
    text: str
    stop: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The continuations of one milestone."""

    milestone_tokens: int
    step: int
    continuations: list[Continuation]


def write(run: RunPaths, milestone_tokens: int, identity: dict[str, Any], continuations: list[dict[str, Any]]) -> None:
    """Write a milestone's continuations, sealed.

    Args:
        identity: everything that decides the texts, for :func:`is_written`; has ``step``.
        continuations: fields of :class:`Continuation`.
    """
    record = {"v": VERSION, "milestone_tokens": milestone_tokens, **identity, "continuations": continuations}
    files.write_sealed_json(run.continuations(milestone_tokens), record)


def is_written(run: RunPaths, milestone_tokens: int, identity: dict[str, Any]) -> bool:
    """Return whether a milestone has undamaged continuations of this identity."""
    record = _record(run, milestone_tokens)
    return {key: record.get(key) for key in identity} == identity


def read(run: RunPaths, milestone_tokens: int) -> Kept | None:
    """Return a milestone's continuations. None if it has none, or the file is damaged."""
    record = _record(run, milestone_tokens)
    try:
        return Kept(
            milestone_tokens=milestone_tokens,
            step=int(record["step"]),
            continuations=[
                Continuation(prompt=str(entry["prompt"]), text=str(entry["text"]), stop=str(entry["stop"]))
                for entry in record["continuations"]
            ],
        )
    except DAMAGED:
        return None


def newest(run: RunPaths, milestones: Iterable[int]) -> Kept | None:
    """Return the continuations of the newest milestone that has some, of those with these tokens."""
    found = (read(run, tokens) for tokens in sorted(milestones, reverse=True))
    return next((kept for kept in found if kept), None)


def history(run: RunPaths, milestones: Iterable[int]) -> list[Kept]:
    """Return the continuations of all milestones that have some, oldest first."""
    return [kept for tokens in sorted(milestones) if (kept := read(run, tokens))]


def _record(run: RunPaths, milestone_tokens: int) -> dict[str, Any]:
    try:
        return files.read_sealed_json(run.continuations(milestone_tokens))
    except (OSError, ValueError):
        return {}
