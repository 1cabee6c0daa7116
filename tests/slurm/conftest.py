"""One Slurm cluster for all tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, why_not

NODES = 4


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A cluster of four nodes; Slurm's commands of this process find it."""
    if reason := why_not():
        pytest.skip(reason)
    # Not below pytest's folder: that is private, and munge's daemon runs as another user. Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="hlatctl-slurm-"))
    cluster = Lab(folder, NODES)
    before = dict(os.environ)
    os.environ.update(cluster.env)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
