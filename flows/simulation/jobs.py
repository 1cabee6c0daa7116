"""What the jobs of a simulated cluster do: scripts with pauses on its clock, which write files of the real form.

In the script of a training attempt, one event stands for many steps. Steps at checkpoints and at the ends of attempts
always have an event of their own, so that a step counts or is lost as a whole. The numbers of steps are typical ones
with noise, not a prediction.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

from conf.environment import cache_variable
from conf.schema import Config, SimulationConfig
from conf.sizes import checkpoint_bytes, flops_per_token, parameters
from conf.training_rules import (
    BLOCKING,
    EXIT_CODES,
    REQUIRED,
    CheckpointPolicy,
    Outcome,
    SaveReason,
    learning_rate,
    next_corruption_check,
)
from flows.launch.base import Job
from flows.simulation.cluster import KILLED, TRAIN, Fault, JobScript, Script, SimulatedCluster
from hlatctl.cache.store import MANIFEST as CACHE_MANIFEST
from hlatctl.plan.step_time import corruption_check_cost_steps, step_time_s
from hlatctl.run import files, memory
from hlatctl.run.checkpoint import MANIFEST, Manifest, checkpoint_steps
from hlatctl.run.contract import SIMULATED
from hlatctl.run.errors import DISK_FULL, NONFINITE, HlatctlError, PreflightError, StorageError, TrainingError
from hlatctl.run.fold import read_state
from hlatctl.run.journal import eval_writer, train_writer
from hlatctl.run.paths import RunPaths, step_name

#: The final loss: E + A / N^a + B / D^b for N parameters and D tokens (Chinchilla, arXiv 2203.15556, equation 10).
_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28
#: That law is for large models; a small model's loss ends at this fraction of the loss of guessing, or below.
_MOST_OF_GUESSING = 0.45
#: The loss falls from that of guessing by a power of the steps.
_DECAY, _DECAY_STEPS = 0.5, 10.0
_NOISE = 0.004
_BEST_RATE, _RATE_WEIGHT, _SEED_WEIGHT = 3e-3, 0.2, 0.01


class Curves:
    """The numbers of each step of a run, with noise from ``random_numbers``."""

    def __init__(self, config: Config, random_numbers: random.Random) -> None:
        self._config, self._random = config, random_numbers
        self._parameters = parameters(config.model).total

    def step(self, step: int) -> dict[str, Any]:
        """Return loss, norms and learning rate of an optimizer step."""
        config, noise = self._config, self._random.gauss(0.0, 1.0)
        warmth = math.exp(-step / max(20.0, 0.2 * config.warmup_steps))
        progress = step / config.total_steps
        return {
            "loss": self.loss(step) * (1 + _NOISE * noise),
            "grad_norm": (0.22 + 0.1 / math.sqrt(step) + 2.5 * warmth) * math.exp(0.08 * self._random.gauss(0.0, 1.0)),
            "param_norm": self._first_norm * (1 + 0.9 * math.sqrt(progress) - 0.25 * progress),
            "lr": learning_rate(step, config),
        }

    def loss(self, step: int) -> float:
        """Return the loss without noise, in nats per token."""
        guessing = math.log(self._config.model.vocab_size)
        law = (
            self._misfit + _E + _A / float(self._parameters) ** _ALPHA + _B / float(self._config.total_tokens) ** _BETA
        )
        last = min(law, _MOST_OF_GUESSING * guessing) + self._misfit
        return float(last + (guessing - last) * (1 + step / _DECAY_STEPS) ** -_DECAY)

    @property
    def _misfit(self) -> float:
        """Makes the arms of a simulated sweep differ: one learning rate is best, and seeds differ a little."""
        config = self._config
        return _RATE_WEIGHT * math.log10(config.optimizer.lr / _BEST_RATE) ** 2 + _SEED_WEIGHT * math.sin(config.seed)

    @property
    def _first_norm(self) -> float:
        return float(self._config.model.initializer_range) * math.sqrt(self._parameters)


#: Model FLOP/s of one process if the plan doesn't know the hardware: one core of a common CPU.
_UNKNOWN_FLOPS_PER_S = 20e9


def _planned_step_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds of one step on healthy nodes: as configured, or as planned, or for a common CPU."""
    planned_s = settings.step_s or step_time_s(config)
    if planned_s is not None:
        return planned_s
    flops = flops_per_token(config.model, config.train.seq_len) * config.tokens_per_step
    return flops / (config.world_size * _UNKNOWN_FLOPS_PER_S)


