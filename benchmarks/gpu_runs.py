"""Whether a run of 1.1 B parameters survives on an accelerator: stalls of checkpoints, kill and resume, evaluation.

Parts of ``python -m benchmarks gpu``, each a process like the checks: ``python -m benchmarks.gpu_runs NAME DEVICE
FOLDER`` runs one in a folder with a prepared corpus, and prints its figures as JSON. Training is started as ``hlatctl
train`` starts it on one machine, without the workflow around it, whose packages are too many to carry. On a CPU the
model is small.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from benchmarks import checkpoint_stall as stall
from benchmarks.gpu_cases import Case, Changes, config_of
from benchmarks.gpu_checks import Figures, repeated, run_one
from conf import load
from conf.schema import Config, EvalConfig
from conf.sizes import checkpoint_bytes
from hlatctl.run import files, processes
from hlatctl.run.checkpoint import checkpoint_steps, read_manifest
from hlatctl.run.errors import ERROR_FILE_ENV, DependencyError
from hlatctl.run.journal import Event, read_events
from hlatctl.run.paths import RunPaths

_EVERY_STEPS = 8
#: The run is killed this many steps after its first checkpoint is on the disk: drawn.
_KILLED_AFTER = (3, 7)
_SAVES = 2
_POLL_S = 0.2
_STOPS_S = 120.0
_RUN = "killed-run"
_ITEMS = 4
#: Nats by which the loss of a few steps may exceed that of guessing.
_ABOVE_UNIFORM = 0.5


def checkpoint_stall(device: str, folder: Path) -> Figures:
    """Measure how long training stops for a checkpoint that is written during training, or while training waits."""
    config = _config_of(folder, device, {"backend": {"compile": False}})
    free = shutil.disk_usage(folder).free
    # One checkpoint of each kind, one that is being written, and some space.
    while checkpoint_bytes(config) > free / 4 and config.model.num_layers > 1:
        config = replace(config, model=replace(config.model, num_layers=config.model.num_layers // 2))
    stalls_s, steps_s = stall.measure(config, folder / "stalls", saves=_SAVES)
    return {"bytes": checkpoint_bytes(config), "stalls_s": stalls_s, "step_s": statistics.median(steps_s)}


def kill_and_resume(device: str, folder: Path) -> Figures:
    """Check that a run that is killed at a drawn step repeats its losses from its checkpoint, and stops on request."""
    run = _new_run(folder, device)
    with _Attempt(run, 1) as first:
        first.wait_for(lambda: _written(run))
        last = _steps(run, 1)[-1]["step"] + random.SystemRandom().randint(*_KILLED_AFTER)
        first.wait_for(lambda: _steps(run, 1)[-1]["step"] >= last)
        first.kill()
    whole = {event["step"]: event for event in _steps(run, 1)}
    with _Attempt(run, 2) as second:
        second.wait_for(lambda: _steps(run, 2) and _steps(run, 2)[-1]["step"] >= max(whole))
        second.stop()
    again = _steps(run, 2)
    assert again[-1]["step"] in checkpoint_steps(run), "it wrote no checkpoint when it was asked to stop"
    saved = [event for event in read_events(run) if event["kind"] == "checkpoint_written"]
    return {
        **repeated(whole, again, exactly=device == "cpu"),
        "killed_after_step": max(whole),
        "continued_from_step": again[0]["step"] - 1,
        "first_step_after_s": first.first_step_s,
        "ends_after_kill_s": first.ends_s,
        "first_step_after_restart_s": second.first_step_s,
        "stops_after_s": second.ends_s,
        "stalls_s": [event.get("stall_s") for event in saved],
        "written_s": [event["wall_s"] for event in saved],
    }


def evaluation_hf(device: str, folder: Path) -> Figures:
    """Check that a checkpoint is evaluated with transformers, without a copy of its weights."""
    return _evaluated("hf", device, folder)


def evaluation_vllm(device: str, folder: Path) -> Figures:
    """Check that a checkpoint is exported and evaluated with vLLM; skipped where it is not installed."""
    return _evaluated("vllm", device, folder)


def _evaluated(runner: Literal["hf", "vllm"], device: str, folder: Path) -> Figures:
    for package in ("lm_eval", *(["vllm"] if runner == "vllm" else [])):
        if importlib.util.find_spec(package) is None:
            raise DependencyError(f"the package {package} is not installed")
    run, model = RunPaths(folder / _RUN), folder / f"model-{runner}-{os.getpid()}"
    if not run.checkpoints.exists() or not checkpoint_steps(run):
        run = _new_run(folder, device)
        with _Attempt(run, 1) as attempt:
            attempt.wait_for(lambda: _written(run))
            attempt.stop()
    config, step = load.load(run.config), max(checkpoint_steps(run))
    tokens, file = read_manifest(run.checkpoint(step)).tokens, folder / f"evaluation-{runner}.yaml"
    files.write_text(file, load.dump(replace(config, eval=EvalConfig(runner=runner, limit=_ITEMS))))
    started_s = time.monotonic()
    places = ["--run-dir", os.fspath(run.root), "--step", str(step)]
    _call("trainer.convert.export", *places, "--to", os.fspath(model), *(["--link"] if runner == "hf" else []))
    exported_s = time.monotonic()
    more = ["--milestone-tokens", str(tokens), "--model", os.fspath(model), "--config", os.fspath(file)]
    _call("eval", *places, *more)
    results = json.loads((run.eval(tokens) / "results.json").read_text(encoding="utf-8"))
    values = {name: score["value"] for name, score in results["scores"].items()}
    assert values["validation_loss"] < math.log(config.model.vocab_size) + _ABOVE_UNIFORM, values
    times_s = {"export_s": exported_s - started_s, "evaluation_s": time.monotonic() - exported_s}
    return {**times_s, "step": step, "scores": values, "not_run": results.get("skipped", {})}


def _call(module: str, *words: str) -> None:
    """Run a module; what it prints goes to stderr, because stdout has the figures."""
    subprocess.run([sys.executable, "-m", module, *words], stdout=sys.stderr, check=True)


def _config_of(folder: Path, device: str, changes: Changes) -> Config:
    return config_of(Case("run", changes), folder, device)


def _new_run(folder: Path, device: str) -> RunPaths:
    """Prepare a run in place of an earlier one."""
    run = RunPaths(folder / _RUN)
    shutil.rmtree(run.root, ignore_errors=True)
    changes: Changes = {"checkpoint": {"every_steps": _EVERY_STEPS, "keep": 1}, "train": {"max_steps": 10_000}}
    config = _config_of(folder, device, changes)
    files.write_text(run.config, files.seal_lines(load.dump(config)))
    shutil.copy(folder / "data" / "dataset.json", run.dataset)
    return run


def _written(run: RunPaths) -> bool:
    return any(event["kind"] == "checkpoint_written" for event in read_events(run))


def _steps(run: RunPaths, attempt: int) -> list[Event]:
    return [event for event in read_events(run) if event["kind"] == "step" and event["attempt"] == attempt]


class _Attempt:
    """An attempt in processes of its own; leaving the context kills what is left of them.

    ``ends_s``: seconds from the signal to its end.
    """

    def __init__(self, run: RunPaths, number: int) -> None:
        self._run, self._number = run, number
        self.ends_s = math.nan
        base = run.launch(number) / "train"
        base.parent.mkdir(parents=True, exist_ok=True)
        self._log = base.with_suffix(".log")
        trainer = ["-m", "trainer", "--run-dir", os.fspath(run.root), "--attempt", str(number)]
        torchrun = ["-m", "torch.distributed.run", f"--rdzv-id=train-{number}", "--nproc-per-node=1", *trainer]
        command = [sys.executable, "-m", "hlatctl.node", os.fspath(base), "--", sys.executable, *torchrun]
        environment = {**os.environ, ERROR_FILE_ENV: os.fspath(base.with_suffix(".error"))}
        self._started_unix_s = time.time()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # ends all its processes
            self._process.wait(_STOPS_S)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; AssertionError with the log's end if the attempt ends before."""
        while not condition():
            assert self._process.poll() is None, self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            time.sleep(_POLL_S)

    @property
    def first_step_s(self) -> float:
        """Seconds from its start until its first step was journaled."""
        return float(_steps(self._run, self._number)[0]["time_unix_s"]) - self._started_unix_s

    def kill(self) -> None:
        """Kill the training process, and wait for the end of the attempt."""
        (rank,) = processes.ranks(self._process.pid).values()
        self._end(lambda: processes.send(rank, signal.SIGKILL))

    def stop(self) -> None:
        """Ask the attempt to stop, and wait for its end."""
        self._end(lambda: self._process.send_signal(signal.SIGTERM))

    def _end(self, send: Callable[[], object]) -> None:
        sent_s = time.monotonic()
        send()
        self._process.wait(_STOPS_S)
        self.ends_s = time.monotonic() - sent_s


#: In the order in which they run; the evaluations use the checkpoint of the killed run.
RUNS: dict[str, Callable[[str, Path], Figures]] = {
    function.__name__: function for function in (checkpoint_stall, kill_and_resume, evaluation_hf, evaluation_vllm)
}


if __name__ == "__main__":
    run_one(RUNS)
