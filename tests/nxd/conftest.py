"""Fixtures of the tests of backend nxd: the trainer's small runs, and processes that find the library."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hlatctl.run.files import JOB_FOLDER_ENV
from tests.trainer.conftest import corpus, dataset, events_of, finish, make_config, make_run  # noqa: F401 (fixtures are found by their names here)

ROOT = Path(__file__).parents[2]
_MISSING = [name for name in ("torch_xla", "neuronx_distributed") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the library where it is not installed."""
    reason = f"{' and '.join(_MISSING)} not installed: tests/nxd/setup.sh says how"
    for item in items:
        if _MISSING and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.Popen[str]]:
    """Start a module by torchrun, with this process's PYTHONPATH in addition to the project.

    The job has a private folder, as by ``hlatctl.node``: one process of each replica reads for the others.
    """

    def run(*argv: str, processes: int, **env: str) -> subprocess.Popen[str]:
        env = {JOB_FOLDER_ENV: os.fspath(tmp_path_factory.mktemp("job")), **env}
        path = os.pathsep.join((os.fspath(ROOT), os.environ.get("PYTHONPATH", "")))
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *argv],
            cwd=ROOT,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path, **env},
        )

    return run
