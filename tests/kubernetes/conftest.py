"""One Kubernetes cluster for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kubernetes.lab import Lab, why_not


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster of four nodes; kubectl finds it from this process."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = Lab(tmp_path_factory.mktemp("kubernetes"))
    before = dict(os.environ)
    os.environ.update(cluster.env)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        os.environ.clear()
        os.environ.update(before)
