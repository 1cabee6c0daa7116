"""A driver that doesn't start gives its own error to the process that started it."""

from __future__ import annotations

import os

import pytest

from flows.runtime import detached
from hlatctl.run.errors import RunBusyError
from hlatctl.run.lease import hold_driver
from tests.hlatctl.conftest import MakeRun, make_run  # noqa: F401

pytestmark = pytest.mark.processes


def test_of_two_drivers_the_slower_one_names_the_other(make_run: MakeRun) -> None:
    run = make_run(until="killed")
    with hold_driver(run), pytest.raises(RunBusyError, match=f"process {os.getpid()} is already driving it") as raised:
        detached.start_driver(run)
    assert "hlatctl status" in raised.value.hint
