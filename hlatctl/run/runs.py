"""The runs and sweeps of a runs folder: new ids, creation, lookup by id, unique prefix or ``latest``."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import ConfigError, RunExistsError, RunNotFoundError, StorageError, cannot_write
from hlatctl.run.paths import RunPaths, SweepPaths, cache_dir, is_reserved, trial_id
from hlatctl.run.reading import DAMAGED
from hlatctl.run.suggest import suggest

LATEST = "latest"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def new_run_id(name: str) -> str:
    """An id that sorts by time: ``quickstart-20261121-101500-3f2a``."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def compile_caches_used(runs_dir: Path) -> dict[str, float]:
    """When each cache of compiled graphs was last warmed for a run of a folder, Unix seconds, by its fingerprint."""
    used: dict[str, float] = {}
    for path in runs_dir.glob("*/compile_cache.json"):
        try:
            key = str(files.read_json(path)["fingerprint"])
            used[key] = max(used.get(key, 0.0), path.stat().st_mtime)
        except (OSError, *DAMAGED):
            continue  # a damaged run says nothing of a cache
    return used


def check_run_id(run_id: str, option: str = "--run-id") -> None:
    """Refuse an id that is no plain folder name, or that means something else."""
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


def create_run(runs_dir: Path, run_id: str, config_yaml: str, mode: int = files.PRIVATE) -> RunPaths:
    """Make a run directory holding its configuration; nothing is left behind if that fails.

    Args:
        mode: of the folders that are made; a runs folder that is there keeps its own.

    Raises:
        RunExistsError: the id is taken.
        StorageError: the runs folder can't be written.
    """
    check_run_id(run_id)
    run = RunPaths(runs_dir / run_id)
    _make(run.root, "--run-id", mode)
    with _undone(run.root), files.created_with(mode):
        files.write_text(run.config, files.seal_lines(config_yaml))
    return run


def create_sweep(runs_dir: Path, sweep_id: str, sweep_yaml: str, mode: int = files.PRIVATE) -> SweepPaths:
    """Make a sweep's directory holding what it tries, sealed; nothing is left behind if that fails.

    Raises:
        ConfigError: the id can't be one.
        RunExistsError: the id is taken.
        StorageError: the runs folder can't be written.
    """
    check_run_id(sweep_id, "--sweep-id")
    check_run_id(trial_id(sweep_id, 0), "--sweep-id")
    sweep = SweepPaths(runs_dir / sweep_id)
    _make(sweep.root, "--sweep-id", mode)
    with _undone(sweep.root), files.created_with(mode):
        files.write_text(sweep.space, sweep_yaml)
    return sweep


def _make(root: Path, option: str, mode: int) -> None:
    runs_dir, run_id = root.parent, root.name
    try:
        runs_dir.parent.mkdir(parents=True, exist_ok=True)
        with files.created_with(mode):
            runs_dir.mkdir(exist_ok=True)
            root.mkdir()
            cache_dir(runs_dir).mkdir(exist_ok=True)
    except FileExistsError:
        if not runs_dir.is_dir():
            raise StorageError(f"runs_dir={runs_dir}: is not a folder", hint="choose another with runs_dir=") from None
        raise RunExistsError(
            f"{option}={run_id}: exists in {runs_dir}",
            hint=f"`hlatctl resume {run_id}` goes on with it; or use another id",
        ) from None
    except OSError as error:
        raise cannot_write(f"runs_dir={runs_dir}", error, hint="choose another with runs_dir=") from None


@contextmanager
def _undone(root: Path) -> Iterator[None]:
    """Remove the folder again if what it is made for fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def list_runs(runs_dir: Path) -> list[RunPaths]:
    """All runs of a folder, oldest first."""
    if not runs_dir.is_dir():
        return []
    found = [RunPaths(p) for p in runs_dir.iterdir() if (p / "config.yaml").is_file()]
    return sorted(found, key=lambda run: (run.config.stat().st_mtime_ns, run.run_id))


def find_run(runs_dir: Path, name: str) -> RunPaths:
    """The run of that id, that unique prefix, or the ``latest``.

    Raises:
        RunNotFoundError: none, or several.
    """
    runs = list_runs(runs_dir)
    if not runs:
        raise RunNotFoundError(
            f"{name}: there is no run in {runs_dir}",
            hint="`hlatctl train` starts one; --runs-dir or HLATCTL_RUNS_DIR names another folder",
        )
    if name == LATEST:
        return runs[-1]
    exact = [run for run in runs if run.run_id == name]
    matches = exact or [run for run in runs if name and run.run_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    ids = [run.run_id for run in matches or runs]
    if matches:
        raise RunNotFoundError(f"{name}: is the beginning of {len(ids)} runs", hint=f"one of: {', '.join(ids[:5])}")
    hint = suggest(name, ids, otherwise="`hlatctl runs` lists them")
    raise RunNotFoundError(f"{name}: no run of that name in {runs_dir}", hint=hint)


def list_sweeps(runs_dir: Path) -> list[SweepPaths]:
    """All sweeps of a folder, oldest first."""
    if not runs_dir.is_dir():
        return []
    found = [SweepPaths(p) for p in runs_dir.iterdir() if (p / "sweep.yaml").is_file()]
    return sorted(found, key=lambda sweep: (sweep.root.stat().st_ctime_ns, sweep.run_id))


def find_sweep(runs_dir: Path, name: str) -> SweepPaths | None:
    """The sweep of that id, or whose id alone (its trials' aside) begins so; None where a run may be meant."""
    sweeps = {sweep.run_id: sweep for sweep in list_sweeps(runs_dir)}
    if not name or name in sweeps:
        return sweeps.get(name)
    matches = [sweep for sweep in sweeps.values() if sweep.run_id.startswith(name)]
    if len(matches) != 1:
        return None
    trials = trial_id(matches[0].run_id, 0).removesuffix("0000")
    others = [r for r in list_runs(runs_dir) if r.run_id.startswith(name) and not r.run_id.startswith(trials)]
    return None if others else matches[0]
