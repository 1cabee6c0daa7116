"""The simulated cluster of one run: its hosts, jobs, failures and repairs, and the launcher of a dry run.

The cluster outlives a driver that dies. It learns about the run only from the run directory, and its jobs write files
of the real form there. A simulated job is a script with pauses on a virtual clock. In the script of a training attempt,
one event stands for many steps. Steps at checkpoints and at the ends of attempts always have an event of their own, so
that a step counts or is lost as a whole.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Generator, Sequence
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate
from pathlib import Path
from typing import Any, TypeAlias

from conf.environment import cache_variable
from conf.schema import Config
from conf.sizes import checkpoint_bytes, parameters
from conf.training_rules import BLOCKING, EXIT_CODES, REQUIRED, CheckpointPolicy, Outcome, SaveReason
from flows.launch.base import Handle, Job, Launcher, Plan, Status
from flows.launch.local import LocalLauncher
from flows.runtime.clock import VirtualClock
from flows.simulation import draws, evidence
from flows.simulation.checkpoints import Kept
from flows.simulation.draws import Curves, Failure, Failures
from flows.simulation.evidence import Evidence
from hlatctl.cache.store import MANIFEST
from hlatctl.run import files
from hlatctl.run.contract import SIMULATED
from hlatctl.run.errors import HlatctlError, LaunchError, PreflightError, StorageError, TrainingError, dump_error
from hlatctl.run.fold import read_state
from hlatctl.run.journal import JournalWriter, eval_writer, train_writer
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import RunState

#: Yields the seconds to pause; returns the exit code.
Script: TypeAlias = Generator[float, None, int]

KILLED = 137


class Fault(Exception):
    """A failure of a job, or a request to stop; raised inside its script, where it pauses.

    Args:
        kind: kind of the failure, or ``stop``.
        host: host of the failure; empty: no host.
    """

    def __init__(self, kind: str, host: str = "") -> None:
        super().__init__(kind)
        self.kind, self.host = kind, host


class Process:
    """A running script.

    Args:
        ended: called with its exit code.
    """

    def __init__(self, clock: VirtualClock, script: Script, ended: Callable[[int], None]) -> None:
        self.alive = True
        self._clock, self._script, self._ended = clock, script, ended
        self._pauses = 0
        self._pause(0.0)

    def inject(self, fault: Fault) -> None:
        """Raise a fault in the script now, after starting it if it hasn't started."""
        if self.alive and getgeneratorstate(self._script) == GEN_CREATED:
            self._advance(lambda: next(self._script))
        if self.alive:
            self._advance(lambda: self._script.throw(fault))

    def kill(self) -> None:
        """End it immediately, as if by SIGKILL."""
        if self.alive:
            self._script.close()
            self._end(KILLED)

    def _pause(self, seconds: float) -> None:
        self._pauses += 1
        current = self._pauses

        def wake() -> None:
            if self.alive and self._pauses == current:  # no fault has arrived in the meantime
                self._advance(lambda: next(self._script))

        self._clock.at(self._clock.now_unix_s() + seconds, wake)

    def _advance(self, advance: Callable[[], float]) -> None:
        try:
            self._pause(advance())
        except StopIteration as end:
            self._end(int(end.value))

    def _end(self, code: int) -> None:
        self.alive = False
        self._ended(code)


#: Start of every dry run, 2026-01-01 00:00 UTC, so that equal dry runs write equal bytes.
START_UNIX_S = 1_767_225_600.0
#: Journal file of the simulated cluster.
WORLD_WRITER = "world"
TRAIN = "train"
#: A person handles these, whatever the restart policy is.
_FOR_A_PERSON = ("nonfinite", "disk_full")


def hosts_of(config: Config) -> tuple[str, ...]:
    """Return the cluster's hosts: those that a job uses, and spare ones."""
    nodes = config.cluster.nodes
    spare = config.cluster.spare_nodes or (config.rehearsal.spare_nodes if nodes > 1 else 0)
    return tuple(f"mock-{number}" for number in range(nodes + spare))


