"""The mock cluster behind the real protocol: every job is a script of events, and nothing is started.

`--dry-run` selects it, and the flow that runs on it is the real one. A job is done when ``submit`` returns; what it
leaves in the run directory has the real files' form. The first training attempt dies in its middle, so that a dry run
shows a recovery too.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conf.load
from conf.environment import cache_variable
from conf.schema import Config
from flows.launch.base import Handle, Job, Plan, Status
from flows.launch.local import LocalLauncher
from hlatctl.cache.layout import MANIFEST
from hlatctl.run import files
from hlatctl.run.journal import JournalWriter, eval_writer, train_writer
from hlatctl.run.manifest import checkpoint_steps, write_manifest
from hlatctl.run.paths import RunPaths, step_name

_KILLED = 137
_MAX_CHECKPOINT_STEP = "--max-checkpoint-step"
#: Step events per attempt: a real-sized run would otherwise write gigabytes.
_MAX_STEP_EVENTS = 500


class MockLauncher:
    """Plays jobs instead of running them."""

    name = "mock"

    def hosts(self, nodes: int) -> tuple[str, ...]:
        """A cluster of several nodes has a spare one."""
        return tuple(f"mock-{number}" for number in range(nodes + (nodes > 1)))

    def render(self, job: Job) -> Plan:
        """The text that the local launcher would submit."""
        return LocalLauncher().render(job)

    def handle(self, plan: Plan) -> Handle:
        """The job's place."""
        return Handle(launcher=self.name, name=plan.job.name, launch_dir=os.fspath(plan.job.launch_dir))

    def submit(self, plan: Plan) -> Handle:
        """Play the job to its end."""
        job, handle = plan.job, self.handle(plan)
        files.write_text(plan.script_path, plan.script)
        run = RunPaths(job.run_dir)
        play = _PLAYS[job.name.split("-")[0]]
        code = play(run, conf.load.load(run.config), job)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.log.write_text(f"mock: job {job.name} played, exit code {code}\n", encoding="utf-8")
        files.write_text(_exit_file(handle), f"{code}\n")
        return handle

    def status(self, handle: Handle) -> Status:
        """Ended with the scripted exit code, or lost if it was never played."""
        try:
            code = int(_exit_file(handle).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Status(state="lost")
        return Status(state="succeeded" if code == 0 else "failed", exit_code=code)

    def cancel(self, handle: Handle, *, grace_s: float) -> None:
        """Nothing of a played job is left to cancel."""

    def dump_stacks(self, handle: Handle) -> str:
        """Nothing runs."""
        return "a played job has no processes"

    def oom_kills(self) -> int | None:
        """No kernel is asked."""
        return None


def _exit_file(handle: Handle) -> Path:
    return Path(handle.launch_dir) / f"{handle.name}.exit_code"


def _argument(job: Job, name: str) -> str:
    return job.argv[job.argv.index(name) + 1]


def _hosts_of(config: Config, job: Job) -> list[str]:
    """Where the job's nodes are."""
    hosts = MockLauncher().hosts(config.cluster.nodes)
    return [host for host in hosts if host not in job.excluded_hosts][: config.cluster.nodes]


def _play_preflight(run: RunPaths, config: Config, job: Job) -> int:
    hosts = _hosts_of(config, job)
    workers = [
        {"host": hosts[rank // config.cluster.processes_per_node], "rank": rank, "failures": []}
        for rank in range(config.world_size)
    ]
    files.write_json(run.preflight, {"v": 1, "ok": True, "simulated": True, "workers": workers})
    return 0


def _play_data(run: RunPaths, config: Config, job: Job) -> int:
    folder = Path(_argument(job, "--to"))
    tokenizer = {"path": "", "vocab_size": config.model.vocab_size, "bos_id": 0, "eos_id": 1, "fingerprint": "mock"}
    files.write_json(folder / "dataset.json", {
        "v": 1, "fingerprint": "mock", "simulated": True, "text_column": config.data.text_column, "files": [],
        "documents": 0, "text_bytes": 0, "validation": {"path": "", "documents": 0, "text_bytes": 0},
        "tokenizer": tokenizer,
    })  # fmt: skip
    return 0


def _play_compile(run: RunPaths, config: Config, job: Job) -> int:
    folder = job.env[cache_variable(config)]
    if job.wrapper:  # its graphs lie by node
        for host in _hosts_of(config, job):
            (Path(folder) / f"node-{host}" / "neuronxcc-simulated").mkdir(parents=True)
    files.write_json(Path(folder) / MANIFEST, {"files": []})
    return 0


def _play_coverage(run: RunPaths, config: Config, job: Job) -> int:
    files.write_json(run.coverage, {"v": 1, "simulated": True, "hits": 0, "misses": 0, "missing": []})
    return 0


def _play_nothing(run: RunPaths, config: Config, job: Job) -> int:
    return 0


def _play_train(run: RunPaths, config: Config, job: Job) -> int:
    attempt = int(_argument(job, "--attempt"))
    newest = int(_argument(job, _MAX_CHECKPOINT_STEP)) if _MAX_CHECKPOINT_STEP in job.argv else config.total_steps
    first = max((step for step in checkpoint_steps(run) if step <= newest), default=0)
    dies_after = (first + config.total_steps) // 2 if attempt == 1 else config.total_steps
    thinning = max(1, math.ceil(config.total_steps / _MAX_STEP_EVENTS))
    with JournalWriter(run, train_writer(0), attempt) as journal:
        journal.append(
            "train_started", resumed_from_step=first, tokens=first * config.tokens_per_step,
            world={"data_parallel_size": config.data_parallel_size}, device="mock", parameters=0,
        )  # fmt: skip
        for step in range(first + 1, dies_after + 1):
            if step % thinning == 0 or step == config.total_steps:
                _play_step(journal, config, step)
            if step % config.checkpoint.every_steps == 0 or step in config.milestones or step == config.total_steps:
                _play_checkpoint(run, journal, config, step)
        if dies_after < config.total_steps:
            return _KILLED
        tokens = config.total_tokens
        journal.append("train_stopped", step=config.total_steps, tokens=tokens, reason="finished")
    return 0


def _play_step(journal: JournalWriter, config: Config, step: int) -> None:
    """A step whose curves have the usual shape: a power law down to its floor, and the real schedule's warm-up."""
    loss = 2.0 + (math.log(config.model.vocab_size) - 2.0) * step**-0.25
    warmup = min(1.0, step / max(1, config.optimizer.warmup_steps))
    journal.append(
        "step", step=step, tokens=step * config.tokens_per_step, loss=loss, grad_norm=0.3 + step**-0.5,
        param_norm=50.0 + math.log(step), lr=config.optimizer.lr * warmup,
        step_s=1.0, data_wait_s=0.0, tokens_per_s=float(config.tokens_per_step),
    )  # fmt: skip


def _play_checkpoint(run: RunPaths, journal: JournalWriter, config: Config, step: int) -> None:
    folder, tokens = run.checkpoint(step), step * config.tokens_per_step
    shutil.rmtree(folder, ignore_errors=True)
    temporary = run.checkpoints / f".tmp-{step_name(step)}"
    temporary.mkdir(parents=True, exist_ok=True)
    files.write_json(temporary / "simulated.json", {"step": step})
    world = {"data_parallel_size": config.data_parallel_size}
    manifest = write_manifest(temporary, step=step, tokens=tokens, world=world)
    reason = "milestone" if step in config.milestones else "interval"
    journal.append("checkpoint_written", step=step, tokens=tokens, bytes=0, wall_s=0.0, stall_s=0.0, reason=reason)
    temporary.rename(folder)
    journal.append("checkpoint_committed", step=step, manifest_sha256=manifest.sha256)
    journal.append("checkpoint_verified", step=step, path=os.fspath(folder))


def _play_export(run: RunPaths, config: Config, job: Job) -> int:
    files.write_json(Path(_argument(job, "--to")) / "config.json", {"simulated": True})
    return 0


def _play_eval(run: RunPaths, config: Config, job: Job) -> int:
    milestone_tokens, step = int(_argument(job, "--milestone-tokens")), int(_argument(job, "--step"))
    share = milestone_tokens / config.total_tokens
    score = {"metric": "acc", "value": 0.25 + 0.2 * share, "stderr": 0.07, "n": 40}
    scores = {f"{config.eval.suite}_simulated": score}
    with JournalWriter(run, eval_writer(milestone_tokens)) as journal:
        common: dict[str, Any] = {"milestone_tokens": milestone_tokens, "step": step}
        tried: dict[str, Any] = {"try": int(_argument(job, "--try"))}
        journal.append("eval_started", **common, **tried, suite=config.eval.suite)
        weights = _argument(job, "--weights")
        files.write_sealed_json(run.eval(milestone_tokens) / "results.json", {
            "v": 1, **common, "suite": config.eval.suite, "simulated": True, "versions": {}, "contract": "simulated",
            "weights": weights,
            "scores": scores, "skipped": {}, "wall_s": 0.0,
        })  # fmt: skip
        journal.append("eval_finished", **common, scores=scores, skipped={}, wall_s=0.0, contract="simulated")
    return 0


_PLAYS: dict[str, Callable[[RunPaths, Config, Job], int]] = {
    "preflight": _play_preflight,
    "data": _play_data,
    "compile": _play_compile,
    "warm": _play_nothing,
    "coverage": _play_coverage,
    "train": _play_train,
    "export": _play_export,
    "eval": _play_eval,
}
