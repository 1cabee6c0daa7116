"""Settings of the whole test suite."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadfile import LoadFileScheduling

from flows.tracking import local_server, prefect_api
from hlatctl.run import startup
from hlatctl.run.paths import RunPaths
from tests import compositions

# Each worker imports all tests, before it knows which of them it gets.
startup.begin()
# Before torch is imported. Its threads spin while they wait, which takes the cores of other workers and processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test reads the speed tests of whoever runs the tests.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="hlatctl-config-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

# A busy machine is no failure, and a test run leaves nothing in the tree.
settings.register_profile("hlatctl", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hlatctl")


#: The files and folders that take longest; a worker that began one of them last would end long after the others.
FIRST = (
    "e2e/test_drill.py",
    "slurm/",
    "e2e/test_train.py",
    "e2e/test_checkpoint.py",
    "e2e/test_sweep.py",
    "e2e/test_torchtitan.py",
    "e2e/test_survival.py",
    "e2e/test_fork.py",
    "kubernetes/test_training.py",
    "e2e/test_amend.py",
    "test_readme.py",
    "flows/tracking/",
    "trainer/test_layouts.py",
    "trainer/torchtitan/",
    "eval/test_milestone.py",
    "eval/serving/",
    "trainer/test_processes.py",
    "trainer/test_cache.py",
    "e2e/",
)
#: Files that share what is expensive to start, by what they share; one worker runs them.
_TOGETHER = {"a Slurm cluster": ("slurm/",), "runs": FIRST[2:5]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest."""

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((number for number, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    items.sort(key=place)


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker whole files, or all files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        name = nodeid.partition("::")[0].removeprefix("tests/")
        return next((shared for shared, files in _TOGETHER.items() if name.startswith(files)), name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """Choose what a worker gets (with ``--dist loadfile``)."""
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


_STARTS_A_PROCESS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system")
#: matplotlib lists the fonts once per machine, in the first test that draws a figure.
_LISTS_FONTS = "fc-list"
_in_unmarked_test = False


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    if _in_unmarked_test and event in _STARTS_A_PROCESS and args[0] != _LISTS_FONTS:
        raise AssertionError(f"an unmarked test starts a process {args[:2]}: mark it with @pytest.mark.processes")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let only tests marked ``processes`` start any: `make test-fast` leaves those out.

    Signals have Python's handlers in every test. Otherwise a library that has left another one, or a shell that ignores
    Ctrl-C, would end a worker in a test of signals.
    """
    global _in_unmarked_test
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _in_unmarked_test = item.get_closest_marker("processes") is None
    try:
        return (yield)
    finally:
        _in_unmarked_test = False


compositions.install()


def pytest_collection_finish() -> None:
    """Search no more for garbage among the modules that are imported now."""
    startup.imported()


@pytest.fixture(scope="module")
def train_here() -> Iterator[Callable[[RunPaths, int], int]]:
    """Train an attempt of a run in this process."""
    import torch

    from trainer.__main__ import main

    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield lambda run, attempt: main(["--run-dir", os.fspath(run.root), "--attempt", str(attempt)])
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def prefect_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs folder of the Prefect API that tests share."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def prefect_home(prefect_folder: Path, prefect_api_url: str) -> Path:
    """A folder with Prefect's empty database, to copy: creating it takes longer than most tests."""
    return prefect_folder / "empty"


@pytest.fixture(scope="session")
def prefect_api_url(prefect_folder: Path) -> Iterator[str]:
    """One Prefect API for all runs that ask for no other: each would start its own, as slow as its training.

    Its password is in this process's environment, where `PREFECT_API_AUTH_STRING` is what a user sets for such an API.
    """
    home, auth = prefect_folder, local_server.new_auth()
    with socket.create_server(("127.0.0.1", 0)) as listener, (home / "server.log").open("wb") as log:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "flows.tracking.servers", "prefect", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **prefect_api.settings(home), local_server.AUTH_ENV: auth},
        )
    os.environ["PREFECT_API_AUTH_STRING"] = auth
    while server.poll() is None and not prefect_api.answers(url):
        time.sleep(0.1)
    (home / "empty").mkdir()
    with (
        closing(sqlite3.connect(prefect_api.home(home) / "prefect.db")) as database,
        closing(sqlite3.connect(home / "empty" / "prefect.db")) as empty,
    ):
        database.backup(empty)
    yield url
    del os.environ["PREFECT_API_AUTH_STRING"]
    server.communicate()