class World:
    """The simulated cluster of a run. Its clock starts at the journal's last event."""

    def __init__(self, run: RunPaths, config: Config) -> None:
        start_unix_s = read_state(run).last_event_unix_s or START_UNIX_S
        self.run, self.config, self.settings = run, config, config.rehearsal
        self.clock = VirtualClock(start_unix_s)
        self.hosts = hosts_of(config)
        self.checkpoints = Kept(run, config)
        self.processes: dict[str, Process] = {}
        #: Notify waiting threads after each step, for a sweep that prunes; costs time.
        self.notifies_steps = False
        #: The time until which each host is broken, or slow.
        self.broken: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        self.no_nodes_until_s = self.disk_full_until_s = start_unix_s
        #: Number of the current driver.
        self.driver = 0
        self._has_driver = True
        self._seed = f"{config.rehearsal.seed}/{start_unix_s}"
        self._failures = Failures(self.settings.failures, self.hosts, self.random("failures"))
        self._repairs = self.random("mending")
        self._draws_failures = False

    def launcher(self) -> Launcher:
        """Return a launcher for the current driver; those of dead drivers do nothing."""
        return MockLauncher(self.config, self)

    def random(self, name: str) -> random.Random:
        """Return random numbers for one purpose, independent of the other purposes."""
        return random.Random(f"{self._seed}/{name}")

    def journal(self, writer: str, attempt: int = 0) -> JournalWriter:
        """Return a journal with the virtual time."""
        return JournalWriter(self.run, writer, attempt, now_unix_s=self.clock.now_unix_s)

    def start(self, job: Job, script: Script) -> None:
        """Start a simulated job."""
        self.processes[os.fspath(job.launch_dir / job.name)] = Process(
            self.clock, script, partial(self._ended, job, exit_file(job.launch_dir, job.name))
        )
        if job.name == TRAIN and not self._draws_failures:
            self._draws_failures = True
            self._schedule_failure()

    def process(self, launch_dir: str, name: str) -> Process | None:
        """Return the process of a job that was started on this cluster, or None."""
        return self.processes.get(os.path.join(launch_dir, name))

    def hosts_for(self, job: Job) -> list[str]:
        """Return the hosts of a job."""
        return [host for host in self.hosts if host not in job.excluded_hosts][: self.config.cluster.nodes]

    def broken_among(self, hosts: Sequence[str]) -> list[str]:
        """Return those of these hosts that are broken now, in the order in which they broke."""
        now_s = self.clock.now_unix_s()
        return [host for host, until_s in self.broken.items() if until_s > now_s and host in hosts]

    def slowdown(self, hosts: list[str]) -> float:
        """Return the factor by which the slowest of these hosts slows a step now."""
        now_s = self.clock.now_unix_s()
        slow = any(until_s > now_s and host in hosts for host, until_s in self.slow.items())
        return self.settings.straggler_factor if slow else 1.0

    def end_with(self, job: Job, log: str, error: HlatctlError | None) -> None:
        """Write what a job leaves besides its exit code."""
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"simulated: job {job.name}\n{log}", encoding="utf-8")
        if error:
            dump_error(error, job.error_file)

    def resumed_after_s(self, end: HlatctlError, state: RunState) -> float | None:
        """Return the delay after which a person resumes a failed run; None if no simulated failure caused its end."""
        cause = state.attempt.cause if state.attempt else ""
        # A host may have been repaired while the driver waited for an evaluation.
        unfit = isinstance(end, PreflightError) and bool(self.broken)
        given_up = isinstance(end, TrainingError | StorageError) and (
            cause in _FOR_A_PERSON or not self.config.recovery.enabled
        )
        return self._by_a_person() if unfit or given_up else None

    def pass_without_driver(self, seconds: float) -> None:
        """Let time pass without a driver."""
        self._has_driver = False
        self.clock.sleep(seconds)
        self._has_driver = True

    def _by_a_person(self) -> float:
        """Schedule a person who frees the disk and replaces broken hosts; return the delay."""
        after_s = self._repairs.expovariate(1 / self.settings.person_s) if self.settings.person_s else 0.0
        self.clock.at(self.clock.now_unix_s() + after_s, self._repair)
        return after_s

    def _repair(self) -> None:
        self.broken.clear()
        self.disk_full_until_s = self.clock.now_unix_s()

    def _schedule_failure(self) -> None:
        failure = self._failures.next()
        if failure:
            self.clock.at(self.clock.now_unix_s() + failure.after_s, partial(self._break, failure))

    def _break(self, failure: Failure) -> None:
        self._schedule_failure()
        now_s, settings = self.clock.now_unix_s(), self.settings
        with self.journal(WORLD_WRITER) as journal:
            journal.append("failure_simulated", failure=failure.kind, host=failure.host)
        if failure.kind in ("hardware", "unfit"):
            self.broken[failure.host] = now_s + self._repairs.expovariate(1 / max(settings.repair_s, 1.0))
        elif failure.kind == "straggler":
            self.slow[failure.host] = now_s + settings.straggler_s
        elif failure.kind == "upgrade":
            self.no_nodes_until_s = now_s + settings.upgrade_s
        elif failure.kind == "disk_full":
            self.disk_full_until_s = now_s + self._repairs.expovariate(1 / max(settings.person_s, 1.0))
        elif failure.kind == "head_crash" and self._has_driver:
            self.driver += 1
            self.clock.lose_driver()
        elif failure.kind == "mlflow_outage":
            self._lose_mlflow()
        if failure.kind in _FAULTS_OF_TRAINING:
            self._inject(failure)

    def _inject(self, failure: Failure) -> None:
        for process in [process for key, process in self.processes.items() if Path(key).name == TRAIN]:
            process.inject(Fault(failure.kind, "" if failure.kind in _EVERYWHERE else failure.host))

    def _lose_mlflow(self) -> None:
        def journal_event(kind: str, **fields: Any) -> None:
            with self.journal(WORLD_WRITER) as journal:
                journal.append(kind, what="mlflow", **fields)

        journal_event("tracking_lost", message="simulated: MLflow does not answer; the run continues without it")
        back = partial(journal_event, "tracking_back", events=0)
        self.clock.at(self.clock.now_unix_s() + self.settings.mlflow_outage_s, back)

    def _ended(self, job: Job, file: Path, code: int) -> None:
        if not job.log.is_file():
            self.end_with(job, "", None)
        file.write_text(f"{code}\n", encoding="utf-8")
        self.clock.notify(job.name)


