"""A run directory with a known past: two attempts, a spike, three milestones; every byte of it is fixed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.load import dump
from conf.schema import CheckpointConfig, Config, EvalConfig, OptimizerConfig, TrainConfig
from hlatctl.run.journal import to_line
from hlatctl.run.paths import RunPaths

BEGAN_UNIX_S = 1_700_000_000.0
MakeRun = Callable[..., RunPaths]


class Script:
    """Writes journal files event by event at times that it counts itself."""

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        self._seq: dict[str, int] = {}
        self.now_s = BEGAN_UNIX_S
        run.journal.mkdir(parents=True)

    def add(self, writer: str, kind: str, attempt: int = 0, after_s: float = 0.5, **fields: Any) -> None:
        self.now_s += after_s
        self._seq[writer] = self._seq.get(writer, 0) + 1
        head = {"v": 1, "seq": self._seq[writer], "time_unix_s": self.now_s, "attempt": attempt, "kind": kind}
        with (self._run.journal / f"{writer}.jsonl").open("ab") as file:
            file.write(to_line({**head, **fields}))

    def stage(self, name: str, wall_s: float, **outputs: Any) -> None:
        self.add("flow", "stage_started", stage=name, fingerprint="0" * 16)
        self.add(
            "flow", "stage_finished", after_s=wall_s, stage=name, fingerprint="0" * 16, wall_s=wall_s, outputs=outputs
        )

    def steps(self, attempt: int, first: int, last: int, tokens_per_step: int) -> None:
        for step in range(first, last + 1):
            wobble = math.sin(step * 1.7) * 0.09 + math.sin(step * 0.61) * 0.05
            grad_norm = round(0.8 * math.exp(-step / 60) + 0.35 + wobble * 0.3 + (0.9 if step == 180 else 0.0), 5)
            self.add(
                "train-rank00000",
                "step",
                attempt=attempt,
                step=step,
                tokens=step * tokens_per_step,
                loss=round(3.4 + 5.6 * math.exp(-step / 45) + wobble, 5),
                grad_norm=grad_norm,
                param_norm=round(95 + 0.05 * step, 5),
                lr=round(3e-3 * min(step / 40, 1.0 - 0.9 * step / 306), 8),
                step_s=0.5,
                data_wait_s=0.004 if step % 50 else 0.08,
                tokens_per_s=round(tokens_per_step / 0.5, 3),
            )
            if step == 180:
                self.add(
                    "train-rank00000",
                    "gradient_spike",
                    attempt=attempt,
                    after_s=0,
                    step=step,
                    grad_norm=grad_norm,
                    mean=0.39,
                )

    def evaluation(self, tokens: int, step: int, loss: float, accuracy: float) -> None:
        writer = f"eval-{tokens}"
        scores = {
            "smoke_mmlu": {"metric": "acc", "value": accuracy, "stderr": 0.0684, "n": 40},
            "smoke_humaneval": {"metric": "pass@1", "value": 0.0, "stderr": None, "n": 10},
            "validation_loss": {"metric": "loss_nats_per_token", "value": loss, "stderr": 0.021, "n": 65536},
            "validation_perplexity": {
                "metric": "perplexity",
                "value": round(math.exp(loss), 3),
                "stderr": None,
                "n": 65536,
            },
        }
        self.add("flow", "milestone", after_s=0, milestone_tokens=tokens, tokens=step * 8192, step=step)
        self.add(writer, "eval_started", milestone_tokens=tokens, step=step, suite="smoke", **{"try": 1})
        self.add(
            writer,
            "eval_finished",
            after_s=6,
            milestone_tokens=tokens,
            step=step,
            scores=scores,
            skipped={"smoke_gsm8k": "the model is too small"},
            wall_s=6.0,
        )


def example_config(runs_dir: Path) -> Config:
    """The quickstart's shape, independent of this machine."""
    return Config(
        runs_dir=str(runs_dir),
        train=TrainConfig(tokens=2_500_000, global_batch_size=16),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=40),
        checkpoint=CheckpointConfig(every_steps=50),
        eval=EvalConfig(every_tokens=833_333),
    )


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run directory; ``until`` is how far it has come: created, stages, killed, finished."""

    def make(run_id: str = "example", *, until: str = "finished", simulated: bool = False) -> RunPaths:
        config = example_config(Path("/runs"))
        run = RunPaths(tmp_path / "runs" / run_id)
        run.root.mkdir(parents=True)
        run.config.write_text(dump(config), encoding="utf-8")
        script = Script(run)
        script.add("flow", "run_created", run_id=run_id, simulated=simulated, argv=["hlatctl", "train"])
        if until != "created":
            _provenance(run)
            _play(script, config.tokens_per_step, until)
        return run

    return make


def _play(script: Script, tokens_per_step: int, until: str) -> None:
    script.add("flow", "head_started", pid=1, host="node-0")
    for name, wall_s in (("validate", 0.02), ("preflight", 3.1), ("data", 7.9), ("compile", 41.0)):
        script.stage(name, wall_s)
    script.add("flow", "stage_skipped", stage="warm_cache", fingerprint="0" * 16, why="no graphs were compiled")
    if until == "stages":
        return
    script.add("flow", "attempt_started", attempt=1, handle={"launcher": "local", "name": "train", "launch_dir": "/x"})
    script.add("train-rank00000", "train_started", attempt=1, after_s=4, resumed_from_step=0, tokens=0)
    script.steps(1, 1, 130, tokens_per_step)
    script.add(
        "train-rank00000",
        "checkpoint_written",
        attempt=1,
        step=100,
        tokens=100 * tokens_per_step,
        bytes=34_813_440,
        wall_s=0.25,
        reason="interval",
    )
    script.add("train-rank00000", "checkpoint_committed", attempt=1, after_s=0, step=100)
    script.evaluation(833_333, 102, 4.31, 0.25)
    if until == "killed":
        return
    script.add(
        "flow",
        "attempt_ended",
        attempt=1,
        cause="killed",
        exit_code=137,
        step=130,
        evidence="the job died of signal 9",
        decision="restart",
        why="step 100 is a valid checkpoint",
    )
    script.add(
        "flow",
        "attempt_started",
        attempt=2,
        after_s=2,
        handle={"launcher": "local", "name": "train", "launch_dir": "/x"},
    )
    script.add(
        "train-rank00000", "train_started", attempt=2, after_s=4, resumed_from_step=100, tokens=100 * tokens_per_step
    )
    script.steps(2, 101, 306, tokens_per_step)
    script.add(
        "train-rank00000",
        "checkpoint_written",
        attempt=2,
        step=306,
        tokens=306 * tokens_per_step,
        bytes=34_813_440,
        wall_s=0.25,
        reason="final",
    )
    script.add("train-rank00000", "checkpoint_committed", attempt=2, after_s=0, step=306)
    script.add("train-rank00000", "train_stopped", attempt=2, step=306, tokens=306 * tokens_per_step, reason="finished")
    script.add(
        "flow",
        "attempt_ended",
        attempt=2,
        cause="finished",
        exit_code=0,
        step=306,
        evidence="the last step is written",
        decision="",
        why="",
    )
    script.evaluation(1_666_666, 204, 3.72, 0.3)
    script.evaluation(306 * tokens_per_step, 306, 3.51, 0.325)
    script.add("flow", "run_finished", outcome="finished", step=306, tokens=306 * tokens_per_step, message="")


def _provenance(run: RunPaths) -> None:
    record = {
        "v": 1,
        "argv": ["hlatctl", "train"],
        "created_utc": "2027-01-15T08:00:00Z",
        "git": {
            "commit": "0123456789abcdef0123456789abcdef01234567",
            "branch": "main",
            "dirty": True,
            "diff": "-a < b\n+a > b",
            "diff_truncated": False,
        },
        "packages": {"hlatctl": "0.1.0", "torch": "2.13.0"},
        "python": "3.11",
        "host": {"name": "node-0", "cpus": 2},
    }
    run.provenance.write_text(json.dumps(record), encoding="utf-8")
