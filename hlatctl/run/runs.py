"""The runs and sweeps of a runs folder: new ids, creation, and lookup by id, unique beginning or ``latest``."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import (
    ConfigError,
    RunExistsError,
    RunNotFoundError,
    StorageError,
    cannot_write,
    of_system,
    suggest,
)
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths, SweepPaths, cache_dir, is_reserved, trial_id

LATEST = "latest"
#: Begins the names of folders that are being created; no run's id begins with a dot.
_NEW = ".new-"
#: A folder that has been under creation for longer was left by a process that was killed.
_LONGEST_CREATION_S = 3600.0
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def new_run_id(name: str) -> str:
    """Return a new id that sorts by time: ``quickstart-20261121-101500-3f2a``."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def compile_caches_used(runs_dir: Path) -> dict[str, float]:
    """Return the Unix time at which each cache of compiled graphs was last warmed for a run, by fingerprint."""
    used: dict[str, float] = {}
    for path in runs_dir.glob("*/compile_cache.json"):
        try:
            key = str(files.read_json(path)["fingerprint"])
            used[key] = max(used.get(key, 0.0), path.stat().st_mtime)
        except (OSError, *DAMAGED):
            continue  # a damaged run names no cache
    return used


def check_run_id(run_id: str, option: str = "--run-id") -> None:
    """Check an id.

    Raises:
        ConfigError: it is not a plain folder name, or is reserved.
    """
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ConfigError(
            f"{option}={run_id}: must be 1 to 100 letters, digits, '.', '_' or '-', must not begin with '.', "
            f"and must not be '{LATEST}'"
        )
    if is_reserved(run_id):
        raise ConfigError(
            f"{option}={run_id}: is the name of a file that hlatctl keeps in the runs folder",
            hint=f"choose another name, such as {option}={run_id.split('.')[0]}-run",
        )


def create_run(
    runs_dir: Path,
    run_id: str,
    config_yaml: str,
    mode: int = files.PRIVATE,
    begin: Callable[[RunPaths], None] = lambda run: None,
) -> RunPaths:
    """Create a run directory with its configuration, completely or not at all.

    Args:
        mode: mode of new folders; an existing runs folder keeps its own.
        begin: writes further initial files while the directory has a temporary name.

    Raises:
        RunExistsError: the id is taken.
        StorageError: the runs folder can't be written.
    """
    check_run_id(run_id)
    run = RunPaths(runs_dir / run_id)
    text = files.seal_lines(config_yaml)
    _create(run.config, text, "--run-id", mode, lambda folder: begin(RunPaths(folder)))
    return run


def create_sweep(
    runs_dir: Path,
    sweep_id: str,
    sweep_yaml: str,
    mode: int = files.PRIVATE,
    begin: Callable[[SweepPaths], None] = lambda sweep: None,
) -> SweepPaths:
    """Create a sweep's directory with ``sweep.yaml``, as :func:`create_run` does.

    Raises:
        ConfigError: the id is invalid.
        RunExistsError: the id is taken.
        StorageError: the runs folder can't be written.
    """
    check_run_id(sweep_id, "--sweep-id")
    check_run_id(trial_id(sweep_id, 0), "--sweep-id")
    sweep = SweepPaths(runs_dir / sweep_id)
    _create(sweep.space, sweep_yaml, "--sweep-id", mode, lambda folder: begin(SweepPaths(folder)))
    return sweep


def _create(file: Path, text: str, option: str, mode: int, begin: Callable[[Path], None]) -> None:
    """Create a folder under a hidden name, and rename it when it is complete. An empty folder is replaced."""
    runs_dir, run_id = file.parent.parent, file.parent.name
    hidden = runs_dir / f"{_NEW}{run_id}-{secrets.token_hex(4)}"
    taken = RunExistsError(
        f"{option}={run_id}: exists in {runs_dir}", hint=f"`hlatctl resume {run_id}` continues it; or use another id"
    )
    try:
        runs_dir.parent.mkdir(parents=True, exist_ok=True)
        with files.created_with(mode), ExitStack() as undo:
            runs_dir.mkdir(exist_ok=True)
            if os.path.lexists(file.parent) and (not file.parent.is_dir() or os.listdir(file.parent)):
                raise taken
            _remove_abandoned(runs_dir)
            hidden.mkdir()
            undo.callback(shutil.rmtree, hidden, ignore_errors=True)
            cache_dir(runs_dir).mkdir(exist_ok=True)
            files.write_text(hidden / file.name, text)
            begin(hidden)
            hidden.rename(file.parent)
            undo.pop_all()
    except FileExistsError:
        raise StorageError(f"runs_dir={runs_dir}: is not a folder", hint="choose another with runs_dir=") from None
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # another process has just created it
            raise taken from None
        raise cannot_write(f"runs_dir={runs_dir}", error, hint="choose another with runs_dir=") from None


