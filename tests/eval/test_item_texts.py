"""The texts of items are questions with their right answers, under the names that evaluations give them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config, EvalConfig
from eval import item_texts
from hlatctl.run.errors import EvaluationError, StorageError


def _written(config: Config, path: Path) -> dict[str, dict[str, str]]:
    number = item_texts.write(config, path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(records) == number
    return {
        task: {record["item"]: record["text"] for record in records if record["task"] == task}
        for task in dict.fromkeys(record["task"] for record in records)
    }


def test_the_built_in_suite_has_questions_with_answers(tmp_path: Path) -> None:
    texts = _written(Config(eval=EvalConfig(limit=3)), tmp_path / "items.jsonl")
    assert {name: len(items) for name, items in texts.items()} == {name: len(_lines(name)) for name in texts}
    items = _lines("smoke_mmlu")
    first = texts["smoke_mmlu"]["0"]
    assert items[0]["question"] in first
    programs = _lines("smoke_humaneval")
    assert texts["smoke_humaneval"][programs[0]["task_id"]].startswith(programs[0]["prompt"])


def _lines(task: str) -> list[dict[str, str]]:
    (path,) = (Path(item_texts.__file__).parent / "tasks" / "suites").rglob(f"{task}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("task", ["winogrande", "truthfulqa_mc1", "gsm8k", "boolq", "triviaqa", "humaneval"])
def test_each_kind_of_task_gives_text_with_its_answer(tiny_data: Path, tmp_path: Path, task: str) -> None:
    wanted = replace(compose(["eval=hlat"]).eval, data_dir=str(tiny_data), tasks=[task])
    (items,) = _written(Config(eval=wanted), tmp_path / "items.jsonl").values()
    assert list(items) == [str(n) for n in range(len(items))] or task == "humaneval"
    assert all(len(text.split()) > 3 and not text.startswith(("[", "0", "1")) for text in items.values())


def test_an_item_that_can_not_be_rendered_gives_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_texts, "_text", lambda *_: 1 / 0)
    with pytest.raises(EvaluationError, match="item 0 can't be rendered"):
        item_texts.write(Config(), tmp_path / "items.jsonl")
    assert not (tmp_path / "items.jsonl").exists()


def test_a_file_that_can_not_be_written_gives_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        item_texts.write(Config(), tmp_path / "file" / "items.jsonl")
