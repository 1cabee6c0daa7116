"""Removes runs or only their checkpoints, and recreates run directories from object storage.

A run is not removed while anything works on it. Recreating a run makes only the small files; the training processes
fetch the checkpoint, each its share (``trainer.checkpoint.remote``).
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import conf.load
from conf.of_run import of_run
from conf.schema import Config
from flows.launch.base import launcher_for
from flows.runtime.context import is_simulated, live_training
from hlatctl.cache.remote import CONFIG, Copy, complete_copies
from hlatctl.cache.store import Objects
from hlatctl.run import files, memory, runs, sweep
from hlatctl.run.checkpoint import MANIFEST, folder_steps, why_invalid
from hlatctl.run.errors import (
    CheckpointError,
    ConfigError,
    HlatctlError,
    RunBusyError,
    StorageError,
    cannot_write,
    hint_of,
)
from hlatctl.run.files import private_folder
from hlatctl.run.fold import read_state
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter, read_events
from hlatctl.run.lease import driver, hold_driver, hold_evaluator, holder
from hlatctl.run.paths import RunPaths, SweepPaths
from hlatctl.run.processes import name_of_user
from hlatctl.run.redact import hide
from hlatctl.run.runs import list_runs

#: Prefix of folders that are being removed; no run's id begins with a dot.
_REMOVED = ".removed-"


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a run's folder contains.

    Args:
        checkpoints: number of checkpoints.
        checkpoints_bytes: their size on this disk; files shared with another run count in full.
        other_bytes: size of everything else.
        remote_url: folder of copies in object storage, which are not removed; empty: none.
        forks: ids of runs in the same folder that were forked from this one. They have their own checkpoints.
    """

    checkpoints: int
    checkpoints_bytes: int
    other_bytes: int
    remote_url: str
    forks: tuple[str, ...]


def content(run: RunPaths) -> Content:
    """Return what a run's folder contains, without following symbolic links."""
    in_checkpoints = _tree_bytes(run.checkpoints)
    try:
        url = of_run(run).checkpoint.remote_url
    except HlatctlError:
        url = None
    return Content(
        checkpoints=len(folder_steps(run)),
        checkpoints_bytes=in_checkpoints,
        other_bytes=_tree_bytes(run.root) - in_checkpoints,
        remote_url=f"{url}/{run.run_id}" if url else "",
        forks=_forks(run),
    )


def members(run: RunPaths) -> list[RunPaths]:
    """Return the trials of a sweep and the sweep itself, or only the run."""
    if not isinstance(run, SweepPaths):
        return [run]
    state = sweep.fold(read_events(run))
    trials = [RunPaths(run.root.parent / trial.run_id) for trial in state.trials.values()]
    return [*(trial for trial in trials if trial.root.is_dir()), run]


def check_idle(run: RunPaths) -> None:
    """Check that nothing works on a run and that this user owns it; raise RunBusyError or StorageError otherwise."""
    if run.root.is_symlink():
        raise StorageError(
            f"{run.root}: is a link, and the run is elsewhere", hint="remove the link, or name its target"
        )
    owner = run.root.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise StorageError(f"{run.root}: belongs to user {name_of_user(owner)}", hint="ask that user to remove it")
    if busy := driver(run):
        raise RunBusyError(f"run {run.run_id}: {busy} drives it", hint=f"`hlatctl stop {run.run_id}`, then try again")
    if isinstance(run, SweepPaths):
        return
    state = read_state(run)
    above = SweepPaths(run.root.parent / state.sweep) if state.sweep else None
    if above and above.root.is_dir() and (busy := driver(above)):
        raise RunBusyError(
            f"run {run.run_id}: is a trial of {above.run_id}, which {busy} drives",
            hint=f"`hlatctl stop {above.run_id}`, then try again",
        )
    # `hlatctl eval` prepares for some seconds before its evaluator takes a milestone's lease.
    _check_free(run, (run.evaluator_lock, *run.evals.glob("*/lease")))
    try:
        config = of_run(run)
    except HlatctlError:
        return  # a damaged run has no job to query
    if not is_simulated(config) and live_training(state, launcher_for(config)):
        raise RunBusyError(
            f"run {run.run_id}: training still runs, without a driver",
            hint=f"`hlatctl stop {run.run_id}`, then try again",
        )


@contextmanager
def _held(run: RunPaths) -> Iterator[None]:
    """Keep drivers and evaluations from starting. One may have started since the last check."""
    with ExitStack() as held:
        held.enter_context(hold_driver(run))
        if not isinstance(run, SweepPaths):
            held.enter_context(hold_evaluator(run))
            _check_free(run, run.evals.glob("*/lease"))
        yield


def _check_free(run: RunPaths, leases: Iterable[Path]) -> None:
    for lease in leases:
        if busy := holder(lease):
            raise RunBusyError(f"run {run.run_id}: {busy} evaluates it", hint="wait for it, or end that process")


