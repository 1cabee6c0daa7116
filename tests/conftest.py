"""Settings of the whole test suite."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from flows import prefect_env

# A busy machine is no failure, and a test run leaves nothing in the tree.
settings.register_profile("house", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(scope="session")
def prefect_api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Prefect API for all runs that ask for no other: each would start its own, as slow as its training."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.create_server(("127.0.0.1", 0)) as listener, (home / "server.log").open("wb") as log:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.prefect_server", str(listener.fileno())],
            pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stdout=log, stderr=log,
            env={**os.environ, **prefect_env.settings(home)},
        )  # fmt: skip
    while server.poll() is None and not prefect_env.answers(url):
        time.sleep(0.1)
    yield url
    server.communicate()
