"""`hlatctl eval`: its targets and progress, `hlatctl eval data`, and export and import of other evaluators' files."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.of_run import of_run
from conf.schema import ClusterConfig, Config
from hlatctl.cli.main import main
from hlatctl.cli.progress import PlainEvaluationObserver
from hlatctl.cli.status import evaluation_line
from hlatctl.report.compare import IMPORTED, IMPORTED_UNKNOWN, Cell, marked, ranked
from hlatctl.report.contracts import Conditions
from hlatctl.run import files
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.run.runs import list_runs
from hlatctl.run.state import EvaluationProgress, MilestoneState, RunState
from tests.hlatctl.cli.conftest import FakeSlurm
from tests.hlatctl.conftest import MakeRun
from tests.hlatctl.exported_runs import exported_run
from tests.hlatctl.scored_runs import score


def _record(dataset: str, config: str | None, split: str, task: str, **facts: Any) -> dict[str, Any]:
    place = "/".join(filter(None, [dataset.split("/")[1], config, f"{split}.jsonl"]))
    return {
        "dataset": dataset,
        "config": config,
        "split": split,
        "expected": place,
        "tasks": [task],
        "required": True,
        "file": None,
        **facts,
    }


_THERE = {"file": "/data/mmlu/anatomy/test.jsonl", "rows": 1350, "bytes": 2048, "sha256": "ab" * 32}
_FOUND: dict[str, Any] = {
    "suite": "hlat",
    "data_dir": "/data",
    "datasets": [
        _record("cais/mmlu", "anatomy", "test", "mmlu_anatomy", **_THERE),
        _record("cais/mmlu", "virology", "test", "mmlu_virology"),
        _record("google/nq_open", None, "train", "nq_open", required=False),
        _record("baber/piqa", None, "validation", "piqa", **_THERE),
    ],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the evaluator's process is asked, which answers with a status in which something is missing."""
    calls: list[tuple[str, ...]] = []

    def ask_about(module: str, config: Config, *argv: str, show_talk: bool) -> str:
        assert show_talk
        calls.append((module, config.eval.suite, str(config.eval.data_dir), *argv))
        return json.dumps(_FOUND)

    monkeypatch.setattr("flows.runtime.programs.ask_about", ask_about)
    return calls


def test_the_status_is_a_table_of_datasets_and_names_what_is_missing(
    asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "data", "status", "eval=hlat", "eval.data_dir=/data"]) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines == [
        ["DATASET", "SPLIT", "FILES", "ROWS", "SIZE", "SHA256", "TASKS"],
        ["cais/mmlu", "test", "1", "of", "2", "1,350", "2", "KiB", "abababababab", "mmlu_anatomy,", "mmlu_virology"],
        ["google/nq_open", "train", "0", "of", "1", "(optional)", "–", "–", "–", "nq_open"],
        ["baber/piqa", "validation", "1", "1,350", "2", "KiB", "abababababab", "piqa"],
    ]
    assert captured.err == (
        "missing: /data/mmlu/virology/test.jsonl, for mmlu_virology\n"
        "hint: on a machine with a network, run `hlatctl eval data download --to /data eval=hlat`\n"
    )
    assert asked == [("eval.data", "hlat", "/data", "status")]


def test_the_status_as_json_is_every_file(asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "data", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == _FOUND
    assert asked == [("eval.data", "hlat", "None", "status")], "the whole table if no suite is named"


def test_the_download_is_asked_for_the_suite_that_is_named(
    asked: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "data", "download", "--to", "here", "eval=hlat_core"]) == 0
    assert asked == [("eval.data", "hlat_core", "None", "download", "--to", os.fspath(tmp_path / "here"))]


