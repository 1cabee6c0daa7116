"""Our evaluation against the ``lm_eval`` command line: both must have the same prompts and numbers.

Evaluates every task whose data are present, on a pre-trained model and on a checkpoint that is trained and exported for
this. lm_eval takes one number of shots per command, so it runs once for each. It gets the same definitions, with the
same files (``--include_path``). Prints both wall times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.compose import compose
from conf.load import dump
from eval import harness, plan
from eval.suites import Task
from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_TASKS = ("mmlu", "bbh", "math", "bias", "piqa", "hellaswag", "nq_open", "reading")
_LIMIT = int(os.environ.get("HLATCTL_BENCH_LIMIT", "8"))
_SEED, _SEQ_LEN, _BATCH_SIZE, _TOKENS = 1234, 512, 16, 1000

Numbers = dict[str, dict[str, float]]
Samples = dict[str, list[tuple[str, str, str]]]


def run() -> None:
    """Print the numbers that differ (none should) and the wall times, for each model."""
    if not (_DATA / "eval").is_dir():
        print("skipped: the datasets are not here")
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        root = Path(folder)
        models = {"stories260K": _DATA / "weights" / "stories260K", "checkpoint": _exported(root / "trained")}
        for name, model in models.items():
            _compare(name, model, root / name)


def _compare(name: str, model: Path, root: Path) -> None:
    made = _run_directory(root)
    ours_s = _timed(
        [
            sys.executable,
            "-m",
            "eval",
            "--run-dir",
            str(made.root),
            "--milestone-tokens",
            str(_TOKENS),
            "--step",
            "1",
            "--model",
            str(model),
        ]
    )
    ours = {path.stem: _plain(files.read_json(path)["metrics"]) for path in made.eval(_TOKENS).glob("tasks/*.json")}
    asked = {task: _samples(made.eval(_TOKENS) / f"samples-{task}.jsonl") for task in ours}
    planned = _planned(root)
    theirs, answered, theirs_s = _lm_eval(model, root, planned)
    print(
        f"{name}: python -m eval {ours_s:.1f} s, lm_eval {sum(theirs_s.values()):.1f} s in {len(theirs_s)} commands "
        f"({', '.join(f'{shots} shots {wall_s:.1f} s' for shots, wall_s in theirs_s.items())}), "
        f"ratio {ours_s / sum(theirs_s.values()):.2f}",
        flush=True,
    )
    items, numbers = sum(map(len, asked.values())), sum(map(len, ours.values()))
    print(f"{name}: {len(ours)} tasks, {items} items ({_LIMIT} a task and filter), {numbers} numbers")
    other = [task for task in asked if asked[task] != answered[task]]
    print(f"{name}: items, prompts or targets differ in {len(other)} tasks{''.join(f', {task}' for task in other)}")
    differing = _differing(ours, theirs)
    print(f"{name}: {len(differing)} numbers differ where lm_eval puts requests of several tasks into one batch")
    for task in planned:
        if task.name in {name for name, _ in differing}:
            theirs |= _ask_lm_eval(model, root, [task.name], task.shots or 0, root / f"alone-{task.name}")
    print(f"{name}: {len(_differing(ours, theirs))} numbers differ where it is asked for the task alone")
    for differs, key in _differing(ours, theirs):
        print(f"  {differs} {key}: {ours[differs][key]!r}, lm_eval {theirs[differs].get(key)!r}")


def _differing(ours: Numbers, theirs: Numbers) -> list[tuple[str, str]]:
    return [(task, key) for task in ours for key in ours[task] if ours[task][key] != theirs[task].get(key)]


def _run_directory(root: Path) -> RunPaths:
    tasks = f"eval.tasks=[{','.join(_TASKS)}]"
    config = compose(
        [
            "eval=hlat",
            f"eval.data_dir={_DATA / 'eval'}",
            f"eval.limit={_LIMIT}",
            tasks,
            f"seed={_SEED}",
            f"train.seq_len={_SEQ_LEN}",
            f"eval.batch_size={_BATCH_SIZE}",
        ]
    )
    made = RunPaths(root / "run")
    made.root.mkdir(parents=True)
    made.config.write_text(dump(config), encoding="utf-8")
    return made


def _lm_eval(model: Path, root: Path, planned: list[Task]) -> tuple[Numbers, Samples, dict[int, float]]:
    """Return lm_eval's results of every task and item, and the time of each of its commands, by shots."""
    by_shots: dict[int, list[str]] = defaultdict(list)
    for task in planned:
        harness.write_definition(task, root)
        by_shots[task.shots or 0].append(task.name)
    numbers: Numbers = {}
    samples: Samples = {}
    wall_s: dict[int, float] = {}
    for shots, tasks in by_shots.items():
        output = root / f"lm_eval-{shots}"
        start = time.perf_counter()
        numbers |= _ask_lm_eval(model, root, tasks, shots, output)
        wall_s[shots] = time.perf_counter() - start
        samples |= {task: _samples(next(output.rglob(f"samples_{task}_2*.jsonl"))) for task in tasks}
    return numbers, samples, wall_s


def _ask_lm_eval(model: Path, root: Path, tasks: list[str], shots: int, output: Path) -> Numbers:
    _timed(
        [
            str(Path(sys.executable).with_name("lm_eval")),
            "run",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model},dtype=float32,max_length={_SEQ_LEN}",
            "--tasks",
            ",".join(tasks),
            "--num_fewshot",
            str(shots),
            "--limit",
            str(_LIMIT),
            "--seed",
            str(_SEED),
            "--batch_size",
            str(_BATCH_SIZE),
            "--device",
            "cpu",
            "--include_path",
            str(root / "definitions"),
            "--output_path",
            str(output),
            "--log_samples",
        ]
    )
    (results,) = output.rglob("results_*.json")
    return {task: _plain(metrics) for task, metrics in files.read_json(results)["results"].items()}


def _planned(root: Path) -> list[Task]:
    wanted = replace(compose(["eval=hlat"]).eval, data_dir=str(_DATA / "eval"), tasks=list(_TASKS))
    return plan.make(wanted, root).tasks


def _samples(path: Path) -> list[tuple[str, str, str]]:
    """Return hashes of each item, of its prompt and of its target."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records.sort(key=lambda record: (record["filter"], record["doc_id"]))
    return [(record["doc_hash"], record["prompt_hash"], record["target_hash"]) for record in records]


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if "," in key and isinstance(value, int | float)}


def _exported(root: Path) -> Path:
    """A small model, trained for a few steps and exported."""
    overrides = [
        f"runs_dir={root}",
        "train.max_steps=20",
        f"train.seq_len={_SEQ_LEN}",
        "eval.enabled=false",
        "tracking=none",
    ]
    _timed([sys.executable, "-m", "hlatctl", "train", *overrides])
    target = root / "exported"
    (trained,) = list_runs(root)
    _timed([sys.executable, "-m", "trainer.convert.export", "--run-dir", str(trained.root), "--to", str(target)])
    return target


def _timed(command: list[str]) -> float:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start
