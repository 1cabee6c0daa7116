"""One Slurm cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.lab import Lab, running, why_not

NODES = 4


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster of four nodes; Slurm's commands of this process find it."""
    if reason := why_not():
        pytest.skip(reason)
    with running(NODES) as cluster:
        yield cluster
