"""How a flow tells a person how it goes, without knowing what they look at."""

from __future__ import annotations

from typing import Protocol

from conf.schema import Config
from hlatctl.run.state import RunState


class Observer(Protocol):
    """Whoever watches a flow; called from the thread that drives it."""

    def update(self, state: RunState, config: Config) -> None:
        """The state has been brought up to date (about twice a second while training)."""

    def message(self, text: str) -> None:
        """A sentence worth a line."""


class SilentObserver:
    """Watches nothing."""

    def update(self, state: RunState, config: Config) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""
