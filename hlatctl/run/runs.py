"""The runs of a runs folder: new ids, creation, lookup by id, unique prefix or ``latest``."""

from __future__ import annotations

import difflib
import re
import secrets
import shutil
import time
from pathlib import Path

from hlatctl.run import files
from hlatctl.run.errors import ConfigError, RunExistsError, RunNotFoundError, StorageError
from hlatctl.run.paths import RunPaths

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
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged run says nothing of a cache
    return used


def check_run_id(run_id: str) -> None:
    """Refuse an id that is no plain folder name, or that means something else."""
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ConfigError(
            f"--run-id={run_id}: must be 1 to 100 letters, digits, '.', '_' or '-', must not begin with '.', "
            f"and must not be '{LATEST}'"
        )


def create_run(runs_dir: Path, run_id: str, config_yaml: str) -> RunPaths:
    """Make a run directory holding its configuration; nothing is left behind if that fails.

    Raises:
        RunExistsError: the id is taken.
        StorageError: the runs folder can't be written.
    """
    check_run_id(run_id)
    run = RunPaths(runs_dir / run_id)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        run.root.mkdir()
    except FileExistsError:
        if not runs_dir.is_dir():
            raise StorageError(f"runs_dir={runs_dir}: is not a folder", hint="choose another with runs_dir=") from None
        raise RunExistsError(
            f"--run-id={run_id}: exists in {runs_dir}",
            hint=f"`hlatctl resume {run_id}` goes on with it; or use another id",
        ) from None
    except OSError as error:
        raise StorageError(
            f"runs_dir={runs_dir}: can't be written ({error.strerror})", hint="choose another with runs_dir="
        ) from None
    try:
        files.write_text(run.config, files.seal_lines(config_yaml))
    except BaseException:
        shutil.rmtree(run.root, ignore_errors=True)
        raise
    return run


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
    near = difflib.get_close_matches(name, ids, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "`hlatctl runs` lists them"
    raise RunNotFoundError(f"{name}: no run of that name in {runs_dir}", hint=hint)
