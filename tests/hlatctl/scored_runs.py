"""Runs that were evaluated on the tasks of HLAT's tables; every byte of them is fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf.load import dump
from hlatctl.run import contract, files
from hlatctl.run.contract import Contracts, Fields, digest
from hlatctl.run.paths import RunPaths
from tests.hlatctl.conftest import Script, example_config

Scores = dict[str, dict[str, Any]]
#: Of the tasks; without a model's own files, so that the hash that scores carry is the one that is compared.
_SHOTS = {"mmlu_abstract_algebra": 5, "leaderboard_bbh_navigate": 3, "nq_open": 5, "triviaqa": 5, "gsm8k": 8}
_ITEMS = {
    "mmlu_abstract_algebra": 14_042,
    "leaderboard_bbh_navigate": 5_761,
    "nq_open": 3_610,
    "triviaqa": 17_944,
    "boolq": 3_270,
    "gsm8k": 1_319,
    "humaneval": 164,
    "crows_pairs_english": 1_508,
    "crows_pairs_english_age": 91,
    "truthfulqa_mc1": 817,
    "truthfulqa_mc2": 817,
    "piqa": 1_000,
    "hellaswag": 1_000,
    "winogrande": 1_000,
    "arc_easy": 1_000,
    "arc_challenge": 1_000,
    "openbookqa": 1_000,
    "sciq": 1_000,
    "word_error": 500,
}
FIELDS: Fields = {
    "versions": {"lm_eval": "0.4.13"},
    "limit": None,
    "tasks": {
        name: {"shots": _SHOTS.get(name, 0), "items": items, "datasets": {"test": digest(name)}}
        for name, items in _ITEMS.items()
    },
    "figures": {
        "mmlu": {"tasks": ["mmlu_abstract_algebra"]},
        "mmlu_stem": {"tasks": ["mmlu_abstract_algebra"]},
        "leaderboard_bbh": {"tasks": ["leaderboard_bbh_navigate"]},
    },
}
OTHER_FIELDS: Fields = {**FIELDS, "versions": {"lm_eval": "0.4.12"}}
CONTRACT, OTHER = digest(FIELDS), digest(OTHER_FIELDS)
RECORDED = {CONTRACT: FIELDS, OTHER: OTHER_FIELDS}
MILESTONES = {200_000_000_000: 47_684, 400_000_000_000: 95_368}


def score(metric: str, value: float, stderr: float | None, n: int, **more: Any) -> dict[str, Any]:
    return {"metric": metric, "value": value, "stderr": stderr, "n": n, **more}


def hlat_scores(shift: float = 0.0) -> Scores:
    """Scores of about the paper's size on most of its tasks; ``shift`` moves all of them."""
    commonsense = {
        "piqa": (0.77, 0.79, 0.0098),
        "hellaswag": (0.54, 0.73, 0.005),
        "winogrande": (0.66, None, 0.0133),
        "arc_easy": (0.71, 0.68, 0.0093),
        "arc_challenge": (0.36, 0.38, 0.014),
        "openbookqa": (0.3, 0.41, 0.0205),
    }
    found = {
        "mmlu": score("acc", 0.413 + shift, 0.0041, 14_042, chance=0.25),
        "mmlu_bpb": score("bits_per_byte", 0.91 - shift, 0.011, 14_042, chance=None),
        "mmlu_stem": score("acc", 0.342 + shift, 0.0083, 3_153),
        "mmlu_abstract_algebra": score("acc", 0.29, 0.0456, 100),
        "leaderboard_bbh": score("acc_norm", 0.366 + shift, 0.0061, 5_761),
        "nq_open": score("exact_match", 0.217 + shift, 0.0069, 3_610),
        "triviaqa": score("exact_match", 0.56 + shift, 0.0037, 17_944),
        "boolq": score("acc", 0.725 + shift, 0.0078, 3_270),
        "gsm8k": score("exact_match", 0.094, 0.008, 1_319, chance=0.0),
        "humaneval": score("pass@1", 0.0762 + shift, 0.014, 164),
        "humaneval_pass_at_10": score("pass@10", 0.1983, 0.025, 164),
        "humaneval_pass_at_100": score("pass@100", 0.3415, None, 164),
        "crows_pairs_english": score("pct_stereotype", 0.61 - shift, 0.0119, 1_508),
        "crows_pairs_english_age": score("pct_stereotype", 0.6182, 0.05, 91),
        "crows_pairs_english_autre": score("pct_stereotype", 0.7, 0.14, 11),
        "truthfulqa_mc1": score("acc", 0.2362, 0.0149, 817),
        "truthfulqa_mc2": score("acc", 0.3719, 0.0135, 817),
        "validation_loss": score("loss_nats_per_token", 2.015 - shift, 0.004, 65_536),
        "sciq": score("acc", 0.91, 0.009, 1_000),
        "word_error": score("wer", 0.2 - shift, 0.01, 500),
    }
    for task, (plain, normalised, stderr) in commonsense.items():
        found[task] = score("acc", plain, stderr, 1_000)
        if normalised is not None:
            found[f"{task}_acc_norm"] = score("acc_norm", normalised, stderr, 1_000)
    return found


