"""Scores and items of other evaluators: their names, our columns, and pairs only if the questions are known.

The structures are those that lm-evaluation-harness 0.4.13, lighteval 0.13 and OLMES write.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from hlatctl.report.exchange import imported, source
from hlatctl.report.exchange.imported import Figures, row
from hlatctl.report.items import read_lines
from hlatctl.run.errors import DataError
from hlatctl.run.evaluations import COLUMNS


def test_bits_per_byte_have_the_name_of_our_own() -> None:
    found = Figures(form="olmes")
    found.add("piqa", [("acc", "", 0.5, 0.1), ("bits_per_byte", "", 1.2, 0.05), ("acc_per_token", "", 0.6, 0.1)])
    assert list(found.figures) == ["piqa", "piqa_bpb", "piqa_acc_per_token"]
    found.add("wikitext", [("bits_per_byte", "none", 0.8, None)])
    assert list(found.figures)[3:] == ["wikitext"], "its first metric"


@pytest.mark.parametrize(
    ("metric", "value", "stderr", "says"),
    [
        ("acc", -5, -1, "piqa: acc=-5: must be 0 to 1"),
        ("acc_norm", 45.0, None, "piqa: acc_norm=45: must be 0 to 1"),
        ("exact_match", 1.01, None, "must be 0 to 1"),
        ("pass@10", 12, None, "pass@10=12: must be 0 to 1"),
        ("rougeL", 101, None, "must be 0 to 100"),
        ("mcc", -2, None, "must be -1 to 1"),
        ("word_perplexity", 0.5, None, "must be at least 1"),
        ("bits_per_byte", -0.1, None, "must be at least 0"),
        ("of_its_own", -5, -0.1, "piqa: of_its_own_stderr=-0.1: must be at least 0"),
    ],
)
def test_a_score_outside_of_its_metrics_range_is_refused(
    metric: str, value: float, stderr: float | None, says: str
) -> None:
    with pytest.raises(DataError) as raised:
        Figures(form="lm_eval").add("piqa", [(metric, "", value, stderr)])
    assert says in raised.value.message


def test_scores_at_the_ends_of_their_ranges_and_those_of_unknown_metrics_are_taken() -> None:
    metrics = [("acc", 1 + 1e-15), ("mcc", -1), ("f1", 87.5), ("ter", 120.0), ("logits_per_byte_corr", -7.5)]
    found = Figures(form="olmes")
    for name, value in metrics:
        found.add(name, [(name, "", value, 0.0)])
    assert len(found.figures) == len(metrics)


def test_an_items_accuracy_is_a_fraction_and_its_perplexity_can_be_a_log_likelihood() -> None:
    fixed: dict[str, Any] = {"item": 0, "document": None, "prompt": "", "target": ""}
    assert row(**fixed, metrics={"acc": True, "perplexity": -3.0})["metrics"] == [("acc", 1.0), ("perplexity", -3.0)]
    with pytest.raises(DataError, match="an item: acc=-5: must be 0 to 1"):
        row(**fixed, metrics={"acc": -5})


_DATE = "2026-01-02T03-04-05.000006"


def items_of(path: Path, tmp_path: Path, task: str) -> list[dict[str, Any]]:
    to = tmp_path / "items"
    to.mkdir()
    table = parquet.read_table(source.read(path, to).samples[task])
    assert table.column_names == list(COLUMNS)
    return [{**each, "metrics": dict(each["metrics"])} for each in table.to_pylist()]


def asked(tmp_path: Path, task: str) -> list[str]:
    return [line.asked for line in read_lines(tmp_path / "items" / f"items-{task}.parquet", "")]


def write_lm_eval(folder: Path, *samples: dict[str, Any]) -> Path:
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    (folder / f"samples_piqa_{_DATE}.jsonl").write_text(lines)
    path = folder / f"results_{_DATE}.json"
    path.write_text(json.dumps({"results": {"piqa": {"acc,none": 1.0}, "../piqa": {"acc,none": 1.0}}}))
    return path


def lm_eval_sample(**more: Any) -> dict[str, Any]:
    doc = {"goal": "Stir ü", "label": 1}
    requests = {f"gen_args_{n}": {"arg_0": "Question: Stir", "arg_1": f" {n}"} for n in range(2)}
    return {
        "doc_id": 7,
        "doc": doc,
        "target": "1",
        "arguments": requests,
        "resps": [[["-3.5", "False"]], [["-2.5", "True"]]],
        "filtered_resps": [["-3.5", "False"], ["-2.5", "True"]],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()).hexdigest(),
        "prompt_hash": hashlib.sha256(b"Question: Stir").hexdigest(),
        "target_hash": hashlib.sha256(b"1").hexdigest(),
        "acc": 1.0,
        **more,
    }


def test_samples_of_the_harness_have_choices_and_the_hashes_that_it_wrote(tmp_path: Path) -> None:
    sample = lm_eval_sample()
    with pytest.raises(DataError, match="two results have the name piqa"):
        source.read(write_lm_eval(tmp_path, sample))
    path = write_lm_eval(tmp_path, sample)
    path.write_text(path.read_text().replace("../piqa", "../other"))
    (item,) = items_of(path, tmp_path, "piqa")
    assert (item["item"], item["prompt"], item["target"], item["answer"]) == ("7", "Question: Stir", "1", "")
    assert (item["choices"], item["loglikelihoods"]) == ([" 0", " 1"], [-3.5, -2.5])
    assert item["metrics"] == {"acc": 1.0}
    assert asked(tmp_path, "piqa") == [" ".join(sample[f"{name}_hash"] for name in ("doc", "prompt", "target"))]


def test_written_answers_and_samples_of_early_releases_are_read(tmp_path: Path) -> None:
    written = lm_eval_sample(arguments=[["Question: Stir", {"until": ["\n"]}]], filtered_resps=[["left", "right"]])
    path = write_lm_eval(tmp_path, written)
    path.write_text(json.dumps({"results": {"piqa": {"acc,none": 1.0}}}))
    (item,) = items_of(path, tmp_path, "piqa")
    assert (item["prompt"], item["choices"], item["answer"]) == ("Question: Stir", [], "left")


def doc(number: str, **more: Any) -> dict[str, Any]:
    return {
        **{"query": f"Question {number}", "choices": [" a", " b"], "gold_index": 1, "instruction": None},
        **{"id": number, "task_name": "arc:challenge|1", "fewshot_samples": [], **more},
    }


def write_lighteval(root: Path, details: list[dict[str, Any]]) -> Path:
    results, dated = root / "results" / "org" / "model", root / "details" / "org" / "model" / _DATE
    results.mkdir(parents=True)
    dated.mkdir(parents=True)
    long = "acc:logprob_normalization=LogProbCharNorm(name='norm', ignore_first_space=False)"
    value = {
        "config_general": {"lighteval_sha": "?", "max_samples": 5, "model_name": "org/model"},
        "results": {
            "arc:challenge|1": {"acc": 0.5, "acc_stderr": 0.1, long: 0.6, f"{long}_stderr": 0.2},
            "arc:challenge|0": {"acc": 0.4},
            "all": {"acc": 0.45},
        },
        "versions": {},
        "config_tasks": {"arc:challenge|1": {"version": 2, "original_num_docs": -1, "effective_num_docs": -1}},
    }
    (results / f"results_{_DATE}.json").write_text(json.dumps(value))
    parquet.write_table(Table.from_pylist(details), dated / f"details_arc:challenge|1_{_DATE}.parquet")
    return results / f"results_{_DATE}.json"


def test_details_of_lighteval_are_found_beside_the_folder_of_results(tmp_path: Path) -> None:
    response = {"input": None, "text": [], "text_post_processed": [], "logprobs": [-2.0, -1.0]}
    examples = [doc("9")]
    path = write_lighteval(
        tmp_path,
        [
            {"doc": doc(each, fewshot_samples=examples), "metric": {"acc": 1, "acc:x=1": 0}, "model_response": response}
            for each in ("3", "4", "3")
        ],
    )
    first, _, again = items_of(path, tmp_path, "arc_challenge_1")
    assert source.read(path, tmp_path).figures.figures["arc_challenge_1"].n == 3, "the results say -1"
    assert (first["item"], again["item"]) == ("3", "3_2"), "two splits"
    assert (first["prompt"], first["target"]) == ("Question 9 b\n\nQuestion 3", "b")
    assert first["choices"] == [" a", " b"]
    assert (first["loglikelihoods"], first["metrics"]) == ([-2.0, -1.0], {"acc": 1.0, "acc:x=1": 0.0})
    assert "Question 9" not in first["document"], "other examples are another prompt, not another question"
    assert all(asked(tmp_path, "arc_challenge_1"))


def test_scores_of_lighteval_as_it_writes_them_are_read(tmp_path: Path) -> None:
    found = source.read(write_lighteval(tmp_path, [])).figures
    assert (found.version, found.limit) == ("", 5), "? is no version"
    names = ["arc_challenge_1", "arc_challenge_1_logprob_normalization_LogProbCharNorm_name_norm_ignore_fi_7a702a9e"]
    assert list(found.figures) == [*names, "arc_challenge_0"]
    first, second = (found.figures[name] for name in names)
    assert (first.version, first.n, first.items, first.shots) == ("2", None, None, 1)
    assert (second.value, second.stderr) == (0.6, 0.2)


def write_olmes(folder: Path, *, with_requests: bool = True) -> Path:
    config = {"task_name": "arc_easy", "split": "test", "primary_metric": "acc_raw"}
    config["metadata"] = {"alias": "arc_easy:rc::olmes"}  # type: ignore[assignment]
    metrics = {"acc_raw": 1.0, "primary_score": 1.0, "extra_metrics": {"num_tokens": 3}}
    one = {"task_name": "arc_easy", "task_config": {**config, "num_shots": 5, "limit": 1}, "metrics": metrics}
    (folder / "task-000-arc_easy-metrics.json").write_text(json.dumps({**one, "num_instances": 1}))
    outputs = [{"sum_logits": -2.0, "num_tokens": 1}, {"sum_logits": -1.0, "num_tokens": 1}]
    line = {"doc_id": 0, "native_id": "q1", "metrics": {"acc_raw": 1, "acc_uncond": None}, "model_output": outputs}
    (folder / "task-000-arc_easy-predictions.jsonl").write_text(json.dumps({**line, "label": 1}) + "\n")
    if with_requests:
        asked = [{"doc_id": 0, "idx": n, "doc": {"id": "q1"}, "request": {"context": "Q:", "continuation": f" {n}"}}
                 for n in range(2)]  # fmt: skip
        text = "".join(json.dumps(each) + "\n" for each in asked)
        (folder / "task-000-arc_easy-requests.jsonl").write_text(text)
    task = {"alias": "arc_easy:rc::olmes", "metrics": metrics, "num_instances": 1, "task_config": config}
    mean = {"alias": "core", "metrics": {"primary_score": 1.0}, "num_instances": 1, "task_config": {}}
    path = folder / "metrics.json"
    path.write_text(json.dumps({"all_primary_scores": [], "tasks": [mean, task], "model_config": {"model": "olmo"}}))
    return path


def test_predictions_of_olmes_have_prompt_and_choices_from_the_requests(tmp_path: Path) -> None:
    (item,) = items_of(write_olmes(tmp_path), tmp_path, "arc_easy_rc_olmes")
    assert (item["item"], item["prompt"], item["target"], item["metrics"]) == ("0", "Q:", "1", {"acc_raw": 1.0})
    assert (item["choices"], item["loglikelihoods"]) == ([" 0", " 1"], [-2.0, -1.0])
    assert all(asked(tmp_path, "arc_easy_rc_olmes"))


def test_predictions_without_requests_are_shown_but_are_not_paired(tmp_path: Path) -> None:
    (item,) = items_of(write_olmes(tmp_path, with_requests=False), tmp_path, "arc_easy_rc_olmes")
    assert (item["item"], item["document"], item["choices"]) == ("0", "", [])
    assert asked(tmp_path, "arc_easy_rc_olmes") == [""]


def test_settings_that_olmes_omits_have_its_defaults(tmp_path: Path) -> None:
    found = source.read(write_olmes(tmp_path)).figures.figures
    task, mean = found["arc_easy_rc_olmes"], found["core"]
    assert (task.metric, task.shots, task.n, task.items) == ("acc_raw", 0, 1, 1)
    assert (mean.metric, mean.shots, mean.items) == ("primary_score", None, None)
    (one,) = source.read(tmp_path / "task-000-arc_easy-metrics.json").figures.figures.values()
    assert (one.shots, one.n, one.items) == (5, 1, None)


def test_a_task_with_too_many_items_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lm_eval(tmp_path, lm_eval_sample(), lm_eval_sample())
    path.write_text(json.dumps({"results": {"piqa": {"acc,none": 1.0}}}))
    monkeypatch.setattr(imported, "MOST_ITEMS", 1)
    with pytest.raises(DataError, match="has more than 1 items, or"):
        source.read(path, tmp_path)
    monkeypatch.setattr(imported, "MOST_FILE_BYTES", 100)
    with pytest.raises(DataError, match="has more than 100 bytes, or a line"):
        source.read(path, tmp_path)


def test_a_likelihood_that_is_no_number_hides_the_choices() -> None:
    found = row(item=0, document={}, prompt="", target="", metrics={"acc": True, "odd": "x", "nan": float("nan")},
                choices=["a", "b"], loglikelihoods=["-1.0", "-inf"])  # fmt: skip
    assert (found["choices"], found["loglikelihoods"], found["metrics"]) == ([], [], [("acc", 1.0)])


def test_a_small_file_of_huge_texts_is_refused_at_its_first_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported, "_MOST_LINE_BYTES", 1 << 10)
    response = {"input": "x" * 2_000, "text": [], "text_post_processed": [], "logprobs": [-1.0, -2.0]}
    detail = {"doc": doc("0"), "metric": {"acc": 1}, "model_response": response}
    with pytest.raises(DataError, match=r"can't be imported \(item 1 has more than 1 KiB of text\)"):
        source.read(write_lighteval(tmp_path, [detail] * 3), tmp_path)


def test_details_of_an_early_lighteval_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_lighteval(tmp_path, [{"doc": doc("0"), "metrics": {"acc": 1}}])
    with pytest.raises(DataError, match=r"has no column metric; only details of lighteval 0.11 and later are read"):
        source.read(path, tmp_path)


def test_a_task_of_olmes_with_several_numbers_of_shots_has_them_in_its_names(tmp_path: Path) -> None:
    path = write_olmes(tmp_path)
    value = json.loads(path.read_text())
    again = json.loads(json.dumps(value["tasks"][1]))
    again["task_config"]["num_shots"] = 5
    path.write_text(json.dumps({**value, "tasks": [*value["tasks"], again]}))
    assert list(source.read(path).figures.figures) == ["core", "arc_easy_rc_olmes_0", "arc_easy_rc_olmes_5"]
