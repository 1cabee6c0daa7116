"""Checks of this machine, for ``hlatctl doctor``. Standard library only."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conf.devices import DEVICES
from conf.environment import compiler_problem
from conf.schema import Config
from conf.validate import code_tasks
from hlatctl.cache.remote import check_writable
from hlatctl.run import processes
from hlatctl.run.checks import Check
from hlatctl.run.errors import DependencyError, StorageError, install
from hlatctl.units import size

_MIN_PYTHON = (3, 11)
#: Packages of each role, by the extra that installs them (pyproject.toml).
_ROLES = {
    "head": ("prefect", "mlflow", "matplotlib"),
    "train": ("torch", "tokenizers", "pyarrow"),
    "eval": ("lm_eval",),
}
_TIMEOUT_S = 20
_SANDBOX = ("bwrap", "--ro-bind", "/", "/", "--unshare-all", "true")


def look(config: Config) -> Iterator[Check]:
    """Yield each check as it is done, for the configuration of a run."""
    yield _python()
    for role, packages in _ROLES.items():
        yield _packages(role, packages)
    for check in (_compiler(config), _bubblewrap(), _open_files(config)):
        yield _where_jobs_run(config, check)
    yield _folder("runs folder", Path(config.runs_dir))
    yield _worker_cache(config)
    yield from _remote(config)
    yield _loopback()


def _where_jobs_run(config: Config, check: Check) -> Check:
    """Return a check of what only jobs need. With a scheduler they run on nodes, and this may be a login node."""
    if check.status != "fail" or config.cluster.jobs_run != "cluster":
        return check
    return dataclasses.replace(check, status="skip", shows=f"{check.shows}; only the nodes that run jobs need it")


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    problem = f"{version}: 3.11 or newer is required" if sys.version_info < _MIN_PYTHON else ""
    return Check.of("python", problem, version, command="python --version")


def _packages(role: str, packages: tuple[str, ...]) -> Check:
    name, command = f"packages ({role})", install(role)
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if len(missing) == len(packages):
        return Check(
            name=name, status="skip", shows="not installed: this machine doesn't have this role", command=command
        )
    problem = f"{', '.join(missing)}: not installed" if missing else ""
    return Check.of(name, problem, ", ".join(packages), command=command)


def _compiler(config: Config) -> Check:
    language = DEVICES[config.backend.device].compiler
    if not config.backend.compile or language == "none":
        return Check(name="compiler", status="skip", shows="nothing is compiled with a compiler of this machine")
    problem = compiler_problem(config.backend.device)
    problem += "; training would run uncompiled, which is slower" if problem else ""
    command = "g++ --version" if language == "C++" else "gcc -v"
    return _optional(f"{language} compiler", problem, "found", command=command)


def _bubblewrap() -> Check:
    """Check that bubblewrap is installed and may create namespaces, which containers often forbid."""
    problem = _sandbox_problem()
    shows = f"{problem}; code tasks would be skipped" if problem else ""
    return _optional("bubblewrap", shows, "creates sandboxes", command=" ".join(_SANDBOX))


def _optional(name: str, problem: str, shows: str, *, command: str) -> Check:
    """Return the check of a tool without which a run does less, but succeeds."""
    return Check(name=name, status="skip" if problem else "pass", shows=problem or shows, command=command)


def _sandbox_problem() -> str:
    try:
        result = subprocess.run(_SANDBOX, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return "bwrap: not found"
    except subprocess.TimeoutExpired:
        return f"bwrap: no end after {_TIMEOUT_S} s"
    last_line = (result.stderr.strip().splitlines() or [""])[-1]
    return f"bwrap can't create a sandbox here ({last_line})" if result.returncode else ""


def skipped_code_tasks(config: Config) -> str:
    """Return a warning if milestone evaluations on this machine will skip tasks, because it has no sandbox.

    Empty if they run on a cluster, because its nodes may differ from this machine.
    """
    tasks = code_tasks(config.eval) if config.milestones and config.cluster.jobs_run == "here" else []
    problem = _sandbox_problem() if tasks and not config.eval.code.allow_unsandboxed else ""
    if not problem:
        return ""
    return (
        f"{', '.join(tasks)}: will be skipped, because programs that a model writes run only in a sandbox, and "
        f"{problem}; install bubblewrap (apt-get install bubblewrap), or set eval.code.allow_unsandboxed=true, which "
        "lets them read and change this machine"
    )


def _open_files(config: Config) -> Check:
    limit, least = processes.most_open_files(), config.preflight.min_open_files  # a job's processes raise theirs to it
    problem = f"{limit}: below preflight.min_open_files={least}" if limit < least else ""
    return Check.of("open files", problem, str(limit), command="ulimit -Hn", values={"open_files": limit})


def _folder(name: str, folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    command = f"df -h {existing}"
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return Check(name=name, status="fail", shows=f"{folder}: can't be written ({error.strerror})", command=command)
    return Check(
        name=name, status="pass", shows=f"{folder}: {size(free)} free", command=command, values={"free_bytes": free}
    )


def _worker_cache(config: Config) -> Check:
    folder = Path(config.cluster.worker_cache_dir)
    if config.cluster.jobs_run == "cluster":
        return Check(name="worker cache", status="skip", shows=f"{folder} is on the nodes, where preflight checks it")
    return _folder("worker cache", folder)


def _remote(config: Config) -> Iterator[Check]:
    """Check that ``checkpoint.remote_url`` can be written, with a small object that is deleted again."""
    if (url := config.checkpoint.remote_url) is None:
        return
    try:
        check_writable(url)
    except (StorageError, DependencyError) as error:
        yield Check(name="remote", status="fail", shows=error.message)
    else:
        yield Check(name="remote", status="pass", shows=f"{url}: an object was written, read and deleted")


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            socket.create_connection(address, timeout=_TIMEOUT_S).close()
    except OSError as error:
        return Check(name="loopback", status="fail", shows=f"127.0.0.1: no connection ({error.strerror})")
    return Check(name="loopback", status="pass", shows="a port was opened and reached")
