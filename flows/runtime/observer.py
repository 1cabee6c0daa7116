"""The interface through which a flow shows its progress."""

from __future__ import annotations

from typing import Protocol

from conf.schema import Config
from hlatctl.run.state import RunState


class Observer(Protocol):
    """Shows a flow to a person. The flow calls it from the thread that drives it."""

    def update(self, state: RunState, config: Config) -> None:
        """Show the run's state; called about twice a second while training."""

    def message(self, text: str) -> None:
        """Show one line of text."""


class SilentObserver:
    """Shows nothing."""

    def update(self, state: RunState, config: Config) -> None:
        """Do nothing."""

    def message(self, text: str) -> None:
        """Do nothing."""