#: Failures that are raised in the training job.
_FAULTS_OF_TRAINING = ("hardware", "collective_timeout", "hang", "upgrade", "nan", "straggler")
#: Failures without a host.
_EVERYWHERE = ("upgrade", "nan")


def exit_file(launch_dir: str | Path, name: str) -> Path:
    """Return the file of a job's exit code."""
    return Path(launch_dir) / f"{name}.exit_code"


_MAX_CHECKPOINT_STEP = "--max-checkpoint-step"
#: Interval at which a hung job wakes the flow.
_HANG_POLL_S = 30.0


class _EndedError(Exception):
    """The attempt ends by itself."""

    def __init__(self, end: Evidence) -> None:
        super().__init__(end.exit_code)
        self.end = end


class Training:
    """One attempt of a job on a simulated cluster."""

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._job, self._clock = world, job, world.clock
        self._config, self._settings = world.config, world.settings
        self._attempt = int(job.argv[job.argv.index("--attempt") + 1])
        self._hosts = world.hosts_for(job)
        self._curves = Curves(self._config, world.random(f"curves/{self._attempt}"))
        self._step_s, self._policy = draws.step_s(self._config), CheckpointPolicy(self._config)
        self._step, self._since_s, self._over = 0, 0.0, False
        self._thinning = -(-self._config.total_steps // (self._settings.step_events or self._config.total_steps))

    def script(self) -> Script:
        """Return the script."""
        self._journal = self._world.journal(train_writer(0), self._attempt)
        try:
            end = yield from self._attempt_end()
        finally:
            self._over = True
            self._journal.close()
        self._world.end_with(self._job, end.log, end.error)
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
        yield from self._train()
        return self._stopped("finished" if self._step >= self._config.total_steps else "amend")

    def _begin(self) -> Any:
        wait_s = max(0.0, self._world.no_nodes_until_s - self._clock.now_unix_s())
        yield from self._pause(wait_s + self._settings.start_s)
        broken = self._world.broken_among(self._hosts)
        if broken:
            raise _EndedError(evidence.broken_device(broken[0]))
        self._step = self._first = self._checkpoint()
        if self._first:
            yield from self._pause(draws.load_s(self._config))
            path = os.fspath(self._world.run.checkpoint(self._first))
            self._journal.append("checkpoint_verified", step=self._first, path=path)
        self._journal.append(
            "train_started",
            resumed_from_step=self._first,
            tokens=self._config.tokens_at(self._first),
            world=self._config.world_size,
            device="simulated",
            parameters=parameters(self._config.model).total,
            peak_flops_per_s=None,
        )

    def _checkpoint(self) -> int:
        """Return the step of the checkpoint to load; 0: none."""
        argv, total = self._job.argv, self._config.total_steps
        newest = int(argv[argv.index(_MAX_CHECKPOINT_STEP) + 1]) if _MAX_CHECKPOINT_STEP in argv else total
        return max((step for step in self._world.checkpoints.steps if step <= newest), default=0)

    def _train(self) -> Any:
        total, dies_after = self._config.total_steps, self._dies_after()
        while self._step < total:
            target = min(self._next_event(), dies_after or total)
            step_s = self._step_s * self._world.slowdown(self._hosts)
            self._since_s = self._clock.now_unix_s()
            try:
                yield (target - self._step) * step_s
            except Fault as fault:
                self._catch_up(target, step_s)
                if not self._survives(fault):
                    raise
                continue
            self._catch_up(target, step_s, whole=True)
            pauses = self._pauses()
            reason = self._policy.reason_to_save(self._step, stopping=pauses)
            if reason:
                yield from self._save(reason)
            if pauses:
                return
            if self._step == dies_after:
                raise _EndedError(Evidence(exit_code=KILLED))

    def _pauses(self) -> bool:
        """Return whether the attempt ends at this milestone, as the driver orders a real trainer to do."""
        milestone_tokens = self._config.milestones.get(self._step)
        if self._config.eval.placement != "between" or milestone_tokens is None:
            return False
        return not (self._world.run.eval(milestone_tokens) / "results.json").is_file()

    def _dies_after(self) -> int | None:
        """Return the step after which a dry run demonstrates a recovery; None: it doesn't."""
        left = self._config.total_steps - self._first
        shows = self._settings.shows_recovery and self._attempt == 1 and left > 1
        return (self._first + self._config.total_steps) // 2 if shows else None

    def _next_event(self) -> int:
        step = self._step
        if step == self._first:
            return step + 1
        return min((step // self._thinning + 1) * self._thinning, self._policy.next_save(step))

    def _catch_up(self, target: int, step_s: float, *, whole: bool = False) -> None:
        made = target - self._step if whole else int((self._clock.now_unix_s() - self._since_s) / step_s)
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
            data_wait_s=0.0,
            tokens_per_s=self._config.tokens_per_step / step_s,
            **many,
        )
        if self._step == self._first + 1 and self._config.backend.compile:
            self._journal.append("compile_cache", hits=0, misses=0, wall_s=step_s)
        if self._step == self._first + 1 or self._world.notifies_steps:
            self._clock.notify(TRAIN)

    def _save(self, reason: SaveReason) -> Any:
        step, began_s = self._step, self._clock.now_unix_s()
        if self._world.disk_full_until_s > began_s:
            self._leave_out(step, reason)
            return
        stall_s, save_s = draws.stall_s(self._config), draws.save_s(self._config)
        if reason in BLOCKING:
            stall_s = save_s
        yield from self._pause(stall_s)
        commit = partial(self._commit, step, reason, save_s, stall_s)
        self._clock.at(began_s + max(save_s, stall_s), commit)
        if reason in BLOCKING:
            yield from self._pause(0.0)

    def _leave_out(self, step: int, reason: SaveReason) -> None:
        needed_bytes = checkpoint_bytes(self._config)
        if reason in REQUIRED:
            raise _EndedError(evidence.disk_full(self._world.run, step, needed_bytes))
        message = f"step {step}: the checkpoint needs {needed_bytes} bytes, 0 are free; it is left out"
        self._journal.append("alarm", step=step, what="disk_full", message=message)
        self._journal.append("checkpoint_skipped", step=step, reason="no room")

    def _commit(self, step: int, reason: SaveReason, save_s: float, stall_s: float) -> None:
        """Journal that a checkpoint is complete, if the attempt is still running."""
        if self._over:
            return
        folder, manifest, deleted = self._world.checkpoints.add(step)
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
        for deleted_step in deleted:
            self._journal.append("checkpoint_deleted", step=deleted_step)
        survived_s = self._config.checkpoint.survived_after_steps * self._step_s
        self._clock.at(self._clock.now_unix_s() + survived_s, partial(self._survived, step))
        self._clock.notify(TRAIN)

    def _survived(self, step: int) -> None:
        if not self._over and step in self._world.checkpoints.steps:
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
        if self._over or self._world.slowdown([host]) == 1.0:
            return
        ratio, rank = self._settings.straggler_factor, self._hosts.index(host) * self._config.cluster.processes_per_node
        message = f"rank {rank} on {host} takes {ratio:.2f} times as long as the median"
        self._journal.append("straggler", step=self._step, rank=rank, host=host, ratio=ratio, message=message)

    def _end_by(self, fault: Fault) -> Any:
        """Simulate the end of the attempt by a fault, and return its evidence."""
        if fault.kind == "hardware":
            return evidence.broken_device(fault.host)
        if fault.kind == "collective_timeout":
            yield from self._pause(self._settings.collective_timeout_s)
            return evidence.collective_timeout(fault.host)
        if fault.kind == "nan":
            return self._end_nonfinite()
        if fault.kind == "hang":
            while True:
                yield from self._pause(_HANG_POLL_S)
                self._clock.notify(TRAIN)
        if self._step:  # a request to stop, or an upgrade of the cluster
            yield from self._save("stop")
        return self._stopped("stop")

    def _end_nonfinite(self) -> Evidence:
        self._note_nonfinite()
        if self._config.train.on_nonfinite != "rollback":
            return evidence.not_finite(self._step + 1)
        self._journal.append(
            "amended", key="data.skip_steps", value=[self._step + 1], by="trainer", why="loss=nan, grad_norm=nan"
        )
        return self._stopped("rollback")

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

    def _stopped(self, outcome: Outcome) -> Evidence:
        tokens = self._config.tokens_at(self._step)
        self._journal.append("train_stopped", step=self._step, tokens=tokens, reason=outcome)
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


def script_of(world: World, job: Job) -> Script:
    """Return the script of a job."""
    return SCRIPTS[job.name.split("-")[0]](world, job)


def argument(job: Job, name: str) -> str:
    """Return the value of an option of a job's program."""
    return job.argv[job.argv.index(name) + 1]


def _preflight(world: World, job: Job) -> Script:
    hosts = world.hosts_for(job)
    yield max(0.0, world.no_nodes_until_s - world.clock.now_unix_s()) + world.settings.preflight_s
    unfit = world.broken_among(hosts)
    workers = [
        {
            "host": host,
            "rank": number * world.config.cluster.processes_per_node,
            "failures": [evidence.UNFIT] if host in unfit else [],
        }
        for number, host in enumerate(hosts)
    ]
    record = {"v": 1, "ok": not unfit, "simulated": True, "workers": workers}
    world.run.preflight.write_text(json.dumps(record) + "\n", encoding="utf-8")  # one line: thousands of nodes
    if not unfit:
        return 0
    end = evidence.unfit(unfit[0], len(unfit) - 1)
    world.end_with(job, end.log, end.error)
    return end.exit_code


def _data(world: World, job: Job) -> Script:
    config = world.config
    yield world.settings.prepare_data_s
    tokenizer = {"path": "", "vocab_size": config.model.vocab_size, "bos_id": 0, "eos_id": 1, "fingerprint": "mock"}
    files.write_json(
        Path(argument(job, "--to")) / "dataset.json",
        {
            "v": 1,
            "fingerprint": "mock",
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


def _compile(world: World, job: Job) -> Script:
    yield world.settings.compile_s
    folder = Path(job.env[cache_variable(world.config)])
    if job.wrapper:  # its graphs are in folders by node
        for host in world.hosts_for(job):
            (folder / f"node-{host}" / "neuronxcc-simulated").mkdir(parents=True)
    files.write_json(folder / MANIFEST, {"files": []})
    return 0


def _check_coverage(world: World, job: Job) -> Script:
    yield world.settings.start_s
    files.write_json(world.run.coverage, {"v": 1, "simulated": True, "hits": 0, "misses": 0, "missing": []})
    return 0


def _warm_cache(world: World, job: Job) -> Script:
    yield world.settings.warm_cache_s
    return 0


def _train(world: World, job: Job) -> Script:
    return Training(world, job).script()


def _export(world: World, job: Job) -> Script:
    yield draws.export_s(world.config)
    files.write_json(Path(argument(job, "--to")) / "config.json", {"simulated": True})
    return 0


def _evaluate(world: World, job: Job) -> Script:
    milestone_tokens, step = int(argument(job, "--milestone-tokens")), int(argument(job, "--step"))
    common: dict[str, Any] = {"milestone_tokens": milestone_tokens, "step": step}
    suite = world.config.eval.suite
    tasks = [f"{name}_simulated" for name in world.config.eval.groups or (suite,)]
    share = milestone_tokens / world.config.total_tokens
    score = {"metric": "acc", "value": 0.25 + 0.2 * share, "stderr": 0.07, "n": _ITEMS}
    loss = Curves(world.config, world.random("validation")).loss(step)
    validation = {"metric": "loss_nats_per_token", "value": loss, "stderr": 0.02, "n": _VALIDATION_TOKENS}
    started_s = world.clock.now_unix_s()
    with world.journal(eval_writer(milestone_tokens)) as journal:
        started: dict[str, Any] = {"contract": SIMULATED, "suite": suite, "tasks": tasks}
        started["try"] = int(argument(job, "--try"))
        journal.append("eval_started", **common, **started)
        for task in tasks:
            of_task: dict[str, Any] = {"milestone_tokens": milestone_tokens, "contract": SIMULATED, "task": task}
            journal.append("eval_task_started", **of_task)
            yield world.settings.evaluation_s / len(tasks)
            journal.append("eval_task_finished", **of_task, scores={task: score})
        wall_s = world.clock.now_unix_s() - started_s
        scores = {"validation_loss": validation, **dict.fromkeys(tasks, score)}
        files.write_sealed_json(
            world.run.eval(milestone_tokens) / "results.json",
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


SCRIPTS: dict[str, Callable[[World, Job], Script]] = {
    "preflight": _preflight,
    "data": _data,
    "compile": _compile,
    "warm": _warm_cache,
    "coverage": _check_coverage,
    "train": _train,
    "export": _export,
    "eval": _evaluate,
}


_POLL_S = 0.5


class MockLauncher(Launcher):
    """Simulates jobs instead of running them.

    Args:
        world: the simulated cluster; None: jobs can't be submitted.
    """

    name = "mock"

    def __init__(self, config: Config, world: World | None = None) -> None:
        self._config, self._world = config, world
        self._driver = world.driver if world else 0
        self._hosts = hosts_of(config)

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts of the simulated cluster."""
        return self._hosts

    def render(self, job: Job) -> Plan:
        """Return the text that the local launcher would submit."""
        return LocalLauncher().render(job)

    def submit(self, plan: Plan) -> Handle:
        """Start the simulated job.

        Raises:
            LaunchError: there is no simulated cluster.
        """
        if self._world is None:
            raise LaunchError(f"job {plan.job.name}: cluster.launcher=mock simulates jobs only inside a flow")
        handle = self.handle(plan)
        plan.script_path.parent.mkdir(parents=True, exist_ok=True)
        plan.script_path.write_text(plan.script, encoding="utf-8")
        for old in (exit_file(handle.launch_dir, handle.name), plan.job.error_file, plan.job.log):
            old.unlink(missing_ok=True)
        self._world.start(plan.job, script_of(self._world, plan.job))
        return handle

    def status(self, handle: Handle) -> Status:
        """Return ``running`` while it runs here; then the state by its exit code, or ``lost`` without one."""
        process = self._process(handle)
        if process and process.alive:
            return Status(state="running")
        try:
            code = int(exit_file(handle.launch_dir, handle.name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Status(state="lost")
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Ask training to stop, and end any job after ``grace_s``."""
        process, world = self._process(handle), self._world
        if not (process and process.alive and world) or self._driver != world.driver:  # a dead driver cancels nothing
            return
        if grace_s and handle.name == TRAIN:
            process.inject(Fault("stop"))
            deadline_s = world.clock.now_unix_s() + grace_s
            while process.alive and world.clock.now_unix_s() < deadline_s:
                world.clock.sleep(_POLL_S)
        process.kill()

    def dump_stacks(self, handle: Handle) -> str:
        """Do nothing: there are no processes."""
        return "a simulated job has no stacks"

    def _process(self, handle: Handle) -> Process | None:
        return self._world.process(handle.launch_dir, handle.name) if self._world else None