def _remove_abandoned(runs_dir: Path) -> None:
    """Remove the folders of creations that were killed."""
    oldest = time.time() - _LONGEST_CREATION_S
    for folder in runs_dir.glob(f"{_NEW}*"):
        with suppress(OSError):  # another process has just finished it
            if folder.lstat().st_mtime < oldest:
                shutil.rmtree(folder)


def list_runs(runs_dir: Path) -> list[RunPaths]:
    """Return all runs of a folder, oldest first."""
    if not runs_dir.is_dir():
        return []
    found = []
    for name in os.listdir(runs_dir):
        if name.startswith("."):  # not a run's id; a run is being removed
            continue
        with suppress(OSError):  # one call for each of thousands of runs
            status = os.stat(runs_dir / name / "config.yaml")
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, name))
    return [RunPaths(runs_dir / name) for _, name in sorted(found)]


def find_run(runs_dir: Path, name: str) -> RunPaths:
    """Return the run with an id, a unique prefix of one, or ``latest``.

    Raises:
        RunNotFoundError: there is none, or more than one.
    """
    if not name:  # as an unset variable in a script gives
        raise RunNotFoundError("RUN is empty", hint=f"name a run's id, the beginning of one, or `{LATEST}`")
    runs = list_runs(runs_dir)
    if not runs:
        _check_visible(runs_dir, name)
        raise RunNotFoundError(
            f"{name}: there is no run in {runs_dir}",
            hint="`hlatctl train` starts one; --runs-dir or HLATCTL_RUNS_DIR names another folder",
        )
    if name == LATEST:
        return runs[-1]
    exact = [run for run in runs if run.run_id == name]
    matches = exact or [run for run in runs if run.run_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    ids = [run.run_id for run in matches or runs]
    if matches:
        raise RunNotFoundError(f"{name}: is the beginning of {len(ids)} runs", hint=f"one of: {', '.join(ids[:5])}")
    _check_visible(runs_dir, name)
    hint = suggest(name, ids, otherwise="`hlatctl runs` lists them")
    raise RunNotFoundError(f"{name}: no run of that name in {runs_dir}", hint=hint)


def _check_visible(runs_dir: Path, name: str) -> None:
    """Refuse the name of a run that exists and is another user's.

    Raises:
        StorageError: its folder can't be read.
    """
    if not _RUN_ID.fullmatch(name):
        return
    try:
        os.stat(runs_dir / name / "config.yaml")
    except OSError as error:
        if refused := of_system(error):
            raise refused from None


def list_sweeps(runs_dir: Path) -> list[SweepPaths]:
    """Return all sweeps of a folder, oldest first."""
    if not runs_dir.is_dir():
        return []
    sweeps = []
    for path in runs_dir.iterdir():
        with suppress(OSError):  # another user's private run or sweep
            if (path / "sweep.yaml").is_file():
                sweeps.append(SweepPaths(path))
    return sorted(sweeps, key=lambda sweep: (sweep.root.stat().st_ctime_ns, sweep.run_id))


def find_sweep(runs_dir: Path, name: str) -> SweepPaths | None:
    """Return the sweep with an id, or a prefix that no other sweep or run has, except its trials. Else None."""
    sweeps = {sweep.run_id: sweep for sweep in list_sweeps(runs_dir)}
    if not name or name in sweeps:
        return sweeps.get(name)
    matches = [sweep for sweep in sweeps.values() if sweep.run_id.startswith(name)]
    if len(matches) != 1:
        return None
    trials = trial_id(matches[0].run_id, 0).removesuffix("0000")
    others = [r for r in list_runs(runs_dir) if r.run_id.startswith(name) and not r.run_id.startswith(trials)]
    return None if others else matches[0]