@pytest.mark.processes
def test_an_error_of_the_process_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The real process, whose stderr is ours."""
    assert main(["eval", "data", "status", "eval=smoke", "eval.tasks=[smoke_mmul]"]) == 10
    assert capfd.readouterr() == (
        "",
        "error: eval.tasks: smoke_mmul is no task or group of suite smoke, nor of lm-evaluation-harness\n"
        "hint: did you mean smoke_mmlu?\n",
    )


@pytest.mark.processes
def test_the_built_in_suite_needs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "data", "status", "eval=smoke"]) == 0
    assert capfd.readouterr() == ("", "suite smoke needs no datasets: its items are built in\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nothing"], 13, "nothing: there is no run in "),
        (["./nothing"], 13, "TARGET=./nothing: no such folder\nhint: TARGET is a run, a checkpoint's folder"),
        (["--at", "200X", "."], 10, "--at='200X': is not a token count"),
        (["."], 21, "TARGET=.: is neither a run (it has no config.yaml), nor a checkpoint"),
    ],
)
def test_an_invalid_target_is_refused_before_anything_is_created(
    argv: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *argv, "--runs-dir", str(tmp_path / "runs")]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {words}")
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_not_evaluated_by_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    argv = ["eval", str(tmp_path / "model"), "experiment=hlat_7b", "--runs-dir", str(tmp_path / "runs")]
    assert main(argv) == 10
    message = capsys.readouterr().err
    assert message.startswith(
        "error: cluster.launcher=simulated: simulates jobs and starts none, so nothing would be evaluated"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("argv", [["eval"], ["eval", "--help"], ["eval", "target", "--help"]])
def test_the_help_is_about_the_target_and_names_the_other_command(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "TARGET" in shown.splitlines()[0]
    assert "--at TOKENS" in shown
    assert "hlatctl eval data --help" in shown


def _milestone(**progress: Any) -> MilestoneState:
    return MilestoneState(10, 1, progress=EvaluationProgress(["piqa", "gsm8k"], **progress))


def test_progress_names_task_requests_and_the_time_that_is_left() -> None:
    assert evaluation_line(_milestone()) == "starting"
    assert evaluation_line(_milestone(task="piqa")) == "piqa (task 1 of 2)"
    known = {"task": "gsm8k", "done": 40, "total": 100, "done_before": 20, "task_started_unix_s": 5.0}
    line = evaluation_line(_milestone(**known, counted=[(95.0, 20), (105.0, 40)]))
    assert line == "gsm8k (task 2 of 2) · 40 of 100 requests · 30 s left for this task"


def test_plain_progress_is_a_line_a_task() -> None:
    stream, state = io.StringIO(), RunState()
    observer = PlainEvaluationObserver(stream)
    observer.update(state, Config())
    for task, done in (("piqa", 1), ("piqa", 2), ("gsm8k", 0)):
        state.milestones[10] = _milestone(task=task, done=done, total=5)
        observer.update(state, Config())
    assert stream.getvalue().splitlines() == [
        "piqa (task 1 of 2) · 1 of 5 requests",
        "gsm8k (task 2 of 2) · 0 of 5 requests",
    ]


def test_plain_progress_says_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, state, clock_s = io.StringIO(), RunState(), iter((0.0, 60.0, 120.0))
    monkeypatch.setattr("hlatctl.cli.progress.time.monotonic", lambda: next(clock_s))
    observer = PlainEvaluationObserver(stream)
    for done in (1, 1, 2):
        state.milestones[10] = _milestone(task="piqa", done=done, total=5)
        observer.update(state, Config())
    assert len(stream.getvalue().splitlines()) == 2


Call = tuple[int, str, str]
TASK = {"alias": "gsm8k", "exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": "N/A"}
LM_EVAL: dict[str, Any] = {
    "results": {"gsm8k": TASK},
    "versions": {"gsm8k": 3.0},
    "n-shot": {"gsm8k": 5},
    "n-samples": {"gsm8k": {"original": 1319, "effective": 1319}},
    "config": {"model_args": {"pretrained": "org/some-model"}},
    "lm_eval_version": "0.4.9",
    "date": 1748736000.0,
}


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return exported_run(tmp_path / "runs")


def call(runs_dir: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> Call:
    code = main([*argv, "--runs-dir", os.fspath(runs_dir)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def import_of(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[Call, Path]:
    file = tmp_path / "results_2025-06-01T00-00-00.000000.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return call(tmp_path / "runs", capsys, "eval", "import", os.fspath(file), *argv), file


@pytest.mark.processes
@pytest.mark.parametrize("form", ["lm_eval", "lighteval", "olmes"])
def test_an_export_gives_the_same_scores_when_it_is_imported(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    runs_dir = run.root.parent
    code, out, _ = call(runs_dir, capsys, "eval", "export", "base:400B", "--format", form)
    assert code == 0
    (code, name, error), file = import_of(out, tmp_path, capsys, "--name", "theirs")
    assert (code, error.splitlines()[0].partition(" in ")[0]) == (0, f"{scores_of(run)[1]} scores imported from {file}")
    copy = RunPaths(runs_dir / name.strip())
    assert scores_of(copy)[0] == scores_of(run)[0]
    state = read_state(copy)
    assert (state.labels.name, state.status, state.imported["sha256"]) == (
        "theirs",
        "finished",
        files.sha256_file(file),
    )


def scores_of(run: RunPaths) -> tuple[dict[str, Any], int]:
    milestones = read_state(run).milestones
    newest = max(tokens for tokens, each in milestones.items() if each.status == "evaluated")
    found = {
        name: {key: each[key] for key in ("metric", "value", "stderr", "n")}
        for name, each in milestones[newest].scores.items()
        if not name.startswith("validation_")
    }
    return found, len(found)


@pytest.mark.processes
def test_an_imported_score_is_shown_with_its_origin_and_is_not_ranked(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, name, _), _ = import_of(LM_EVAL, tmp_path, capsys)
    code, out, _ = call(run.root.parent, capsys, "compare", "base", name.strip())
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("GSM8K"))
    assert "10.00 ‖ (shots 5)" in row
    assert "‖: imported, contract unknown; not ranked" in out
    assert "lm_eval 0.4.9, org/some-model, 2025-06-01" in out
    provenance = files.read_json(RunPaths(run.root.parent / name.strip()).provenance)
    assert provenance["imported"]["file"] == "results_2025-06-01T00-00-00.000000.json"
    for command in (["eval", name.strip()], ["resume", name.strip()]):
        code, _, error = call(run.root.parent, capsys, *command)
        assert code == 21
        assert "has scores that were imported, and no model to evaluate\nhint: `hlatctl compare" in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "can't be imported"),
        ("[1]", "holds list, expected an object"),
        ("{}", "has none of the keys results"),
        ('{"results": [1]}', "can't be imported"),
        ('{"results": {"a": 1}}', "can't be imported"),
        ('{"results": {"a": {"acc,none": NaN}}}', "has no figure that is a finite number"),
        ('{"results": {"a": {"acc,none": "high"}}}', "has no figure that is a finite number"),
        ('{"results": {"a": {"acc,none": 1e999}}}', "has no figure that is a finite number"),
        ('{"results": {"../..": {"acc,none": 1}}}', "a name has 0 letters and digits"),
        ('{"results": {"' + "a" * 200 + '": {"acc,none": 1}}}', "must have 1 to 120"),
        ('{"results": {"a b": {"acc,none": 1}, "a-b": {"acc,none": 1}}}', "two results have the name a_b"),
        ('{"results": ' + "[" * 5000 + "]" * 5000 + "}", "nested"),
        ('{"config_general": 3, "results": {"a|0": {"acc": 1}}}', "can't be imported"),
        ('{"all_primary_scores": [], "tasks": [3]}', "can't be imported"),
        ("\ud800", "can't be imported"),
    ],
)
def test_a_file_that_is_refused_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "results.json"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    code, out, error = call(tmp_path / "runs", capsys, "eval", "import", os.fspath(file))
    assert (code, out) == (11, "")
    assert said in error
    assert "\nhint: name a results_*.json" in error
    assert list_runs(tmp_path / "runs") == []


@pytest.mark.processes
def test_a_missing_file_and_a_folder_with_two_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    code, _, error = call(tmp_path / "runs", capsys, "eval", "import", os.fspath(folder / "results.json"))
    assert (code, "can't be read (No such file" in error) == (10, True)
    for day in ("01", "02"):
        (folder / f"results_2025-06-{day}T00-00-00.json").write_text(json.dumps(LM_EVAL))
    code, _, error = call(tmp_path / "runs", capsys, "eval", "import", os.fspath(tmp_path))
    assert (code, "has 2 files of results (model/results_2025-06-01T00-00-00.json, " in error) == (10, True)
    (folder / "results_2025-06-02T00-00-00.json").unlink()
    code, name, _ = call(tmp_path / "runs", capsys, "eval", "import", os.fspath(tmp_path))
    assert (code, name[:20]) == (0, "imported-some-model-")


@pytest.mark.processes
def test_a_name_from_a_file_is_cleaned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {**LM_EVAL, "model_name": "\x1b[31m../../evil\n<b>", "results": {"a/\x1b[2J../b": {"acc,none": 0.5}}}
    (code, name, _), _ = import_of(hostile, tmp_path, capsys)
    state = read_state(RunPaths(tmp_path / "runs" / name.strip()))
    assert (code, list(state.milestones[0].scores)) == (0, ["a_2J_b"])
    assert state.evaluates == "\\x1b[31m../../evil <b>"
    assert name.startswith("imported-evil--b-")


@pytest.mark.processes
def test_forms_of_the_evaluators_themselves_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_lighteval = {
        "config_general": {"lighteval_sha": "017581f", "max_samples": None, "model_name": "gpt2"},
        "results": {
            "leaderboard|arc:challenge|25|0": {"acc": 0.3, "acc_stderr": 0.01, "acc_norm": 0.4},
            "leaderboard|mmlu:_average|5|0": {"acc": 0.25},
            "all": {"acc": 0.27},
        },
        "versions": {"leaderboard|arc:challenge|25|0": 0},
        "config_tasks": {"leaderboard|arc:challenge|25": {"original_num_docs": 1172, "effective_num_docs": 1172}},
    }
    found = scores_of_import(of_lighteval, tmp_path, capsys)
    assert list(found) == ["arc_challenge", "arc_challenge_acc_norm", "mmlu"]
    known = {"metric": "acc", "value": 0.3, "stderr": 0.01, "n": 1172, "items": 1172, "shots": 25, "version": "0"}
    assert found["arc_challenge"] == known
    of_olmes = {
        "all_primary_scores": ["arc_easy::olmes: 0.7"],
        "tasks": [
            {
                "alias": "arc_easy::olmes",
                "metrics": {"acc_raw": 0.69, "acc_per_char": 0.7, "num_bytes": 30.5, "primary_score": 0.7},
                "num_instances": 1000,
                "task_config": {"primary_metric": "acc_per_char", "num_shots": 5, "limit": 1000},
            },
            {"alias": "core", "metrics": {"primary_score": 0.6}, "task_config": {"primary_metric": "macro"}},
        ],
        "model_config": {"model": "olmo-1b"},
    }
    found = scores_of_import(of_olmes, tmp_path, capsys)
    assert found == {
        "arc_easy_olmes": {**score("acc_per_char", 0.7, None, 1000), "shots": 5},
        "core": {"metric": "primary_score", "value": 0.6, "stderr": None, "n": None},
    }


def scores_of_import(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (code, name, _), _ = import_of(value, tmp_path, capsys)
    assert code == 0
    return read_state(RunPaths(tmp_path / "runs" / name.strip())).milestones[0].scores


def test_a_milestone_is_named_in_the_same_way_by_each_command(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["eval", "export"], ["eval", "show", "--task", "piqa"], ["compare", "base", "--paired"]):
        code, _, error = call(run.root.parent, capsys, *command, "base:300B")
        assert (code, "base has no evaluated milestone of 300,000,000,000 tokens" in error) == (10, True)


def sample(number: int, value: float, **more: Any) -> dict[str, Any]:
    hashes = {name: f"{name}{number}" for name in ("doc_hash", "prompt_hash", "target_hash")}
    line = {"doc_id": number, "doc": {"question": "?"}, "target": "4", "arguments": {}, "resps": [["5"]]}
    return {**line, **hashes, "filtered_resps": ["5"], "filter": "strict-match", "metrics": ["exact_match"],
            "exact_match": value, **more}  # fmt: skip


def write_samples(folder: Path, model: str, values: list[float], *extra: str) -> Path:
    """Write results and samples as the harness does."""
    (folder / model).mkdir()
    lines = [json.dumps(sample(number, value)) for number, value in enumerate(values)]
    path = folder / model / "samples_gsm8k_2025-06-01T00-00-00.jsonl"
    path.write_text("\n".join([*lines, *extra]) + "\n", encoding="utf-8")
    (folder / model / "results_2025-06-01T00-00-00.json").write_text(json.dumps({**LM_EVAL, "model_name": model}))
    return path


@pytest.mark.processes
def test_imported_samples_are_compared_question_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_dir, names = tmp_path / "runs", []
    for model, values in (("one", [0.0] * 12), ("two", [1.0] * 10 + [0.0, 0.0, 0.0])):
        write_samples(tmp_path, model, values)
        code, name, error = call(runs_dir, capsys, "eval", "import", os.fspath(tmp_path / model))
        assert (code, "1 scores, and items of 1 task, imported" in error) == (0, True)
        names.append(name.strip())
    code, out, _ = call(runs_dir, capsys, "compare", *names, "--paired", "--format", "json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["name"], row["items"], row["unpaired"]) == (0, "gsm8k", 12, 1)
    assert (row["first"], row["second"], row["p"]) == (0.0, pytest.approx(10 / 12), pytest.approx(2 / 2**10))
    code, _, error = call(runs_dir, capsys, "eval", "export", names[0])
    assert (code, "which are not written as its own" in error) == (21, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "can't be imported"), ("3", "can't be imported"), ('{"metrics": 1}', "can't be imported"),
     ('{"metrics": [], "doc_id": 1, "arguments": []}', "'filtered_resps' is missing")],
)  # fmt: skip
def test_damaged_samples_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    path = write_samples(tmp_path, "one", [1.0], line)
    code, _, error = call(tmp_path / "runs", capsys, "eval", "import", os.fspath(tmp_path / "one"))
    assert (code, said in error) == (11, True), error
    assert f"error: {path}" in error
    assert list_runs(tmp_path / "runs") == []


def test_an_imported_score_is_ranked_if_all_that_is_known_agrees() -> None:
    known = Conditions(shots=5, limit=None, whole=True, definition="lm_eval 0.4.13, 1.0")
    cells: list[Cell | None] = [
        Cell(value=41.0, stderr=0.4, n=100, conditions=known, contract="c", remark=""),
        Cell(value=45.0, stderr=0.4, n=100, conditions=known, contract=None, remark=IMPORTED),
        Cell(value=46.0, stderr=0.4, n=99, conditions=known, contract=None, remark=IMPORTED),
        *(
            Cell(value=47.0, stderr=0.4, n=100, conditions=replace(known, **other), contract=None, remark=IMPORTED)
            for other in ({"shots": 0}, {"definition": "lm_eval 0.4.9, 1.0"}, {"definition": None}, {"whole": None})
        ),
    ]
    found = [cell for cell in ranked("highest", marked(cells)) if cell]
    assert [cell.remark for cell in found] == ["", IMPORTED, *[IMPORTED_UNKNOWN] * 5]
    assert [cell.standing for cell in found] == ["", "best", *[""] * 5]


@pytest.mark.processes
def test_a_job_evaluates_with_the_words_of_the_command(
    make_run: MakeRun, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    (folder := run.root.parent / "own").mkdir()
    words = ["eval", "example", "eval.limit=7", "--new-contract", "--config-dir", str(folder), "--yes", "--driver"]
    assert main([*words, "slurm"]) == 10
    assert "hint: omit --driver" in capsys.readouterr().err
    on_slurm = replace(of_run(run), cluster=ClusterConfig(launcher="slurm"))
    monkeypatch.setattr("conf.of_run.of_run", lambda run: on_slurm)
    monkeypatch.setattr("flows.evaluate.contracts_of", lambda request: None)
    assert main([*words, "slurm"]) == 0
    assert "the evaluation's driver is Slurm job 7;" in capsys.readouterr().err
    script = run.evaluator_job.with_suffix(".sh").read_text()
    assert f"{run.evaluator_job} eval example eval.limit=7 --new-contract --config-dir {folder} --yes" in script
