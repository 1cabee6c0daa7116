"""A milestone's evaluation: what it writes, when it is repeated, and after it was killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

from conf.compose import compose
from conf.of_run import of_run
from eval import milestone, programs
from eval.task_runner import Subject
from hlatctl.run import contract, files, journal, orders
from hlatctl.run.contract import across_runs, digest
from hlatctl.run.errors import ConfigError, DataError, DependencyError, EvaluationError, load_error
from hlatctl.run.fold import fold
from hlatctl.run.paths import RunPaths
from tests.waiting import WAIT_S

MakeRun = Callable[..., RunPaths]
StartEval = Callable[..., "subprocess.Popen[str]"]
_QUICK = ["validation", "smoke_crows_pairs"]


def _evaluate(run: RunPaths, model_folder: Path, **keys: Any) -> dict[str, Any]:
    subject: dict[str, Any] = {"milestone_tokens": 1000, "step": 5}
    subject |= {key: keys.pop(key) for key in list(keys) if key in (*subject, "weights", "from_elsewhere")}
    path = milestone.evaluate(Subject(run=run, model_folder=model_folder, **subject), **keys)[-1]
    assert path.name == "results.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _kinds(run: RunPaths) -> list[str]:
    """Return the kinds of the events, without those of progress."""
    kinds = [event["kind"] for event in journal.read_events(run)]
    return [kind for kind in kinds if kind not in ("eval_task_started", "eval_progress")]


def _bytes(folder: Path) -> dict[str, bytes]:
    """Return the content of every file except locks and leases."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != "lease"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _kept(run: RunPaths) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run.eval(1000) / "results.json").read_text(encoding="utf-8"))
    return record


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=WAIT_S)
    return process.returncode, stdout, stderr