def _save_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds in which a checkpoint is copied to the shared storage, or read: one replica sends it on."""
    return checkpoint_bytes(config) / settings.storage_bytes_per_s


def _stall_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds that training waits for a checkpoint: for the copy to host memory, or for the files."""
    if config.checkpoint.mode == "sync":
        return _save_s(config, settings)
    return _share_s(config, settings)


def _share_s(config: Config, settings: SimulationConfig) -> float:
    """Return the seconds in which each node copies its share of a checkpoint to host memory, or from there."""
    return checkpoint_bytes(config) / config.cluster.nodes / settings.host_copy_bytes_per_s


def _groups_s(ranks: int) -> float:
    """Return the part of a start in which rank 0 meets the others (docs/performance.md, "A restart at 2,048 ranks").

    Measured: 0.34 ms a rank in the store, and 0.2 s of rank 0 with 256 ranks, growing with the power of 1.5.
    """
    return 0.34e-3 * ranks + 0.2 * math.pow(ranks / 256, 1.5)


def write_checkpoint(run: RunPaths, config: Config, step: int) -> tuple[Path, Manifest]:
    """Write a checkpoint, without fsync; return its folder and manifest."""
    folder, temporary = run.checkpoint(step), run.checkpoints / f".tmp-{step_name(step)}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    (temporary / "simulated.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    manifest = Manifest(
        step=step,
        tokens=config.tokens_at(step),
        files=files.describe_tree(temporary),
        world={"data_parallel_size": config.data_parallel_size},
    )
    record = {**asdict(manifest), "sha256": manifest.sha256}
    (temporary / MANIFEST).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder, manifest


_SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  host      : {host}
  exitcode  : {exitcode} (pid: 4242)
============================================================
"""
_ABORTED, _FAILED = -6, 1


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a job leaves: its exit code, the end of its log, its error, and the host that was cut off.

    Logs have the real traces of torchrun, the kernel and the trainer, so that a dry run tests
    ``flows.recovery.failure_causes``.
    """

    exit_code: int
    log: str = ""
    error: HlatctlError | None = None
    lost: str = ""


def _broken_device(host: str) -> Evidence:
    """Return the evidence of a failed device: the runtime names it, and aborts its process."""
    log = f"[rank0]: RuntimeError: [{host}] nrt_execute status=1201 (simulated)\n"
    return Evidence(exit_code=1, log=log + _SUMMARY.format(host=host, exitcode=_ABORTED))


def _killed(host: str) -> Evidence:
    """Return the evidence of a process that something has killed: torchrun names its host."""
    return Evidence(exit_code=1, log=_SUMMARY.format(host=host, exitcode=-SIGKILL))


def _collective_timeout(host: str) -> Evidence:
    """Return the evidence of a collective's time-out; torchrun names the process that failed first."""
    log = f"[rank0]: RuntimeError: [{host}] Timed out waiting 300000ms for recv operation to complete\n"
    return Evidence(exit_code=1, log=log + _SUMMARY.format(host=host, exitcode=_FAILED))