def remove(run: RunPaths) -> None:
    """Remove an idle run's folder. From the start, no reader mistakes the remainder for a run."""
    check_idle(run)
    hidden = run.root.with_name(f"{_REMOVED}{run.run_id}-{secrets.token_hex(4)}")
    try:
        with _held(run):
            run.root.rename(hidden)
        shutil.rmtree(hidden)
        memory.remove_all(run)
    except OSError as error:
        raise cannot_write(str(run.root), error, hint=hint_of(error) or "`hlatctl rm` removes what is left") from None


def remove_left_overs(runs_dir: Path) -> None:
    """Remove what this user's interrupted removals left behind."""
    for path in runs_dir.glob(f"{_REMOVED}*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


def archive(run: RunPaths, *, keeps: int | None, by: str) -> int:
    """Remove an idle run's checkpoints, and return their size in bytes.

    Everything that its report needs stays, and the checkpoint of step ``keeps``. The run can't be resumed afterwards.
    """
    check_idle(run)
    with _held(run), files.created_like(run.root):
        gone = [run.checkpoint(step) for step in folder_steps(run) if step != keeps]
        freed = sum(map(_tree_bytes, gone))
        # First, so that interrupted archiving is repeated and the run never resumed.
        with JournalWriter(run, OPERATOR_WRITER) as journal:
            journal.append("archived", durable=True, by=by, bytes=freed)
        try:
            for folder in gone:
                (folder / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(folder)
        except OSError as error:
            hint = hint_of(error) or f"`hlatctl archive {run.run_id}` again"
            raise cannot_write(str(run.checkpoints), error, hint=hint) from None
    return freed


def newest_valid(run: RunPaths, say: Callable[[str], None]) -> int | None:
    """Return the step of the newest valid checkpoint, of the newest one if none is valid, or None if there is none.

    A checkpoint that the run has not verified is read: the last one before a stop, because the driver ends with it.
    """
    state, have = read_state(run), folder_steps(run)
    for step in sorted(have, reverse=True):
        if state.trust.get(step) in ("verified", "survived"):
            return step
        say(f"{run.run_id}: verifying the checkpoint of step {step}")
        if why_invalid(run.checkpoint(step)) is None:
            return step
    return max(have, default=None)


def _forks(run: RunPaths) -> tuple[str, ...]:
    found = []
    for other in list_runs(run.root.parent):
        if b"fork:" in (text := _bytes(other.config)) and f"run: {run.run_id}\n".encode() in text:
            found.append(other.run_id)
    return tuple(found)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(parent, name)).st_size for name in names)
    return total


def recreate(url: str, runs_dir: Path, *, argv: list[str]) -> tuple[RunPaths, int]:
    """Create a run from its remote folder; return it, and the step of the newest checkpoint there.

    Raises:
        StorageError, ConfigError: the URL can't be read, or is not the remote folder of a run.
        CheckpointError: the remote folder has no complete checkpoint.
        RunExistsError: the run's directory already exists.
    """
    parent, _, run_id = url.rstrip("/").rpartition("/")
    if "://" not in url:
        raise ConfigError(f"URL={url}: must be a run's folder in object storage", hint="s3://bucket/folder/RUN")
    runs.check_run_id(run_id, "URL")
    config, copies = _read(url, Objects(url))
    if not copies:
        raise CheckpointError(
            f"{url}: has no complete checkpoint", hint="start the run anew with `hlatctl train`, under another id"
        )
    checkpoint = replace(config.checkpoint, remote_url=parent)
    config = replace(config, runs_dir=os.fspath(runs_dir), checkpoint=checkpoint)
    words = [hide(word) for word in argv]

    def begin(run: RunPaths) -> None:
        with JournalWriter(run, FLOW_WRITER) as journal:
            journal.append("run_created", durable=True, run_id=run_id, simulated=False, argv=words)

    run = runs.create_run(runs_dir, run_id, conf.load.dump(config), int(config.runs_mode, 8), begin)
    return run, copies[0].step


def _read(url: str, remote: Objects) -> tuple[Config, list[Copy]]:
    try:
        with private_folder("restore") as own:
            file = own.path / CONFIG
            file.write_bytes(remote.read(CONFIG))
            config = conf.load.load(file)
        return config, complete_copies(remote)
    except HlatctlError:
        raise
    except FileNotFoundError:
        hint = "name the folder of one run: checkpoint.remote_url followed by /RUN"
        raise StorageError(f"{url}: has no {CONFIG}, so it is not the remote folder of a run", hint=hint) from None
    except Exception as error:  # any exception of the service's library
        hint = "check the address and the credentials in the environment"
        raise StorageError(f"{url}: can't be read ({type(error).__name__}: {error})", hint=hint) from None
