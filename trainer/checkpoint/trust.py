"""Which of a run's checkpoints are valid, where they are stored, which is tried first, and when they are deleted.

``Tiers`` has the folders: in the run directory and, optionally, on the node's own disk. Folders are created under a
temporary name and renamed when they are complete.

``CheckpointRecords`` has the records, on rank 0. A checkpoint is written (under a temporary name), committed (renamed),
verified (read again), and finally has survived (finite steps followed it). Each of these is an event. The state is read
from the journal, so an attempt continues with the state of the previous one.

``Verifier`` lets each rank verify its share of the files. The checks: size and SHA-256 of every file in the manifest;
JSON files can be parsed; the tensors in each shard's header fill it exactly; the shards have every element of every
tensor; no shard is unlisted. Tensor values are covered by the hashes. ``FORMATS`` has what differs between our own
format and the one that torchtitan writes.

``ReadBack`` hashes a shard as storage returns it, while the shard is still being written. Verifying a checkpoint after
it is written takes as long again as writing it. Storage that reads and writes in parallel finishes both at about the
same time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config
from conf.sizes import checkpoint_bytes
from conf.training_rules import CheckpointPolicy
from hlatctl.run import files
from hlatctl.run.checkpoint import INDEX_FILES, MANIFEST, read_manifest, steps_in, why_invalid
from hlatctl.run.errors import CheckpointError
from hlatctl.run.fence import Fence
from hlatctl.run.files import DAMAGED, REPLACED, fsync, read_json, replace_folder, why
from hlatctl.run.fold import apply
from hlatctl.run.journal import JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import is_held
from hlatctl.run.model_folder import read_link
from hlatctl.run.paths import RunPaths, attempt_name, step_name
from hlatctl.run.state import MilestoneState, RunState
from trainer.backends.base import Member
from trainer.checkpoint.shards import SUFFIX, number_of, read_header, read_index
from trainer.checkpoint.together import Together

_TEMPORARY = ".tmp-"


class Tiers:
    """The folders that hold a run's checkpoints, for an attempt that writes; 0: none."""

    def __init__(self, config: Config, run: RunPaths, attempt: int = 0) -> None:
        self.shared = run.checkpoints
        self._fence = Fence(run, attempt)
        self.fast: Path | None = None
        if config.checkpoint.fast_dir is not None:
            # Runs in different runs folders may have the same id.
            of_run = hashlib.sha256(os.fsencode(run.root)).hexdigest()[:8]
            self.fast = Path(config.checkpoint.fast_dir).expanduser() / f"{run.run_id}-{of_run}"

    @property
    def folders(self) -> list[Path]:
        """Return all folders. Checkpoints are written to the first, the fastest."""
        return [self.shared] if self.fast is None else [self.fast, self.shared]

    def copies(self) -> Iterator[tuple[int, Path]]:
        """Yield step and folder of every checkpoint: newest step first, and for each step the fastest folder first."""
        for step in sorted({step for folder in self.folders for step in steps_in(folder)}, reverse=True):
            for folder in self.folders:
                if (folder / step_name(step)).is_dir():
                    yield step, folder / step_name(step)

    def temporary(self, step: int) -> Path:
        """Return the folder that a checkpoint is written to before it is committed."""
        return self.folders[0] / self._temporary_name(step)

    def partial(self, step: int) -> Path:
        """Return the folder in the run directory that a checkpoint is copied to before it has its final name."""
        return self.shared / self._temporary_name(step)

    def _temporary_name(self, step: int) -> str:
        """Return a name that only this attempt uses: a process of an earlier one may still be writing."""
        attempt = self._fence.attempt
        return f"{_TEMPORARY}{step_name(step)}{f'-{attempt_name(attempt)}' if attempt else ''}"

    def check(self) -> None:
        """Raise an error if the attempt is over (see :class:`hlatctl.run.fence.Fence`)."""
        self._fence.check(now=True)

    def begin(self, step: int) -> None:
        """Create an empty temporary folder."""
        self.check()
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        self.temporary(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def commit(self, step: int) -> Path:
        """Rename the temporary folder durably; return its new path."""
        self.check()
        return replace_folder(self.temporary(step), self.folders[0] / step_name(step))

    def begin_copy(self, step: int) -> None:
        """Create an empty folder in the run directory to copy a checkpoint to, from the fast folder."""
        self.abandon_copy(step)
        self.partial(step).mkdir(parents=True)

    def copy(self, step: int, names: Iterable[str]) -> None:
        """Copy files of a checkpoint durably from the fast folder.

        Raises an OSError if the run directory can't be written, or a file is not in the fast folder.
        """
        assert self.fast is not None
        for name in names:
            target = self.partial(step) / name
            shutil.copyfile(self.fast / step_name(step) / name, target)
            fsync(target)

    def finish_copy(self, step: int) -> Path:
        """Copy the manifest, last, and give the copy its final name durably; return its path."""
        self.copy(step, [MANIFEST])
        fsync(self.partial(step))
        self.check()
        return replace_folder(self.partial(step), self.shared / step_name(step))

    def abandon_copy(self, step: int) -> None:
        """Delete the incomplete copy."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def delete(self, step: int) -> None:
        """Delete a checkpoint in all folders."""
        self.check()
        for folder in self.folders:
            _delete(folder / step_name(step))

    def trim_fast(self, newest: int) -> None:
        """Delete checkpoints from the fast folder that are older than one that the run directory has too."""
        if self.fast is not None:
            for step in steps_in(self.fast):
                if step < newest:
                    _delete(self.fast / step_name(step))

    def clean(self) -> None:
        """Delete the remains of interrupted writes."""
        self.check()
        for folder in self.folders:
            for left_over in folder.iterdir() if folder.is_dir() else ():
                if left_over.name.startswith((_TEMPORARY, REPLACED)):
                    shutil.rmtree(left_over, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that a partly deleted folder never counts
    shutil.rmtree(checkpoint, ignore_errors=True)


#: Time limit for writing or reading a checkpoint: this many times the newest one's writing time, at least 15 min.
_PATIENCE, _SHORTEST_LIMIT_S = 4.0, 900.0
#: Assumed speed until a checkpoint was written: slower than any storage that is used for training.
_ASSUMED_BYTES_PER_S = 100e6
#: Without steps: a run has millions of them.
_KINDS = {
    "checkpoint_committed",
    "checkpoint_verified",
    "checkpoint_survived",
    "checkpoint_rejected",
    "checkpoint_deleted",
    "corruption_checked",
    "milestone",
    "head_started",
    "eval_taken",
    "eval_finished",
    "eval_failed",
    "eval_stopped",
}


class CheckpointRecords:
    """The state of a run's checkpoints.

    The training thread may call :meth:`begin`, :meth:`healthy_step` and :meth:`note` while another thread uses the
    rest.
    """

    def __init__(self, config: Config, run: RunPaths, tiers: Tiers, journal: JournalWriter | None) -> None:
        self._config, self._run, self._tiers, self._journal = config, run, tiers, journal
        self._policy = CheckpointPolicy(config)
        self._tail, self._state = JournalTail(run, wanted=no_steps), RunState()
        self._manifests: dict[int, str] = {}
        self._rejected: set[int] = set()
        self._counting = threading.Lock()
        self._healthy_steps = 0
        self._begun_at: dict[int, int] = {}  # by step, the number of healthy steps before its checkpoint
        self._verified: set[int] = set()
        self._bytes_per_s: float | None = None  # writing speed of the newest checkpoint

    def reconfigure(self, config: Config) -> None:
        """Apply a new policy, while another thread may use the records."""
        self._config, self._policy = config, CheckpointPolicy(config)

    def note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Journal an event."""
        if self._journal:
            self._journal.append(kind, durable=durable, **fields)

    def limit_s(self) -> float:
        """Return how long writing or reading a checkpoint may take, from the speed of the newest that was written.

        A fast folder's speed says nothing about the run directory, which is read and written too.
        """
        rate = _ASSUMED_BYTES_PER_S if self._tiers.fast else self._bytes_per_s or _ASSUMED_BYTES_PER_S
        return max(_SHORTEST_LIMIT_S, _PATIENCE * checkpoint_bytes(self._config) / rate)

    def start(self) -> None:
        """Delete the remains of interrupted writes, and read the journal."""
        self._tiers.clean()
        self._read_journal()

    def candidates(self, max_step: int | None = None) -> Iterator[tuple[int, Path]]:
        """Yield step and folder of each checkpoint of this run, newest first, up to ``max_step``. Nothing is verified.

        0: none, so the run begins again.

        Raises a CheckpointError if checkpoints were committed, and no further one can be tried.
        """
        for step, folder in self._tiers.copies():
            if max_step is not None and step > max_step:
                continue
            if folder.parent != self._tiers.fast or self._is_ours(step, folder):
                yield step, folder
        self._read_journal()
        committed = sorted({*self._manifests, *self._rejected})
        if committed and max_step != 0:
            raise CheckpointError(
                f"{self._tiers.shared}: no valid checkpoint, although steps {committed} were written; the run does "
                "not start over by itself",
                hint="restore the folder from a copy, or start a new run",
            )

    def chosen(self, step: int) -> None:
        """Count the finite steps after a checkpoint that training continues from, unless enough followed it before."""
        if self._state.trust.get(step) != "survived":
            self.begin(step)

    def begin(self, step: int) -> None:
        """Count the finite steps after a checkpoint from now on."""
        with self._counting:
            self._begun_at[step] = self._healthy_steps

    def committed(self, step: int, manifest_sha256: str) -> None:
        """Journal that a checkpoint has been renamed."""
        self._rejected.discard(step)
        self._verified.discard(step)  # of an earlier checkpoint of that step, before a rollback
        self._state.trust.pop(step, None)
        self.note("checkpoint_committed", durable=True, step=step, manifest_sha256=manifest_sha256)

    def is_verified(self, step: int) -> bool:
        """Return whether a checkpoint was read again, by this attempt or an earlier one, and found valid."""
        return step in self._verified or self._state.trust.get(step) in ("verified", "survived")

    def may_be(self, step: int, is_of: Callable[[str], bool]) -> bool:
        """Return whether a copy belongs to this run: every commit is in the journal, unless the journal is lost.

        ``is_of`` returns whether the copy has the manifest with this SHA-256.
        """
        return not self._manifests or (step in self._manifests and is_of(self._manifests[step]))

    def written(self, *, size_bytes: int, wall_s: float, **fields: Any) -> None:
        """Journal that all files of a checkpoint are written."""
        self._bytes_per_s = size_bytes / wall_s
        self.note("checkpoint_written", bytes=size_bytes, wall_s=wall_s, **fields)

    def examined(self, step: int, folder: Path, reason: str | None) -> None:
        """Journal the result of a verification: why the checkpoint is invalid, or None."""
        if reason is not None:
            self._rejected.add(step)
            self._verified.discard(step)
            self.note("checkpoint_rejected", durable=True, step=step, path=os.fspath(folder), reason=reason)
            return
        self._rejected.discard(step)
        self._verified.add(step)
        self.note("checkpoint_verified", durable=True, step=step, path=os.fspath(folder))
        self._note_survivors()  # training continued during the verification

    def healthy_step(self) -> None:
        """Count a finite step, and journal the verified checkpoints that have survived."""
        with self._counting:
            self._healthy_steps += 1
        self._note_survivors()

    def delete_unneeded(self) -> None:
        """Delete rejected checkpoints, and those that ``CheckpointPolicy.to_delete`` returns."""
        self._delete(self._unneeded() | self._rejected)
        self._rejected.clear()

    def make_room(self, missing_bytes: int) -> bool:
        """Delete the oldest checkpoints that only ``checkpoint.keep`` protects, if that frees enough; else none.

        The newest checkpoint and the newest verified one stay, as all that evaluations, milestones or later runs need.
        """
        chosen, freed_bytes = set[int](), 0
        unneeded = self._unneeded(keep=1)
        verified = [step for step in steps_in(self._tiers.shared) if self.is_verified(step)]
        for step in sorted(step for step in unneeded if step < max(verified, default=0)):
            if freed_bytes >= missing_bytes:
                break
            with suppress(CheckpointError):
                freed_bytes += read_manifest(self._tiers.shared / step_name(step)).size_bytes
                chosen.add(step)
        if freed_bytes < missing_bytes:
            return False
        self._delete(chosen)
        return True

    def _unneeded(self, keep: int | None = None) -> set[int]:
        self._read_journal()
        steps = [step for step in steps_in(self._tiers.shared) if step not in self._rejected]
        verified = [step for step in steps if self._state.trust.get(step) in ("verified", "survived")]
        trusted = [step for step in verified if step <= (self._state.trusted_step or 0)]
        unneeded = self._policy.to_delete(steps, verified=verified, is_evaluated=self._is_evaluated, keep=keep)
        unneeded -= {*trusted[-1:]}
        for milestone in self._state.milestones.values():
            if unneeded:
                unneeded -= self._read_by_evaluators(milestone)
        return unneeded

    def _delete(self, steps: set[int]) -> None:
        for step in sorted(steps):
            with self._counting:
                self._begun_at.pop(step, None)
            self._tiers.delete(step)
            self.note("checkpoint_deleted", step=step)

    def _read_by_evaluators(self, milestone: MilestoneState) -> set[int]:
        """Return the checkpoints that evaluations of a milestone read, or will read.

        An amendment may have moved the milestones, but an announced one is still evaluated. Marks and links of
        `hlatctl eval` count while it or its job is alive: a killed one leaves them behind. The driver removes its own.
        Two evaluators share one mark, which a new driver removes, so each also links to what it reads.
        """
        run, tokens = self._run, milestone.milestone_tokens
        is_live = is_held(run.evaluator_lock) or is_held(run.eval_lease(tokens))
        is_awaited = not milestone.is_done or (is_live and milestone.taken_unix_s is not None)
        links = map(read_link, run.eval(tokens).glob("model*" if is_live else run.own_model(tokens).name))
        return {link.step for link in links if link} | ({milestone.step} if is_awaited else set())

    def _is_evaluated(self, milestone_tokens: int) -> bool:
        milestone = self._state.milestones.get(milestone_tokens)
        return milestone is not None and milestone.is_done

    def _is_ours(self, step: int, folder: Path) -> bool:
        """Return whether this run wrote a checkpoint on a node's disk; an earlier run may have had the same name."""
        try:
            return read_manifest(folder).sha256 == self._manifests.get(step)
        except CheckpointError:
            return step in self._manifests  # damaged: reject it with its reason

    def _note_survivors(self) -> None:
        with self._counting:
            for step, begun_at in list(self._begun_at.items()):
                enough = self._healthy_steps - begun_at >= self._config.checkpoint.survived_after_steps
                if enough and step in self._verified:
                    del self._begun_at[step]
                    self.note("checkpoint_survived", step=step)

    def _read_journal(self) -> None:
        for event in self._tail.stream():
            if event["kind"] in _KINDS:
                apply(self._state, event)
            if event["kind"] == "checkpoint_committed":
                self._manifests[event["step"]] = event["manifest_sha256"]
            if event["kind"] == "checkpoint_written" and event["wall_s"] > 0:
                self._bytes_per_s = event["bytes"] / event["wall_s"]


#: Size of a read, which begins once the data has reached storage. Two may remain when the file is complete: 7 % of a
#: shard of 70B on 2,048 ranks.
PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 8 << 20
_POLL_S = 0.05


class ReadBack:
    """Follows a file that another thread writes from beginning to end. Linux only; elsewhere it reads nothing.

    The file need not exist yet. It may be renamed once :meth:`written` was called.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path, self._digest = path, hashlib.sha256()
        self._written = threading.Event()
        self._result: str | None = None
        # A daemon thread, so that a process can exit while its storage doesn't answer.
        self._thread = threading.Thread(target=self._run, name="checkpoint-read-back", daemon=True)
        if hasattr(os, "posix_fadvise"):
            self._thread.start()

    def written(self) -> None:
        """Signal that the file is complete, or never will be."""
        self._written.set()

    def sha256(self) -> str | None:
        """Return a written file's SHA-256 once all of it was read back; None: it could not be read."""
        if self._thread.ident:
            self._thread.join()
        return self._result

    def _run(self) -> None:
        with suppress(OSError):  # the usual verification reads the file again and reports the error
            while not self._path.exists() and not self._written.wait(_POLL_S):
                pass
            self._follow(os.open(self._path, os.O_RDONLY))

    def _follow(self, descriptor: int) -> None:
        at = 0
        try:
            while True:
                is_whole = self._written.wait(_POLL_S)
                size = os.fstat(descriptor).st_size
                while size - at >= (1 if is_whole else PIECE_BYTES):
                    at = self._read(descriptor, at, min(size, at + PIECE_BYTES))
                if is_whole:
                    self._result = self._digest.hexdigest()
                    return
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, begin: int, end: int) -> int:
        """Read a block from storage, not from the page cache; return where it ended."""
        os.fdatasync(descriptor)  # pages that aren't on storage yet can't be dropped
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
        while begin < end:
            block = os.pread(descriptor, min(_BLOCK_BYTES, end - begin), begin)
            if not block:
                raise OSError(f"{self._path}: has become shorter")
            self._digest.update(block)
            begin += len(block)
        return begin


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the tensors of a checkpoint are stored.

    Args:
        suffix: of the files that contain tensors.
        number_of: returns the number of the process that wrote a file, from 1; None: it has no tensors.
        read_alone: raises an OSError or a ValueError if a file with tensors contradicts itself.
        why_incomplete: returns which tensor is not whole or not within its files, whose bytes are given; None: all are.
    """

    suffix: str
    number_of: Callable[[str], int | None]
    read_alone: Callable[[Path], object]
    why_incomplete: Callable[[Path, Mapping[str, int]], str | None]


_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def _dcp_number_of(name: str) -> int | None:
    match = _DCP_FILE.fullmatch(name)
    return int(match.group(1)) + 1 if match else None


def _dcp_why_incomplete(folder: Path, sizes: Mapping[str, int]) -> str | None:
    from trainer.checkpoint import dcp  # takes seconds

    return dcp.why_incomplete(folder, sizes)


#: By the names of :data:`hlatctl.run.checkpoint.INDEX_FILES`.
FORMATS = {
    "native": Format(
        suffix=SUFFIX,
        number_of=number_of,
        read_alone=read_header,
        why_incomplete=lambda folder, sizes: read_index(folder).why_incomplete(sizes),
    ),
    "dcp": Format(
        suffix=".distcp",
        number_of=_dcp_number_of,
        read_alone=lambda _path: None,  # only the index says what is in it
        why_incomplete=_dcp_why_incomplete,
    ),
}


class Verifier:
    """Verifies checkpoints. All ranks call :meth:`why_invalid` together."""

    def __init__(self, backend: Member, together: Together) -> None:
        self._backend, self._together = backend, together

    def why_invalid(
        self, folder: Path, *, of_run: bool = True, from_storage: bool = False, read_back: ReadBack | None = None
    ) -> str | None:
        """Return why a checkpoint is invalid, with the file's name; None if it is valid.

        Args:
            of_run: it is in a run's folder of checkpoints, so its name must match its step.
            from_storage: read the files from storage, not from the page cache. A start doesn't: it next reads from
                the page cache what it has verified.
            read_back: reads this rank's shard back; the shard is read again only if that failed or found a difference.
        """
        found = self._together.on_rank0(lambda: _list(folder, of_run=of_run))
        if found["reason"]:
            return str(found["reason"])
        mine = share(found["files"], self._backend.rank, self._backend.world_size)
        reasons = self._together.everywhere(lambda: _why_bad(folder, mine, read_back, from_storage=from_storage))
        reason = next(filter(None, reasons), None) or self._together.on_rank0(lambda: why_incomplete(folder))
        return None if reason is None else str(reason)


def share(entries: Iterable[dict[str, Any]], rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return the files that a rank verifies: the shard that it wrote, or loads after a start with the same layout."""
    return [entry for entry in entries if (_writer_of(entry["path"]) - 1) % world_size == rank]


