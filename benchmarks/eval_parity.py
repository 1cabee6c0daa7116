"""Our evaluation against the ``lm_eval`` command line: both must have the same prompts, answers and numbers.

Evaluates every task whose data are present (``HLATCTL_BENCH_DATA``, ``HLATCTL_BENCH_TASKS``), ``HLATCTL_BENCH_LIMIT``
items each, on a pre-trained model and on a checkpoint that is trained and exported for this (``HLATCTL_BENCH_MODELS``
names some of them). lm_eval takes one number of shots per command, so it runs once for each. It gets the same
definitions, with the same files (``--include_path``). Prints times, memory, and the equal items of each task.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyarrow import parquet

from benchmarks.eval_command import (
    BATCH_SIZE,
    DATA,
    MODEL,
    SEED,
    SEQ_LEN,
    TOKENS,
    Cost,
    Process,
    evaluate,
    run_directory,
)
from conf.compose import compose
from eval import harness
from eval.tasks import plan
from eval.tasks.suites import Task
from hlatctl.report import items as item_lines
from hlatctl.run import files
from hlatctl.run.runs import list_runs

_TASKS = os.environ.get("HLATCTL_BENCH_TASKS", "mmlu,bbh,math,bias,piqa,hellaswag,nq_open,reading").split(",")
_MODELS = os.environ.get("HLATCTL_BENCH_MODELS", "stories260K,checkpoint").split(",")
_LIMIT = int(os.environ.get("HLATCTL_BENCH_LIMIT", "100"))

Numbers = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Item:
    """An item of a task.

    Args:
        asked: hashes of the record, its prompt and its target.
        metrics: the metrics that both report.
        answers: the model's answers, to the last bit.
    """

    asked: tuple[str, ...]
    metrics: dict[str, float]
    answers: str


#: By filter and number.
Items = dict[tuple[str, str], Item]


def run() -> None:
    """Print times, memory and differences (there should be none) for each model."""
    if not DATA.is_dir():
        print("skipped: the datasets are not here")
        return
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        root = Path(folder)
        for name in _MODELS:
            _compare(name, MODEL if name == MODEL.name else exported(root / "trained"), root / name)


def _compare(name: str, model: Path, root: Path) -> None:
    made = run_directory(root, _TASKS, _LIMIT)
    our_cost = evaluate(made, model).finish()
    results = made.eval(TOKENS)
    ours = {path.stem: _plain(files.read_json(path)["metrics"]) for path in results.glob("tasks/*.json")}
    asked = {task: _our_items(results / f"items-{task}.parquet") for task in ours}
    planned = _planned(root)
    theirs, answered, costs = _lm_eval(model, root, planned)
    _print_costs(name, our_cost, list(costs.values()))
    first = _differing(ours, theirs)
    print(f"{name}: {len(first)} numbers differ where lm_eval puts requests of several tasks into one batch")
    for each in (task for task in planned if task.name in {task for task, _ in first}):
        alone, items, _ = _lm_eval(model, root / f"alone-{each.name}", [each])
        theirs, answered = theirs | alone, answered | items
    last = _differing(ours, theirs)
    print(f"{name}: {len(last)} of {sum(map(len, ours.values()))} numbers differ where it is asked for the task alone")
    for task, key in last:
        print(f"  {task} {key}: {ours[task][key]!r}, lm_eval {theirs[task].get(key)!r}")
    for task, own in asked.items():
        _print_items(task, own, answered[task])


def _print_items(task: str, ours: Items, theirs: Items) -> None:
    pairs = [(item, theirs[key]) for key, item in ours.items()]
    equal = sum(our.asked == their.asked and their.metrics.items() <= our.metrics.items() for our, their in pairs)
    to_the_bit = sum(our.answers == their.answers for our, their in pairs)
    print(f"  {task}: {equal} of {len(ours)} items equal, {to_the_bit} with the same bits")


def _print_costs(name: str, ours: Cost, theirs: list[Cost]) -> None:
    wall_s, cpu_s = sum(cost.wall_s for cost in theirs), sum(cost.cpu_s for cost in theirs)
    peak_mib = max(cost.peak_mib for cost in theirs)
    print(f"{name}: lm_eval in {len(theirs)} commands", flush=True)
    for label, our, their, unit in (
        ("processor time", ours.cpu_s, cpu_s, "s"),
        ("wall time", ours.wall_s, wall_s, "s"),
        ("peak memory", ours.peak_mib, peak_mib, "MiB"),
    ):
        print(f"{name}: {label} {our:.1f} {unit}, lm_eval {their:.1f} {unit}: {our / their:.2f}", flush=True)


def _differing(ours: Numbers, theirs: Numbers) -> list[tuple[str, str]]:
    """Return the metrics that lm_eval has too and that aren't the same."""
    return [
        (task, key)
        for task in ours
        for key in ours[task]
        if key in theirs[task] and ours[task][key] != theirs[task][key]
    ]