@pytest.mark.processes
@pytest.mark.usefixtures("sandbox")
def test_every_task_of_the_suite_is_scored(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run()
    record = _evaluate(run, model_folder, try_number=2)
    tasks = ["smoke_bbh", "smoke_crows_pairs", "smoke_gsm8k", "smoke_humaneval", "smoke_mmlu"]
    validation = ["validation_bits_per_byte", "validation_loss", "validation_perplexity"]
    bits = [f"{name}_bpb" for name in tasks if name != "smoke_crows_pairs"]
    assert sorted(record["scores"]) == sorted([*tasks, *bits, *validation])
    assert {name: record["scores"][name]["n"] for name in record["scores"]} == {
        **dict.fromkeys([*tasks, *bits], 2),
        **dict.fromkeys(validation, 500),
    }
    assert (record["v"], record["milestone_tokens"], record["step"], record["suite"]) == (3, 1000, 5, "smoke")
    assert (record["skipped"], record["contract"]) == ({}, "1")
    assert sorted(record["contracts"]) == [*tasks, "validation"]
    assert {name: record["scores"][name]["contract"] for name in tasks} == {
        name: record["contracts"][name] for name in tasks
    }
    for name in tasks:
        items = parquet.read_table(run.eval(1000) / f"items-{name}.parquet").to_pylist()
        assert len({item["item"] for item in items}) == 2
        assert all(item["prompt"] or item["choices"] for item in items)
    events = journal.read_events(run)
    assert _kinds(run) == ["eval_started", *["eval_task_finished"] * 6, "eval_finished"]
    assert {e["writer"] for e in events} == {"eval-1000"}
    assert (events[0]["try"], events[0]["suite"], events[0]["step"]) == (2, "smoke", 5)
    assert events[-1]["scores"] == record["scores"]
    state = fold(events).milestones[1000]
    assert (state.status, state.step, state.scores) == ("evaluated", 5, record["scores"])


@pytest.mark.processes
def test_a_process_that_stays_evaluates_the_next_milestone_alike_until_one_fails(
    make_run: MakeRun, start_eval: StartEval, model_folder: Path, tmp_path: Path
) -> None:
    run = make_run(tasks=["validation", "smoke_crows_pairs"], prompts=["def "], prompt_tokens=4)
    words = ["--run-dir", str(run.root), "--model", str(model_folder), "--step", "5"]
    folder = tmp_path / "then"
    folder.mkdir()
    orders.give(folder, 1, ("-m", "eval", *words, "--milestone-tokens", "2000"))
    gone = ("--model", str(tmp_path / "gone"), *words[4:], "--milestone-tokens", "3000")
    orders.give(folder, 2, ("-m", "eval", *words[:2], *gone))
    code, stdout, stderr = _finish(start_eval(run, "--try", "2", "--then", str(folder)))
    assert (code, stdout, "gone: no such folder" in stderr) == (EvaluationError.exit_code, "", True), stderr
    started = [event["try"] for event in journal.read_events(run) if event["kind"] == "eval_started"]
    assert started == [2, 1]
    assert [orders.is_done(folder, number) for number in range(3)] == [True, True, False]
    one, two = (files.read_sealed_json(run.eval(tokens) / "results.json") for tokens in (1000, 2000))
    assert one["scores"] == two["scores"]
    for record in (one, two):
        tokens = record["milestone_tokens"]
        (finished,) = (
            event
            for event in journal.read_events(run)
            if (event["kind"], event.get("milestone_tokens")) == ("eval_finished", tokens)
        )
        assert finished["wall_s"] > record["wall_s"], "also loading and texts"
        assert (run.eval(tokens) / "continuations.json").is_file()


def test_a_suite_of_the_harness_tasks_is_scored_with_its_figures_off_the_network(
    make_run: MakeRun, model_folder: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    groups = compose(["eval=hlat"]).eval.groups
    keys: dict[str, Any] = {"suite": "hlat", "groups": groups, "data_dir": str(tiny_data)}
    run = make_run(**keys, tasks=["commonsense", "nq_open", "crows_pairs_english_age", "mmlu_virology"])
    record = _evaluate(run, model_folder)
    # A thread of Prefect's, of an earlier test in this process, may look for its server on this machine.
    assert [address for address in tried if address[0] != "127.0.0.1"] == []
    assert os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert list(record["scores"]) == sorted(record["scores"])
    normalized = ["arc_challenge", "arc_easy", "commonsense", "hellaswag", "openbookqa", "piqa"]
    others = ["crows_pairs_english_age_likelihood_diff", "mmlu_virology", "nq_open", "winogrande"]
    assert set(record["scores"]) == {
        *normalized,
        *(f"{name}_acc_norm" for name in normalized),
        *(f"{name}_bpb" for name in [*normalized, "mmlu_virology", "nq_open", "winogrande"]),
        "crows_pairs_english_age",
        *others,
    }
    assert set(record["scores"]["commonsense"]) == {"chance", "metric", "value", "stderr", "n", "contract"}
    assert record["notes"] == ["nq_open: nq_open/train.jsonl is missing; its solved examples come from validation"]
    finished_tasks = [e["task"] for e in journal.read_events(run) if e["kind"] == "eval_task_finished"]
    assert " ".join(finished_tasks) == (
        "piqa hellaswag winogrande arc_easy arc_challenge openbookqa nq_open crows_pairs_english_age mmlu_virology"
    )
    assert journal.read_events(run)[-1]["scores"] == record["scores"]
    with (tiny_data / "piqa" / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    changed = _evaluate(make_run(**keys, tasks=["commonsense"]), model_folder, new_contract=True)
    assert changed["contracts"].keys() == {"piqa", "commonsense"}, "the other tasks have the same contracts as before"
    assert changed["contract"] == "2"
    assert _kept(run) == record


def test_a_missing_dataset_is_refused_before_anything_is_written(make_run: MakeRun, model_folder: Path) -> None:
    groups = compose(["eval=hlat"]).eval.groups
    run = make_run(suite="hlat", groups=groups, data_dir="/nowhere", tasks=["reading"])
    with pytest.raises(DataError, match=r"eval\.data_dir=/nowhere: suite hlat, task boolq needs the split validation"):
        _evaluate(run, model_folder)
    assert not run.evals.exists()
    assert not run.journal.exists()


def test_an_evaluation_that_expects_a_device_and_finds_none_measures_nothing(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tasks=_QUICK)
    config = run.config.read_text(encoding="utf-8")
    run.config.write_text(config.replace("  device: cpu\n", "  device: cuda\n"), encoding="utf-8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EvaluationError, match=r"^backend\.device=cuda: PyTorch finds no such device on "):
        _evaluate(run, model_folder)
    assert not (run.eval(1000) / "results.json").exists()
    run.config.write_text(config, encoding="utf-8")
    assert _evaluate(run, model_folder)["scores"], "and the contracts of the first try refuse no other ones"


def test_a_second_call_changes_nothing(make_run: MakeRun, model_folder: Path, tmp_path: Path) -> None:
    run = make_run(tasks=_QUICK)
    _evaluate(run, model_folder)
    before = _bytes(run.root)
    unreadable = Path(shutil.copytree(model_folder, tmp_path / "unreadable"))
    (unreadable / "model.safetensors").write_bytes(b"no weights: the model is not loaded again")
    _evaluate(run, unreadable)
    assert _bytes(run.root) == before


def test_a_missing_event_is_appended_once(make_run: MakeRun, model_folder: Path) -> None:
    """A process that died between results.json and its last event must not leave the milestone running."""
    run = make_run(tasks=_QUICK)
    _evaluate(run, model_folder)
    path = run.journal / "eval-1000.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]), encoding="utf-8")
    _evaluate(run, model_folder)
    _evaluate(run, model_folder)
    assert _kinds(run) == ["eval_started", "eval_task_finished", "eval_task_finished", "eval_finished"]


@pytest.mark.processes
def test_a_second_evaluator_waits_and_continues_a_killed_one_in_the_middle_of_its_task(
    make_run: MakeRun, start_eval: StartEval, model_folder: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"tasks": ["smoke_crows_pairs", "smoke_gsm8k"], "limit": 12, "batch_size": 1}
    run = make_run(**keys)
    first = start_eval(run)
    kept = run.eval(1000) / "answers" / "smoke_gsm8k.jsonl"
    while not run.eval_lease(1000).exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.005)
    second = start_eval(run, "--try", "2")
    while not (kept.exists() and len(kept.read_text().splitlines()) > 5):
        assert first.poll() is None, first.communicate()
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # it holds the lease until the second one has seen it
    _until_it_says(second, f"waiting: process {first.pid} on ")
    answered = len([line for line in kept.read_text().splitlines() if line])
    finished = (run.eval(1000) / "tasks" / "smoke_crows_pairs.json").stat().st_mtime_ns
    first.send_signal(signal.SIGKILL)
    assert _finish(first)[0] == -signal.SIGKILL
    code, _, stderr = _finish(second)
    assert code == 0, stderr
    events = journal.read_events(run)
    assert [e["try"] for e in events if e["kind"] == "eval_started"] == [1, 2]
    assert (run.eval(1000) / "tasks" / "smoke_crows_pairs.json").stat().st_mtime_ns == finished
    finished_tasks = [e["task"] for e in events if e["kind"] == "eval_task_finished"]
    assert finished_tasks == ["smoke_crows_pairs", "smoke_gsm8k"]
    restarted = max(i for i, e in enumerate(events) if e["kind"] == "eval_task_started")
    assert events[restarted]["task"] == "smoke_gsm8k"
    progress = next(e for e in events[restarted:] if e["kind"] == "eval_progress")
    assert (progress["done"], progress["total"]) == (answered, 12)
    assert not kept.exists(), "the items hold them now"
    undisturbed = RunPaths(tmp_path / "undisturbed")
    shutil.copytree(run.root, undisturbed.root, ignore=shutil.ignore_patterns("evals", "journal"))
    _evaluate(undisturbed, model_folder)
    for name in ("items-smoke_gsm8k.parquet", "items-smoke_crows_pairs.parquet"):
        assert (run.eval(1000) / name).read_bytes() == (undisturbed.eval(1000) / name).read_bytes()


def _until_it_says(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"no line has {words!r}"


def test_damaged_results_are_reported_and_measured_again(
    make_run: MakeRun, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tasks=_QUICK)
    first = _evaluate(run, model_folder)
    results, task = run.eval(1000) / "results.json", run.eval(1000) / "tasks" / "smoke_crows_pairs.json"
    other = (run.eval(1000) / "tasks" / "validation.json").stat().st_mtime_ns
    results.write_text(results.read_text().replace('"n": 2', '"n": 3'), encoding="utf-8")
    task.write_text(task.read_text()[:50], encoding="utf-8")
    capsys.readouterr()
    again = _evaluate(run, model_folder)
    stderr = capsys.readouterr().err
    assert f"{results}: can't be used (is not as it was written); written again\n" in stderr
    assert re.search(rf"{task}: can't be used \(.*\); measured again\n", stderr)
    assert again["scores"] == first["scores"]
    assert (run.eval(1000) / "tasks" / "validation.json").stat().st_mtime_ns == other
    state = fold(journal.read_events(run))
    assert state.milestones[1000].status == "evaluated"
    assert [warning.partition(":")[0] for warning in state.warnings] == [str(results), str(task)]


def test_other_weights_are_measured_again(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=["smoke_crows_pairs"])
    first, second = (_evaluate(run, model_folder, weights=weights) for weights in ("one", "other"))
    assert (first["weights"], second["weights"]) == ("one", "other")
    assert _kinds(run).count("eval_started") == 2


def test_a_model_from_elsewhere_has_no_held_out_text(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run()
    run.dataset.unlink()
    made_of = {"tasks": ["smoke_crows_pairs"], "limit": 2}
    _evaluate(make_run(**made_of), model_folder, milestone_tokens=0, step=0, from_elsewhere=True)
    (theirs,) = contract.read_record(run).tasks["smoke_crows_pairs"]
    shutil.rmtree(run.evals)
    _evaluate(make_run(tasks=_QUICK, limit=2), model_folder)
    (own,) = contract.read_record(run).tasks["smoke_crows_pairs"]
    assert across_runs(own) == across_runs(theirs), "the scores of tasks can be compared"
    assert own != theirs
    with pytest.raises(
        ConfigError, match=r"eval\.tasks: validation is a run's own held-out text, and this model belongs to no run"
    ):
        _evaluate(make_run(tasks=_QUICK), model_folder, from_elsewhere=True)


def test_another_contract_is_refused_by_its_first_difference_or_kept_apart(
    make_run: MakeRun, model_folder: Path
) -> None:
    first = _evaluate(make_run(tasks=_QUICK), model_folder)
    changed = make_run(tasks=_QUICK, limit=3)
    before = _bytes(changed.root)
    with pytest.raises(
        EvaluationError, match=r"contract\.json: smoke_crows_pairs: limit was 2 when this run was evaluated .* and is 3"
    ):
        _evaluate(changed, model_folder, milestone_tokens=2000)
    assert _bytes(changed.root) == before
    second = _evaluate(changed, model_folder, new_contract=True)
    assert [r["scores"]["smoke_crows_pairs"]["n"] for r in (first, second)] == [2, 3]
    assert _kept(changed) == first, "the run's own results stay where they are"
    assert sorted(second["contracts"]) == ["smoke_crows_pairs"], "the held-out text has the same contract as before"
    state = fold(journal.read_events(changed))
    assert state.contract == state.milestones[1000].contract == first["contract"] == "1"
    assert [(other.contract, other.scores) for other in state.milestones[1000].others] == [("2", second["scores"])]
    _evaluate(make_run(tasks=_QUICK), model_folder, milestone_tokens=2000)
    _evaluate(make_run(tasks=_QUICK, limit=3), model_folder, milestone_tokens=2000)  # recorded by now, so not refused


def test_a_subset_and_further_tasks_use_what_is_stored_and_share_the_results(
    make_run: MakeRun, model_folder: Path
) -> None:
    whole = _evaluate(make_run(tasks=_QUICK), model_folder)
    stored = _bytes(make_run(tasks=["smoke_crows_pairs"]).eval(1000))
    subset = make_run(tasks=["smoke_crows_pairs"])
    assert _evaluate(subset, model_folder) == whole
    assert _bytes(subset.eval(1000)) == stored, "a subset measures and changes nothing"
    more = _evaluate(make_run(tasks=["smoke_mmlu"]), model_folder)
    assert more["scores"].items() > whole["scores"].items()
    assert more["scores"].keys() - whole["scores"].keys() == {"smoke_mmlu", "smoke_mmlu_bpb"}
    finished = [event["task"] for event in journal.read_events(subset) if event["kind"] == "eval_task_finished"]
    assert finished == ["validation", "smoke_crows_pairs", "smoke_mmlu"]
    assert fold(journal.read_events(subset)).milestones[1000].scores == more["scores"]
    record = _evaluate(make_run(tasks=["smoke_mmlu"], limit=3), model_folder, new_contract=True)
    assert list(record["scores"]) == ["smoke_mmlu", "smoke_mmlu_bpb"]
    assert _kept(subset) == more


def test_chosen_tasks_leave_the_run_s_suite_to_be_evaluated(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=_QUICK)
    usual = of_run(run)
    chosen = replace(usual, eval=replace(usual.eval, tasks=["smoke_crows_pairs"]))
    _evaluate(run, model_folder, config=chosen)
    assert fold(journal.read_events(run)).milestones[1000].is_partial
    _evaluate(run, model_folder)
    assert not fold(journal.read_events(run)).milestones[1000].is_partial
    _evaluate(run, model_folder, config=chosen)
    assert not fold(journal.read_events(run)).milestones[1000].is_partial


def test_a_group_s_figure_is_there_once_all_its_parts_are_and_names_their_contracts(
    make_run: MakeRun, model_folder: Path, tiny_data: Path
) -> None:
    reading = replace(compose(["eval=hlat"]).eval.groups["reading"], tasks=["boolq", "winogrande"], mean=True)
    keys: dict[str, Any] = {"suite": "hlat", "groups": {"reading": reading}, "data_dir": str(tiny_data)}
    first = _evaluate(make_run(**keys, tasks=["boolq"]), model_folder)
    assert list(first["scores"]) == ["boolq", "boolq_bpb"]
    whole = _evaluate(make_run(**keys, tasks=["reading"]), model_folder)
    both = [name for title in ("boolq", "reading", "winogrande") for name in (title, f"{title}_bpb")]
    assert sorted(whole["scores"]) == both
    (figure,) = contract.read_record(make_run(**keys)).figures["reading"]
    assert figure["tasks"] == {name: whole["contracts"][name] for name in ("boolq", "winogrande")}
    assert whole["scores"]["reading"]["contract"] == whole["contracts"]["reading"] == digest(figure)
    assert whole["scores"]["reading_bpb"]["contract"] == digest(figure)
    assert _evaluate(make_run(**keys, tasks=["boolq"]), model_folder) == whole
    other = _evaluate(make_run(**keys, tasks=["reading"], limit=1), model_folder, new_contract=True)
    assert sorted(other["scores"]) == both
    assert other["scores"]["reading"]["contract"] not in ("", whole["scores"]["reading"]["contract"])


def test_a_tokenizer_that_has_changed_is_another_contract_and_leaves_the_results_alone(
    make_run: MakeRun, model_folder: Path, tmp_path: Path
) -> None:
    run, changed = make_run(tasks=["smoke_crows_pairs"]), Path(shutil.copytree(model_folder, tmp_path / "model"))
    first = _evaluate(run, changed, from_elsewhere=True)
    settings = json.loads((changed / "tokenizer_config.json").read_text(encoding="utf-8"))
    (changed / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}), encoding="utf-8")
    words = r"smoke_crows_pairs: model\.tokenizer\.tokenizer_config\.json was \w{16} when .* and is \w{16} now"
    with pytest.raises(EvaluationError, match=words):
        _evaluate(run, changed, from_elsewhere=True, weights="other")
    second = _evaluate(run, changed, from_elsewhere=True, weights="other", new_contract=True)
    assert (_kept(run), second["contract"]) == (first, "2")
    own, other = contract.read_record(run).tasks["smoke_crows_pairs"]
    assert across_runs(own) == across_runs(other), "models may have tokenizers of their own"


@pytest.mark.processes
def test_a_fork_of_the_harness_with_the_same_version_is_another_contract(
    make_run: MakeRun, start_eval: StartEval, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval

    run = make_run(tasks=["smoke_crows_pairs"])
    _evaluate(run, model_folder)
    before = _bytes(run.evals)
    original = Path(str(lm_eval.__file__)).parent
    ignored = shutil.ignore_patterns("*.yaml", "__pycache__")
    fork = Path(shutil.copytree(original, tmp_path / "fork" / "lm_eval", ignore=ignored))
    with (fork / "api" / "metrics.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef mean(arr):\n    return 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(fork.parent))
    code, _, stderr = _finish(start_eval(run))
    assert code == EvaluationError.exit_code, stderr
    assert re.search(
        r"contract\.json: smoke_crows_pairs: source\.lm_eval was \w{16} when this run was evaluated before", stderr
    )
    assert _bytes(run.evals) == before


def test_another_step_is_measured_again_under_the_same_contract(make_run: MakeRun, model_folder: Path) -> None:
    run = make_run(tasks=_QUICK)
    first, second = _evaluate(run, model_folder), _evaluate(run, model_folder, step=6)
    assert (first["contracts"], first["scores"]) == (second["contracts"], second["scores"])
    assert second["step"] == 6


def test_the_batch_size_is_no_part_of_the_contract(make_run: MakeRun, model_folder: Path) -> None:
    first = _evaluate(make_run(tasks=_QUICK, batch_size=16), model_folder)
    second = _evaluate(make_run(tasks=_QUICK, batch_size=2), model_folder, milestone_tokens=2000)
    assert first["contracts"] == second["contracts"]
    for name, score in first["scores"].items():
        assert second["scores"][name]["value"] == pytest.approx(score["value"], rel=1e-4)


@pytest.mark.processes
def test_without_bubblewrap_the_code_task_is_skipped_and_run_once_it_is_installed(
    make_run: MakeRun, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tasks=[*_QUICK, "smoke_humaneval"])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        record = _evaluate(run, model_folder)
        reason = str(programs.why_unavailable())
        assert _evaluate(run, model_folder) == record
    assert "apt-get install bubblewrap" in reason
    assert record["skipped"] == {"smoke_humaneval": reason}
    assert "smoke_humaneval" not in record["scores"]
    assert "smoke_crows_pairs" in record["scores"]
    assert f"smoke_humaneval: skipped, {reason}\n" in capsys.readouterr().err
    assert not (run.eval(1000) / "items-smoke_humaneval.parquet").exists()
    assert journal.read_events(run)[-1]["skipped"] == record["skipped"]
    if programs.why_unavailable() is None:
        complete = _evaluate(run, model_folder)
        assert complete["skipped"] == {}
        assert complete["scores"].items() > record["scores"].items()
        assert complete["scores"].keys() - record["scores"].keys() == {"smoke_humaneval", "smoke_humaneval_bpb"}
        assert journal.read_events(run)[-1]["skipped"] == {}


def test_weights_that_are_no_numbers_give_an_error_no_score_and_no_contract_that_refuses_another(
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
    record = _evaluate(make_run(tasks=_QUICK, limit=3), model_folder)
    assert (record["contract"], record["scores"]["smoke_crows_pairs"]["n"]) == ("1", 3)
    (replaced,) = (e for e in journal.read_events(run) if e["kind"] == "eval_contract_replaced")
    assert replaced["message"].endswith(
        "the contract of smoke_crows_pairs in an earlier evaluation that measured nothing is replaced: "
        "limit was 2 and is 3 now"
    )


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
    with pytest.raises(DependencyError, match=r"(?s)lm-eval is not installed\nhint: .*pip install .*\[eval\]"):
        _evaluate(make_run(tasks=_QUICK), model_folder)


@pytest.mark.processes
def test_an_error_of_the_process_reaches_the_one_that_started_it(
    make_run: MakeRun, start_eval: StartEval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLATCTL_ERROR_FILE", str(tmp_path / "error.json"))
    code, _, stderr = _finish(start_eval(make_run(), "--model", str(tmp_path)))
    assert code == EvaluationError.exit_code
    assert stderr == (
        f"error: --model={tmp_path}: is not a Hugging Face model: it has no config.json\n"
        "hint: python -m trainer.convert.export --run-dir RUN --step N --to DIR creates such a folder\n"
    )
    error = load_error(tmp_path / "error.json")
    assert isinstance(error, EvaluationError)
    assert f"error: {error}\n" == stderr


@pytest.mark.processes
def test_a_folder_that_is_no_run_is_refused(start_eval: StartEval, tmp_path: Path) -> None:
    code, _, stderr = _finish(start_eval(RunPaths(tmp_path)))
    assert code == 13
    assert stderr == f"error: --run-dir={tmp_path}: is not a run directory: it has no config.yaml\n"


def test_a_real_pre_trained_model_beats_chance_on_its_own_kind_of_text(make_run: MakeRun, held_out: Path) -> None:
    """stories260K was trained on children's stories: its loss on such text must be far below log(512)."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "stories260K"
    if not folder.is_dir():
        pytest.skip("the weights of stories260K are not here")
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 3
    held_out.write_text(json.dumps({"text": story}) + "\n", encoding="utf-8")
    record = _evaluate(make_run(tasks=["validation"]), folder)
    assert record["scores"]["validation_loss"]["value"] < 2.5
