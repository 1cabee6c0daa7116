"""The records of a run's checkpoints: degrees of trust, which is tried first, and deletion. Only rank 0 uses this.

A checkpoint is written (under a temporary name), committed (renamed), verified (read again: ``verify.py`` lists the
checks), and finally has survived (finite steps followed it). Each of these is an event. The state is read
from the journal, so an attempt continues with the state of the previous one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conf.schema import Config
from conf.sizes import checkpoint_bytes
from conf.training_rules import CheckpointPolicy
from hlatctl.run.errors import CheckpointError
from hlatctl.run.fold import apply
from hlatctl.run.journal import JournalTail, JournalWriter, no_steps
from hlatctl.run.lease import is_held
from hlatctl.run.manifest import read_manifest, steps_in
from hlatctl.run.model_link import read_link
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState, RunState
from trainer.checkpoint.tiers import Tiers

#: Time allowed for writing or reading a checkpoint: this many times what the newest took to write, and at least 15 min.
_PATIENCE, _SHORTEST_LIMIT_S = 4.0, 900.0
#: Until a checkpoint was written: slower than any storage for training.
_ASSUMED_BYTES_PER_S = 100e6
#: Without steps: a run has millions of them.
_KINDS = {
    "checkpoint_committed",
    "checkpoint_verified",
    "checkpoint_survived",
    "checkpoint_rejected",
    "checkpoint_deleted",
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
        self._begun_at: dict[int, int] = {}  # number of healthy steps before a checkpoint, by its step
        self._verified: set[int] = set()
        self._bytes_per_s: float | None = None  # at which the newest checkpoint was written

    def reconfigure(self, config: Config) -> None:
        """Take another policy, while another thread may use the records."""
        self._config, self._policy = config, CheckpointPolicy(config)

    def note(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Journal an event."""
        if self._journal:
            self._journal.append(kind, durable=durable, **fields)

    def limit_s(self) -> float:
        """Return how long writing or reading a checkpoint may take, from the speed of the newest that was written.

        That of a fast folder says nothing about the run directory, which is read and written too.
        """
        rate = _ASSUMED_BYTES_PER_S if self._tiers.fast else self._bytes_per_s or _ASSUMED_BYTES_PER_S
        return max(_SHORTEST_LIMIT_S, _PATIENCE * checkpoint_bytes(self._config) / rate)

    def start(self) -> None:
        """Delete the remains of interrupted writes, and read the journal."""
        self._tiers.clean()
        self._read_journal()

    def candidates(self, max_step: int | None = None) -> Iterator[tuple[int, Path]]:
        """Yield step and folder of each checkpoint of this run, newest first. Nothing is verified.

        Args:
            max_step: ignore newer checkpoints (after a walk back).

        Raises:
            CheckpointError: checkpoints were committed, and no further one can be tried.
        """
        for step, folder in self._tiers.copies():
            if max_step is not None and step > max_step:
                continue
            if folder.parent != self._tiers.fast or self._is_ours(step, folder):
                yield step, folder
        self._read_journal()
        committed = sorted({*self._manifests, *self._rejected})
        if committed:
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
        self._verified.discard(step)  # another one of that step was, in a course that was given up
        self._state.trust.pop(step, None)
        self.note("checkpoint_committed", durable=True, step=step, manifest_sha256=manifest_sha256)

    def is_verified(self, step: int) -> bool:
        """Return whether a checkpoint was read again, by this attempt or an earlier one, and found valid."""
        return step in self._verified or self._state.trust.get(step) in ("verified", "survived")

    def may_be(self, step: int, is_of: Callable[[str], bool]) -> bool:
        """Return whether a copy is one of this run's: every commit is journalled, unless the journal is lost.

        Args:
            step: of the copy.
            is_of: whether it has this manifest.
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
        self._note_survivors()  # training continued while it was read

    def healthy_step(self) -> None:
        """Count a finite step, and journal the verified checkpoints that have survived."""
        with self._counting:
            self._healthy_steps += 1
        self._note_survivors()

    def delete_unneeded(self) -> None:
        """Delete rejected checkpoints, and those that ``CheckpointPolicy.to_delete`` returns."""
        self._read_journal()
        steps = [step for step in steps_in(self._tiers.shared) if step not in self._rejected]
        verified = [step for step in steps if self._state.trust.get(step) in ("verified", "survived")]
        unneeded = self._policy.to_delete(steps, verified=verified, is_evaluated=self._is_evaluated)
        for milestone in self._state.milestones.values():
            if unneeded:
                unneeded -= self._read_by_evaluators(milestone)
        for step in sorted(unneeded | self._rejected):
            with self._counting:
                self._begun_at.pop(step, None)
            self._tiers.delete(step)
            self.note("checkpoint_deleted", step=step)
        self._rejected.clear()

    def _read_by_evaluators(self, milestone: MilestoneState) -> set[int]:
        """Return the checkpoints that evaluations of a milestone read, or will read.

        An amendment may have moved the milestones: one that was announced is still evaluated. Marks and links of
        `hlatctl eval` count while it, or its job, lives: a killed one leaves them behind. The driver removes its own.
        Two evaluators share one mark, and a new driver removes it, so what each of them reads is linked to.
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
                self._manifests[event["step"]] = event.get("manifest_sha256", "")
            if event["kind"] == "checkpoint_written" and event["wall_s"] > 0:
                self._bytes_per_s = event["bytes"] / event["wall_s"]
