"""How far each checkpoint is trusted, and which are deleted; rank 0's business alone.

A checkpoint is written (under a temporary name), committed (whole, renamed), verified (read again: checksums equal and
every tensor loads) and has survived (healthy steps came after it). Each degree is an event, and what this module knows
it has from the journal: an attempt goes on with what the one before it knew.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from conf.schema import Config
from conf.training_rules import CheckpointPolicy
from hlatctl.run.errors import CheckpointError
from hlatctl.run.fold import apply
from hlatctl.run.journal import JournalTail, JournalWriter
from hlatctl.run.manifest import read_manifest, steps_in, why_invalid
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState
from trainer.checkpoint.tiers import Tiers
from trainer.storage import why_not_loadable

#: Steps are left out: a run has millions of them.
_KINDS = {
    "checkpoint_committed",
    "checkpoint_verified",
    "checkpoint_survived",
    "checkpoint_rejected",
    "checkpoint_deleted",
    "milestone",
    "eval_finished",
}


class CheckpointRecords:
    """What is known of a run's checkpoints.

    The training thread may call :meth:`begun`, :meth:`healthy_step` and :meth:`note` while another uses the rest.

    Args:
        config: of the run.
        run: its directory.
        tiers: where the checkpoints lie.
        journal: to write to.
    """

    def __init__(self, config: Config, run: RunPaths, tiers: Tiers, journal: JournalWriter | None) -> None:
        self._config, self._run, self._tiers, self._journal = config, run, tiers, journal
        self._policy = CheckpointPolicy(config)
        self._tail, self._state = JournalTail(run), RunState()
        self._manifests: dict[int, str] = {}
        self._rejected: set[int] = set()
        self._counting = threading.Lock()
        self._healthy_steps = 0
        self._begun_at: dict[int, int] = {}  # healthy steps that came before a checkpoint, by its step
        self._verified: set[int] = set()

    def note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Journal an event."""
        if self._journal:
            self._journal.append(kind, durable=durable, **fields)

    def choose(self, max_step: int | None = None) -> tuple[int, str] | None:
        """Step and folder of the newest valid checkpoint, its nearest copy first; None if none was ever committed.

        Args:
            max_step: newer ones are passed over (a walk back).

        Raises:
            CheckpointError: there were some, and none is valid.
        """
        self._tiers.clean()
        self._read_journal()
        for step, folder in self._tiers.copies():
            if max_step is not None and step > max_step:
                continue
            if folder.parent == self._tiers.fast and not self._is_ours(step, folder):
                continue
            if self._examine(step, folder):
                if self._state.trust.get(step) != "survived":
                    self.begun(step)
                return step, os.fspath(folder)
        self._read_journal()
        committed = sorted({*self._manifests, *self._rejected})
        if committed:
            raise CheckpointError(
                f"{self._tiers.shared}: no valid checkpoint, though steps {committed} were written; the run will not "
                "silently begin again",
                hint="bring the folder back from a copy, or start a new run",
            )
        return None

    def begun(self, step: int) -> None:
        """A checkpoint has been taken: the healthy steps after it count from here."""
        with self._counting:
            self._begun_at[step] = self._healthy_steps

    def committed(self, step: int, manifest_sha256: str) -> None:
        """A checkpoint has its name."""
        self._rejected.discard(step)
        self.note("checkpoint_committed", durable=True, step=step, manifest_sha256=manifest_sha256)

    def verify(self, step: int, folder: Path) -> None:
        """Read a checkpoint again, where it lies in the run directory."""
        _forget_pages(folder)
        if self._examine(step, folder):
            self._tiers.keep_near(step)

    def healthy_step(self) -> None:
        """A step was finite: every verified checkpoint that has seen enough of them has survived."""
        with self._counting:
            self._healthy_steps += 1
        self._note_survivors()

    def delete_unwanted(self) -> None:
        """Remove what is not among the newest few, is not permanent and waits for no evaluation.

        Rejected ones go whatever their age; the newest that was verified always stays.
        """
        self._read_journal()
        steps = [step for step in steps_in(self._tiers.shared) if step not in self._rejected]
        verified = [step for step in steps if self._state.trust.get(step) in ("verified", "survived")]
        unneeded = self._policy.to_delete(steps, verified=verified, is_evaluated=self._is_evaluated)
        for step in sorted(unneeded | self._rejected):
            with self._counting:
                self._begun_at.pop(step, None)
            self._tiers.delete(step)
            self.note("checkpoint_deleted", step=step)
        self._rejected.clear()

    def _is_evaluated(self, milestone_tokens: int) -> bool:
        milestone = self._state.milestones.get(milestone_tokens)
        return milestone is not None and milestone.status == "evaluated"

    def _examine(self, step: int, folder: Path) -> bool:
        reason = why_invalid(folder) or why_not_loadable(folder, [file["path"] for file in read_manifest(folder).files])
        if reason is not None:
            self._rejected.add(step)
            self._verified.discard(step)
            self.note("checkpoint_rejected", durable=True, step=step, path=os.fspath(folder), reason=reason)
            return False
        self._rejected.discard(step)
        self._verified.add(step)
        self.note("checkpoint_verified", durable=True, step=step, path=os.fspath(folder))
        self._note_survivors()  # steps may have gone on while it was read
        return True

    def _is_ours(self, step: int, folder: Path) -> bool:
        """A copy on a node's disk may be of a run that had the same name before: the journal names ours."""
        try:
            return read_manifest(folder).sha256 == self._manifests.get(step)
        except CheckpointError:
            return step in self._manifests  # damaged: examined, and rejected with its reason

    def _note_survivors(self) -> None:
        with self._counting:
            for step, begun_at in list(self._begun_at.items()):
                enough = self._healthy_steps - begun_at >= self._config.checkpoint.survived_after_steps
                if enough and step in self._verified:
                    del self._begun_at[step]
                    self.note("checkpoint_survived", step=step)

    def _read_journal(self) -> None:
        for event in self._tail.read_new():
            if event["kind"] in _KINDS:
                apply(self._state, event)
            if event["kind"] == "checkpoint_committed":
                self._manifests[event["step"]] = event.get("manifest_sha256", "")


def _forget_pages(folder: Path) -> None:
    """Have what was just written read from the storage, and not from memory, where the system lets us ask for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