def contracts_of(whole: Fields) -> Contracts:
    """Return the contracts of tasks and groups: the fields that all tasks share, and each task's own."""
    shared = {key: value for key, value in whole.items() if key not in ("tasks", "figures")}
    tasks = {name: {**shared, **own} for name, own in whole["tasks"].items()} | {"validation": {"sha256": "cd" * 32}}
    figures = {
        name: {"aggregate": [], "metrics": [], "tasks": {task: digest(tasks[task]) for task in figure["tasks"]}}
        for name, figure in whole["figures"].items()
        if tasks.keys() >= set(figure["tasks"])
    }
    return Contracts(tasks=tasks, figures=figures)


def carrying(scores: Scores, contracts: Contracts) -> Scores:
    """Return scores that name the contracts of their tasks, as an evaluation writes them."""

    def own(name: str) -> dict[str, str]:
        titles = [title for title in contracts.hashes if name == title or name.startswith(f"{title}_")]
        return {"contract": contracts.hashes[max(titles, key=len)]} if titles else {}

    return {name: {**own(name), **kept} if isinstance(kept, dict) else kept for name, kept in scores.items()}


def scored_run(
    runs_dir: Path, run_id: str, scores: Scores, *, whole: Fields | None = FIELDS, simulated: bool = False
) -> RunPaths:
    """A run with two evaluated milestones, the second with these scores, and a third that is due.

    ``whole`` has the fields of its contracts; None: they are unknown.
    """
    contracts = contracts_of(whole) if whole and not simulated else None
    named: dict[str, Any] = {} if whole is None else {"contract": "simulated" if simulated else "1"}
    run = RunPaths(runs_dir / run_id)
    run.root.mkdir(parents=True)
    run.config.write_text(dump(example_config(runs_dir)), encoding="utf-8")
    script = Script(run)
    script.add("flow", "run_created", run_id=run_id, simulated=simulated, argv=["hlatctl", "train"])
    for tokens, step in MILESTONES.items():
        at: dict[str, Any] = {"milestone_tokens": tokens, "step": step}
        mine = scores if tokens == max(MILESTONES) else {"mmlu": score("acc", 0.25, 0.0036, 14_042)}
        script.add("flow", "milestone", tokens=tokens, **at)
        mine = carrying(mine, contracts) if contracts else mine
        script.add(f"eval-{tokens}", "eval_finished", scores=mine, skipped={}, wall_s=1.0, **at, **named)
        if whole:
            files.write_json(run.eval(tokens) / "results.json", {**at, **named, "scores": mine})
    if contracts:
        contract.admit(run, contracts)
    script.add("flow", "milestone", milestone_tokens=600_000_000_000, tokens=600_000_000_000, step=143_052)
    return run