def _lm_eval(model: Path, root: Path, tasks: list[Task]) -> tuple[Numbers, dict[str, Items], dict[int, Cost]]:
    """Return lm_eval's results of every task and item, and the cost of each of its commands, by shots."""
    by_shots: dict[int, list[str]] = defaultdict(list)
    root.mkdir(exist_ok=True)
    for task in tasks:
        harness.write_definition(task, root)
        by_shots[task.shots or 0].append(task.name)
    numbers: Numbers = {}
    items: dict[str, Items] = {}
    costs: dict[int, Cost] = {}
    for shots, names in by_shots.items():
        output = root / f"lm_eval-{shots}"
        costs[shots] = Process(_command(model, root, names, shots, output)).finish()
        (results,) = output.rglob("results_*.json")
        numbers |= {task: _plain(metrics) for task, metrics in files.read_json(results)["results"].items()}
        items |= {task: _items(next(output.rglob(f"samples_{task}_2*.jsonl"))) for task in names}
    return numbers, items, costs


def _command(model: Path, root: Path, tasks: list[str], shots: int, output: Path) -> list[str]:
    options = {
        "model": "hf",
        "model_args": f"pretrained={model},dtype=float32,max_length={SEQ_LEN}",
        "tasks": ",".join(tasks),
        "num_fewshot": shots,
        "limit": _LIMIT,
        "seed": SEED,
        "batch_size": BATCH_SIZE,
        "device": "cpu",
        "include_path": root / "definitions",
        "output_path": output,
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [str(Path(sys.executable).with_name("lm_eval")), "run", *given, "--log_samples"]


def _planned(root: Path) -> list[Task]:
    wanted = replace(compose(["eval=hlat"]).eval, data_dir=str(DATA), tasks=_TASKS)
    return plan.make(wanted, root).tasks


def _items(path: Path) -> Items:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {(each["filter"], str(each["doc_id"])): _item(each) for each in records}


def _our_items(path: Path) -> Items:
    lines = item_lines.read_lines(path, hint="evaluate again")
    rows = parquet.read_table(path, columns=["choices", "loglikelihoods", "answer"]).to_pylist()
    return {
        (line.filter, line.item): Item(
            asked=tuple(line.asked.split()),
            metrics=line.metrics,
            answers=_words(row["loglikelihoods"] if row["choices"] else [row["answer"]]),
        )
        for line, row in zip(lines, rows, strict=True)
    }


def _item(record: dict[str, Any]) -> Item:
    return Item(
        asked=tuple(record[name] for name in ("doc_hash", "prompt_hash", "target_hash")),
        metrics={n: float(record[n]) for n in record["metrics"] if isinstance(record[n], int | float)},
        answers=_words([each[0] if isinstance(each, list) else each for each in record["filtered_resps"]]),
    )


def _words(answers: Any) -> str:
    """Return answers as one text; lm_eval writes numbers as texts."""
    return f"[{' '.join(map(_words, answers))}]" if isinstance(answers, list) else str(answers)


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if "," in key and isinstance(value, int | float)}


def exported(root: Path) -> Path:
    overrides = [
        f"runs_dir={root}",
        "train.max_steps=20",
        f"train.seq_len={SEQ_LEN}",
        "eval.enabled=false",
        "tracking=none",
    ]
    Process([sys.executable, "-m", "hlatctl", "train", *overrides]).finish()
    target = root / "exported"
    (trained,) = list_runs(root)
    places = ["--run-dir", str(trained.root), "--to", str(target)]
    Process([sys.executable, "-m", "trainer.convert.export", *places]).finish()
    return target
