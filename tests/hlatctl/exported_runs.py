"""A run with the files of evaluated tasks."""

from __future__ import annotations

from pathlib import Path

from hlatctl.run import files
from hlatctl.run.paths import RunPaths
from tests.hlatctl.scored_runs import FIELDS, contracts_of, hlat_scores, score, scored_run

TOKENS = 400_000_000_000
GSM8K = {
    "alias": "gsm8k",
    "exact_match,flexible-extract": 0.11,
    "exact_match_stderr,flexible-extract": 0.009,
    "exact_match,strict": 0.094,
    "exact_match_stderr,strict": 0.008,
}


def exported_run(runs_dir: Path) -> RunPaths:
    scores = hlat_scores()
    scores["gsm8k_flexible_extract"] = score("exact_match", 0.11, 0.009, 1_319)
    run = scored_run(runs_dir, "base", scores)
    folder = run.eval(TOKENS) / "tasks"
    own = {name: {"contract": contract} for name, contract in contracts_of(FIELDS).hashes.items()}
    of_code = {
        "humaneval": score("pass@1", 0.0762, 0.014, 164),
        "humaneval_pass_at_10": score("pass@10", 0.1983, 0.025, 164),
        "humaneval_pass_at_100": score("pass@100", 0.3415, None, 164),
    }
    of_gsm8k = {name: scores[name] for name in ("gsm8k", "gsm8k_flexible_extract")}
    of_piqa = {name: scores[name] for name in ("piqa", "piqa_acc_norm")}
    piqa = {"alias": "piqa", "acc,none": 0.77, "acc_stderr,none": 0.0098}
    piqa |= {"acc_norm,none": 0.79, "acc_norm_stderr,none": 0.0098, "acc_chance,none": 0.5}
    files.write_sealed_json(folder / "gsm8k.json", {**own["gsm8k"], "metrics": GSM8K, "scores": of_gsm8k})
    files.write_sealed_json(folder / "piqa.json", {**own["piqa"], "metrics": piqa, "scores": of_piqa})
    files.write_sealed_json(folder / "humaneval.json", {**own["humaneval"], "metrics": {}, "scores": of_code})
    files.write_sealed_json(
        folder / "validation.json", {"metrics": {}, "scores": {"validation_loss": score("nats", 2.0, None, 9)}}
    )
    return run