def _writer_of(name: str) -> int:
    return next((number for form in FORMATS.values() if (number := form.number_of(name)) is not None), 1)


def why_unreadable(folder: Path, names: Iterable[str]) -> str | None:
    """Return the first JSON file or shard that can't be read as its type, as ``"name: reason"``; None if all can."""
    for name in names:
        try:
            if name.endswith(".json"):
                read_json(folder / name)
            for form in FORMATS.values():
                if name.endswith(form.suffix):
                    form.read_alone(folder / name)
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
    return None


def why_incomplete(folder: Path) -> str | None:
    """Return a tensor that the shards don't have, or a file that isn't in the manifest; None if there is none."""
    manifest = read_manifest(folder)
    sizes = {entry["path"]: entry["bytes"] for entry in manifest.files}
    name = manifest.format or "native"
    form, index = FORMATS[name], INDEX_FILES[name]
    for path in (*sorted(folder.glob(f"*{form.suffix}")), folder / index):
        if path.name not in sizes and path.exists():  # it would be read too
            return f"{path.name}: not in the manifest"
    try:
        return form.why_incomplete(folder, sizes)
    except CheckpointError as error:
        return error.message
    except DAMAGED as error:
        return f"{index}: {why(error)}"


def drop_cached_pages(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from storage; only on Linux."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _list(folder: Path, *, of_run: bool) -> dict[str, Any]:
    reason = why_invalid(folder, checksums=False, of_run=of_run)
    return {"reason": reason, "files": [] if reason else read_manifest(folder).files}


def _why_bad(
    folder: Path, entries: list[dict[str, Any]], read_back: ReadBack | None, *, from_storage: bool
) -> str | None:
    came_back = (read_back.name, read_back.sha256()) if read_back else None
    unread = [entry for entry in entries if (entry["path"], entry["sha256"]) != came_back]
    for entry in unread:
        if from_storage:
            drop_cached_pages(folder / entry["path"])
    return files.first_difference(folder, unread) or why_unreadable(folder, [entry["path"] for entry in entries])