def _disk_full(run: RunPaths, step: int, needed_bytes: int) -> Evidence:
    """Return the evidence of a required checkpoint that doesn't fit on the disk."""
    error = StorageError(
        f"{run.checkpoint(step)}: needs {needed_bytes} bytes, 0 are free",
        hint="free space, then resume the run",
        code=DISK_FULL,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def _not_finite(step: int) -> Evidence:
    """Return the evidence of a step that is not finite."""
    error = TrainingError(
        f"step {step}: loss=nan, grad_norm=nan: not finite; the parameters are not updated with it",
        hint="lower optimizer.lr, or look at the steps before it in the journal",
        code=NONFINITE,
    )
    return Evidence(exit_code=error.exit_code, error=error)


def _unfit(host: str, more: int) -> Evidence:
    """Return the evidence of a preflight that rejected a host and ``more`` others."""
    others = f"; and {more} more" if more else ""
    error = PreflightError(f"worker {host}: {_UNFIT}{others}", hint="repair or replace the worker, or change the limit")
    return Evidence(exit_code=error.exit_code, error=error)


#: The failed check of a rejected host.
_UNFIT = "its device does not answer (simulated)"


_MAX_CHECKPOINT_STEP = "--max-checkpoint-step"
#: How often a hung job wakes the flow: so many times until the silence has lasted too long, and after this time.
_HANG_POLLS, _HANG_POLL_S = 100, 5.0


class _EndedError(Exception):
    """The attempt ends by itself."""

    def __init__(self, end: Evidence) -> None:
        super().__init__(end.exit_code)
        self.end = end


class Training:
    """One attempt of a job on a simulated cluster."""

    def __init__(self, cluster: SimulatedCluster, job: Job) -> None:
        self._cluster, self._job, self._clock = cluster, job, cluster.clock
        self._config, self._settings = cluster.config, cluster.settings
        self._step_s = _planned_step_s(self._config, self._settings)
        self._attempt = int(job.argv[job.argv.index("--attempt") + 1])
        self._hosts = cluster.hosts_for(job)
        self._curves = Curves(self._config, cluster.random(f"curves/{self._attempt}"))
        self._step, self._since_s, self._over = 0, 0.0, False
        self._checkpoints = checkpoint_steps(cluster.run)
        #: Steps between two copies in memory, each of which has an event; 0: there are none.
        self._copy_steps = self._config.checkpoint.memory_every_steps or 0
        thinning = -(-self._config.total_steps // (self._settings.step_events or self._config.total_steps))
        self._thinning = -(-thinning // max(1, self._copy_steps)) * max(1, self._copy_steps)

    def script(self) -> Script:
        """Return the script."""
        self._journal = self._cluster.journal(train_writer(0), self._attempt)
        try:
            end = yield from self._attempt_end()
        finally:
            self._over = True
            self._journal.close()
        self._cluster.end_with(self._job, end.log, end.error, end.lost)
        return int(end.exit_code)

    def _attempt_end(self) -> Any:
        script = self._whole_attempt()
        while True:
            try:
                return (yield from script)
            except Fault as fault:  # during the end of an earlier fault, a later one replaces it
                script = self._end_by(fault)
            except _EndedError as ended:
                return ended.end

    def _whole_attempt(self) -> Any:
        yield from self._begin()
        yield from self._check()
        yield from self._train()
        return (yield from self._stopped("finished" if self._step >= self._config.total_steps else "amend"))

    def _begin(self) -> Any:
        wait_s = max(0.0, self._cluster.no_nodes_until_s - self._clock.now_unix_s())
        is_warm = self._settings.warm_start_s is not None and self._cluster.takes_over(self._job)
        start_s = float(self._settings.warm_start_s or 0.0) if is_warm else self._settings.start_s
        yield from self._pause(wait_s + start_s)
        if limit_s := self._settings.time_limit_s:
            process = self._cluster.process(os.fspath(self._job.launch_dir), self._job.name)
            assert process is not None
            asked_s = self._clock.now_unix_s() - start_s + limit_s
            self._clock.at(asked_s, partial(process.inject, Fault("upgrade", "")))
        broken = self._cluster.broken_among(self._hosts)
        if broken:
            raise _EndedError(_broken_device(broken[0]))
        saved, copied = self._checkpoint(), self._in_memory()
        self._step = self._first = max(saved, copied)
        self._config = self._config.during(self._first + 1)
        self._step_s, self._policy = _planned_step_s(self._config, self._settings), CheckpointPolicy(self._config)
        loads_from_s = self._clock.now_unix_s()
        load_s = self._settings.load_s
        if load_s is None:
            load_s = _save_s(self._config, self._settings) if self._first else 0.0
        if copied:
            load_s = _share_s(self._config, self._settings)
        yield from self._pause(load_s)
        if self._first and not copied:
            path = os.fspath(self._cluster.run.checkpoint(self._first))
            self._journal.append("checkpoint_verified", step=self._first, path=path)
        stage = self._config.stage_at(self._first + 1)
        if stage and stage.after_step == self._first:
            self._journal.append("training_stage_started", name=stage.name, number=stage.number, step=self._first + 1)
        groups_s = self._settings.groups_s
        self._journal.append(
            "train_started",
            resumed_from_step=self._first,
            tokens=self._config.tokens_at(self._first),
            world=self._config.world_size,
            device="simulated",
            device_name="",
            parameters=parameters(self._config.model).total,
            peak_flops_per_s=None,
            groups_s=min(_groups_s(self._config.world_size) if groups_s is None else groups_s, start_s),
            load_s=self._clock.now_unix_s() - loads_from_s,
            warm=is_warm,
            restored_from="memory" if copied else "storage" if self._first else "nothing",
        )

    def _in_memory(self) -> int:
        """Return the step that the nodes have in memory, if the attempt may continue from there; 0: none."""
        copied, run = self._cluster.copied, self._cluster.run
        if copied is None or _MAX_CHECKPOINT_STEP in self._job.argv:
            return 0
        (attempt, step), newest = copied, self._checkpoint()
        last = min(memory.usable(read_state(run), self._attempt).get(attempt, 0), self._lasting(newest) - 1)
        return step if newest < step <= last else 0

    def _lasting(self, step: int) -> int:
        return CheckpointPolicy(self._config).next_lasting(step)

    def _checkpoint(self) -> int:
        """Return the step of the checkpoint to load; 0: none."""
        argv, total = self._job.argv, self._config.total_steps
        newest = int(argv[argv.index(_MAX_CHECKPOINT_STEP) + 1]) if _MAX_CHECKPOINT_STEP in argv else total
        return max((step for step in self._checkpoints if step <= newest), default=0)

    def _train(self) -> Any:
        total, dies_after = self._config.total_steps, self._dies_after()
        while self._step < total:
            target = min(self._next_event(), dies_after or total)
            step_s = self._step_s * self._cluster.slowdown(self._hosts)
            if self._step == self._first and self._settings.first_step_s is not None:
                step_s = self._settings.first_step_s
            self._since_s = self._clock.now_unix_s()
            try:
                yield (target - self._step) * (step_s + self._between_s)
            except Fault as fault:
                self._catch_up(target, step_s)
                if not self._survives(fault):
                    raise
                continue
            self._catch_up(target, step_s, whole=True)
            if next_corruption_check(self._config, self._step) == self._step:
                yield from self._check()
            pauses = self._pauses()
            reason = self._policy.reason_to_save(self._step, stopping=pauses)
            if reason:
                yield from self._save(reason)
            if pauses or self._config.ends_stage(self._step):
                return
            if self._step == dies_after:
                yield from self._pause(self._settings.detect_s)
                raise _EndedError(Evidence(exit_code=KILLED))

    @property
    def _between_s(self) -> float:
        """Seconds between two steps, with the time that a copy to memory takes of each."""
        copy_s = _share_s(self._config, self._settings) / self._copy_steps if self._copy_steps else 0.0
        return self._settings.between_steps_s + copy_s

    def _pauses(self) -> bool:
        """Return whether the attempt ends at this milestone, as the driver orders a real trainer to do."""
        milestone_tokens = self._config.milestones.get(self._step)
        if self._config.eval_placement != "between" or milestone_tokens is None:
            return False
        return not (self._cluster.run.eval(milestone_tokens) / "results.json").is_file()

    def _dies_after(self) -> int | None:
        """Return the step after which a dry run demonstrates a recovery; None: it doesn't."""
        stage = self._config.stage_at(self._first + 1)
        last = stage.last_step if stage else self._config.total_steps
        shows = self._settings.shows_recovery and self._attempt == 1 and last > self._first + 1
        return (self._first + last) // 2 if shows else None

    def _next_event(self) -> int:
        step = self._step
        if step == self._first:
            return step + 1
        check = next_corruption_check(self._config, step + 1) or self._config.total_steps
        return min((step // self._thinning + 1) * self._thinning, self._policy.next_save(step), check)

    def _check(self) -> Any:
        """Compare the processes, if ``recovery.corruption_check_steps`` is set: hosts with wrong numbers are found."""
        if self._config.recovery.corruption_check_steps is None:
            return
        wall_s = self._step_s * corruption_check_cost_steps(self._config)
        yield from self._pause(wall_s)
        hosts = [host for host in self._hosts if host in self._cluster.wrong]
        if not hosts:
            self._journal.append("corruption_checked", step=self._step, wall_s=wall_s)
            return
        ranks = [self._hosts.index(host) * self._config.cluster.processes_per_node for host in hosts]
        message = f"rank {ranks[0]} on {hosts[0]} computed different outputs from the same tokens (simulated)"
        self._journal.append(
            "corruption_suspected",
            step=self._step,
            part="forward",
            ranks=ranks,
            hosts=hosts,
            devices=["simulated"] * len(hosts),
            blamed_hosts=hosts,
            difference=0.0,
            repeatable=True,
            message=message,
        )
        for host in hosts:
            self._cluster.take_out(host)
        error = TrainingError(f"after step {self._step}: {message}", hint="the run continues without the node")
        raise _EndedError(Evidence(exit_code=error.exit_code, error=error))

    def _catch_up(self, target: int, step_s: float, *, whole: bool = False) -> None:
        spent_s, each_s = self._clock.now_unix_s() - self._since_s, step_s + self._between_s
        reached = target if whole else self._step + int(spent_s / each_s)
        copied = reached - reached % self._copy_steps if self._copy_steps else 0
        if copied > self._step:
            self._note_steps(copied - self._step, step_s)
            self._cluster.copied = (self._attempt, copied)
        self._note_steps(reached - self._step, step_s)

    def _note_steps(self, made: int, step_s: float) -> None:
        if not made:
            return
        self._step += made
        many: dict[str, Any] = {"steps": made} if made > 1 else {}
        self._journal.append(
            "step",
            step=self._step,
            tokens=self._config.tokens_at(self._step),
            **self._curves.step(self._step),
            step_s=step_s,
            data_wait_s=self._settings.data_wait_s,
            tokens_per_s=self._config.tokens_per_step / step_s,
            **many,
        )
        if self._step == self._first + 1 and self._config.backend.compile:
            self._journal.append("compile_cache", hits=0, misses=0, wall_s=step_s)
        if self._step == self._first + 1 or self._cluster.notifies_steps:
            self._clock.notify(TRAIN)

    def _save(self, reason: SaveReason) -> Any:
        step, began_s = self._step, self._clock.now_unix_s()
        if self._cluster.disk_full_until_s > began_s and not (reason in REQUIRED and self._makes_room(step)):
            self._leave_out(step, reason)
            return
        stall_s, save_s = _stall_s(self._config, self._settings), _save_s(self._config, self._settings)
        if reason in BLOCKING:
            stall_s = save_s
        yield from self._pause(stall_s)
        commit = partial(self._commit, step, reason, save_s, stall_s)
        self._clock.at(began_s + max(save_s, stall_s), commit)
        if reason in BLOCKING:
            yield from self._pause(0.0)

    def _makes_room(self, step: int) -> bool:
        """Delete old checkpoints on the full disk, as the trainer does for a required one: it needs a little more."""
        old = self._deletable(keep=1)[:2]
        if len(old) < 2:
            return False
        message = f"step {step}: 0 bytes were free; old checkpoints are deleted for it"
        self._journal.append("alarm", step=step, what="disk_full", message=message)
        self._delete(old)
        return True

    def _deletable(self, keep: int | None = None) -> list[int]:
        run = self._cluster.run
        deleted = self._policy.to_delete(
            self._checkpoints,
            verified=self._checkpoints,
            is_evaluated=lambda milestone_tokens: (run.eval(milestone_tokens) / "results.json").is_file(),
            keep=keep,
        )
        return sorted(deleted)

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            shutil.rmtree(self._cluster.run.checkpoint(step), ignore_errors=True)
            self._checkpoints.remove(step)
            self._journal.append("checkpoint_deleted", step=step)

    def _leave_out(self, step: int, reason: SaveReason) -> None:
        needed_bytes = checkpoint_bytes(self._config)
        if reason in REQUIRED:
            raise _EndedError(_disk_full(self._cluster.run, step, needed_bytes))
        message = f"step {step}: the checkpoint needs {needed_bytes} bytes, 0 are free; it is left out"
        self._journal.append("alarm", step=step, what="disk_full", message=message)
        self._journal.append("checkpoint_skipped", step=step, reason="no room")

    def _commit(self, step: int, reason: SaveReason, save_s: float, stall_s: float) -> None:
        """Journal that a checkpoint is complete, if the attempt is still running."""
        if self._over:
            return
        run = self._cluster.run
        folder, manifest = write_checkpoint(run, self._config, step)
        self._checkpoints = sorted({*self._checkpoints, step})
        deleted = self._deletable()
        self._journal.append(
            "checkpoint_written",
            step=step,
            tokens=manifest.tokens,
            wall_s=save_s,
            stall_s=stall_s,
            reason=reason,
            bytes=checkpoint_bytes(self._config),
        )
        self._journal.append("checkpoint_committed", step=step, manifest_sha256=manifest.sha256)
        self._journal.append("checkpoint_verified", step=step, path=os.fspath(folder))
        self._delete(deleted)
        survived_s = self._config.checkpoint.survived_after_steps * self._step_s
        self._clock.at(self._clock.now_unix_s() + survived_s, partial(self._survived, step))
        self._clock.notify(TRAIN)

    def _survived(self, step: int) -> None:
        if not self._over and step in self._checkpoints:
            self._journal.append("checkpoint_survived", step=step)

    def _survives(self, fault: Fault) -> bool:
        """Apply a fault that doesn't end the attempt; return False for other faults."""
        if fault.host and fault.host not in self._hosts:
            return True  # on a spare host
        if fault.kind == "nan" and not self._step:
            return True  # nothing is computed yet
        if fault.kind == "nan" and self._config.train.on_nonfinite == "skip":
            self._note_nonfinite()
            return True
        if fault.kind != "straggler":
            return False
        slow_s = self._step_s * self._settings.straggler_factor * self._config.recovery.straggler_steps
        if fault.host in self._hosts:
            self._clock.at(self._clock.now_unix_s() + slow_s, partial(self._name_straggler, fault.host))
        return True

    def _name_straggler(self, host: str) -> None:
        if self._over or self._cluster.slowdown([host]) == 1.0:
            return
        ratio, rank = self._settings.straggler_factor, self._hosts.index(host) * self._config.cluster.processes_per_node
        message = f"rank {rank} on {host} takes {ratio:.2f} times as long as the median"
        self._journal.append(
            "straggler", step=self._step, rank=rank, host=host, device="simulated", ratio=ratio, message=message
        )

    def _end_by(self, fault: Fault) -> Any:
        """Simulate the end of the attempt by a fault, and return its evidence."""
        if fault.kind not in ("nan", "upgrade", "stop"):
            self._over = True  # nothing commits a checkpoint any more
        if fault.kind == "hardware":
            self._cluster.forget_copies()
        if fault.kind in ("hardware", "process"):
            yield from self._pause(self._settings.detect_s)
            return _broken_device(fault.host) if fault.kind == "hardware" else _killed(fault.host)
        if fault.kind == "node":
            yield from self._pause(self._settings.node_detect_s)
            return Evidence(exit_code=KILLED, lost=fault.host)
        if fault.kind == "collective_timeout":
            yield from self._silence(self._settings.collective_timeout_s)
            yield from self._pause(self._settings.detect_s)
            return _collective_timeout(fault.host)
        if fault.kind == "nan":
            return (yield from self._end_nonfinite())
        if fault.kind == "hang":
            yield from self._silence(math.inf)
        if self._step:  # a request to stop, or an upgrade of the cluster
            yield from self._save("stop")
        return (yield from self._stopped("stop"))

    def _silence(self, seconds: float) -> Any:
        """Let time pass without an event. The flow, which would poll, is woken often enough to end it as a hang."""
        until_s, recovery = self._clock.now_unix_s() + seconds, self._config.recovery
        poll_s = min(_HANG_POLL_S, max(recovery.hang_floor_s, recovery.hang_factor * self._step_s) / _HANG_POLLS)
        while (left_s := until_s - self._clock.now_unix_s()) > 0:
            yield from self._pause(min(left_s, poll_s))
            self._clock.notify(TRAIN)

    def _end_nonfinite(self) -> Any:
        self._note_nonfinite()
        if self._config.train.on_nonfinite != "rollback":
            yield from self._pause(self._settings.detect_s)
            return _not_finite(self._step + 1)
        self._journal.append(
            "data_changed", key="data.skip_steps", value=[self._step + 1], by="trainer", why="loss=nan, grad_norm=nan"
        )
        return (yield from self._stopped("rollback"))

    def _note_nonfinite(self) -> None:
        step = self._step + 1
        self._journal.append(
            "nonfinite",
            step=step,
            tokens=self._config.tokens_at(step),
            loss="nan",
            grad_norm="nan",
            action=self._config.train.on_nonfinite,
        )

    def _stopped(self, outcome: Outcome) -> Any:
        tokens = self._config.tokens_at(self._step)
        self._journal.append("train_stopped", step=self._step, tokens=tokens, reason=outcome)
        self._over = True
        yield from self._pause(self._settings.leave_s)
        return Evidence(exit_code=EXIT_CODES[outcome])

    def _pause(self, seconds: float) -> Any:
        """Let time pass, independently of slow hosts."""
        until_s = self._clock.now_unix_s() + seconds
        left_s = seconds
        while True:
            try:
                yield left_s
                return
            except Fault as fault:
                if not self._survives(fault):
                    raise
                left_s = max(0.0, until_s - self._clock.now_unix_s())


_ITEMS, _VALIDATION_TOKENS = 40, 65_536


def argument(job: Job, name: str) -> str:
    """Return the value of an option of a job's program."""
    return job.argv[job.argv.index(name) + 1]


def _preflight(cluster: SimulatedCluster, job: Job) -> Script:
    hosts = cluster.hosts_for(job)
    yield max(0.0, cluster.no_nodes_until_s - cluster.clock.now_unix_s()) + cluster.settings.preflight_s
    unfit = cluster.broken_among(hosts)
    workers = [
        {
            "host": host,
            "rank": number * cluster.config.cluster.processes_per_node,
            "failures": [_UNFIT] if host in unfit else [],
        }
        for number, host in enumerate(hosts)
    ]
    record = {"v": 1, "ok": not unfit, "simulated": True, "workers": workers, "unchecked": []}
    cluster.run.preflight.write_text(json.dumps(record) + "\n", encoding="utf-8")  # one line: thousands of nodes
    if not unfit:
        return 0
    end = _unfit(unfit[0], len(unfit) - 1)
    cluster.end_with(job, end.log, end.error)
    return end.exit_code


def _data(cluster: SimulatedCluster, job: Job) -> Script:
    config = cluster.config
    yield cluster.settings.prepare_data_s
    tokenizer = {"path": "", "vocab_size": config.model.vocab_size, "bos_id": 0, "eos_id": 1, "fingerprint": SIMULATED}
    files.write_json(
        Path(argument(job, "--to")) / "dataset.json",
        {
            "v": 1,
            "fingerprint": SIMULATED,
            "simulated": True,
            "text_column": config.data.text_column,
            "files": [],
            "documents": 0,
            "text_bytes": 0,
            "validation": {"path": "", "documents": 0, "text_bytes": 0},
            "tokenizer": tokenizer,
        },
    )
    return 0


def _compile(cluster: SimulatedCluster, job: Job) -> Script:
    yield cluster.settings.compile_s
    folder = Path(job.env[cache_variable(cluster.config)])
    if job.wrapper:  # its graphs are in folders by node
        for host in cluster.hosts_for(job):
            (folder / f"node-{host}" / "neuronxcc-simulated").mkdir(parents=True)
    files.write_json(folder / CACHE_MANIFEST, {"files": []})
    return 0


def _check_coverage(cluster: SimulatedCluster, job: Job) -> Script:
    yield cluster.settings.start_s
    files.write_json(cluster.run.coverage, {"v": 1, "simulated": True, "hits": 0, "misses": 0, "missing": []})
    return 0


def _warm_cache(cluster: SimulatedCluster, job: Job) -> Script:
    yield cluster.settings.warm_cache_s
    return 0


def _train(cluster: SimulatedCluster, job: Job) -> Script:
    return Training(cluster, job).script()


def _export(cluster: SimulatedCluster, job: Job) -> Script:
    yield _save_s(cluster.config, cluster.settings) * 4 / 3  # it also writes the weights, a third of a checkpoint
    files.write_json(Path(argument(job, "--to")) / "config.json", {"simulated": True})
    return 0


def _evaluate(cluster: SimulatedCluster, job: Job) -> Script:
    milestone_tokens, step = int(argument(job, "--milestone-tokens")), int(argument(job, "--step"))
    common: dict[str, Any] = {"milestone_tokens": milestone_tokens, "step": step}
    suite = cluster.config.eval.suite
    tasks = [f"{name}_simulated" for name in cluster.config.eval.groups or (suite,)]
    share = milestone_tokens / cluster.config.total_tokens
    score = {"metric": "acc", "value": 0.25 + 0.2 * share, "stderr": 0.07, "n": _ITEMS}
    loss = Curves(cluster.config, cluster.random("validation")).loss(step)
    validation = {"metric": "loss_nats_per_token", "value": loss, "stderr": 0.02, "n": _VALIDATION_TOKENS}
    started_s = cluster.clock.now_unix_s()
    with cluster.journal(eval_writer(milestone_tokens)) as journal:
        started: dict[str, Any] = {"contract": SIMULATED, "suite": suite, "tasks": tasks}
        started["try"] = int(argument(job, "--try"))
        journal.append("eval_started", **common, **started)
        for task in tasks:
            of_task: dict[str, Any] = {"milestone_tokens": milestone_tokens, "contract": SIMULATED, "task": task}
            journal.append("eval_task_started", **of_task)
            yield cluster.settings.evaluation_s / len(tasks)
            journal.append("eval_task_finished", **of_task, scores={task: score})
        wall_s = cluster.clock.now_unix_s() - started_s
        scores = {"validation_loss": validation, **dict.fromkeys(tasks, score)}
        files.write_sealed_json(
            cluster.run.eval(milestone_tokens) / "results.json",
            {
                "v": 1,
                **common,
                "suite": suite,
                "simulated": True,
                "versions": {},
                "contract": SIMULATED,
                "weights": argument(job, "--weights"),
                "scores": scores,
                "skipped": {},
                "wall_s": wall_s,
            },
        )
        journal.append("eval_finished", **common, scores=scores, skipped={}, wall_s=wall_s, contract=SIMULATED)
    return 0


#: What each kind of job does, by the first word of the job's name.
SCRIPTS: dict[str, JobScript] = {
    "preflight": _preflight,
    "data": _data,
    "compile": _compile,
    "warm": _warm_cache,
    "coverage": _check_coverage,
    "train": _train,
    "export": _export,
    "eval": _evaluate,
}


def simulated_cluster(run: RunPaths, config: Config) -> SimulatedCluster:
    """Return a new cluster for the jobs of a run."""
    return SimulatedCluster(run, config, SCRIPTS)
