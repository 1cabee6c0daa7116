"""Find a run's milestone by its tokens."""

from __future__ import annotations

from collections.abc import Collection

from hlatctl.run.errors import ConfigError
from hlatctl.units import count

#: Milestones that an error suggests.
_NEAREST = 3


def find_milestone(tokens: int, milestones: Collection[int], error: str) -> int:
    """Return the milestone that has exactly these tokens, or the only one that is printed like them.

    So 2.51M finds the milestone of 2,506,752 tokens.

    Args:
        tokens: from a person.
        milestones: tokens of the milestones to choose from, at least one.
        error: the message if none or several match.

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
