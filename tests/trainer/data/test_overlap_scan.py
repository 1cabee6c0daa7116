"""What a scan finds of each item, in the documents that the loader has handed out according to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config, TrainConfig
from hlatctl.run import files
from hlatctl.run.errors import CheckpointError, DataError
from trainer.data.loader import Loader
from trainer.data.overlap_scan import Consumed, Items, Place


def _config(rows: int) -> Config:
    return Config(seed=1, train=TrainConfig(global_batch_size=rows, seq_len=256))


def _read(config: Config, dataset: dict[str, Any], batches: int) -> tuple[set[tuple[int, int]], Consumed]:
    """Return the source and position of each document in some batches, and what their state says."""
    loader = Loader(config, dataset, rank=0, size=1)
    try:
        seen = set()
        for _ in range(batches):
            loader.next()
            seen |= {(span.source, span.document) for row in loader.spans for span in row}
        return seen, Consumed(config, dataset, loader.state)
    finally:
        loader.close()


def _said(consumed: Consumed) -> list[tuple[int, int]]:
    return [(each.source, each.position) for chunk in consumed.chunks for each in consumed.readings(chunk)]


@pytest.mark.parametrize(("rows", "batches"), [(4, 1), (4, 25), (4, 200), (300, 3)])
def test_the_documents_are_those_of_the_batches(dataset: Path, rows: int, batches: int) -> None:
    description = json.loads(dataset.read_text())
    seen, consumed = _read(_config(rows), description, batches)
    assert set(_said(consumed)) == seen


def test_a_source_that_was_read_whole_is_listed_once_in_order(dataset: Path) -> None:
    _, consumed = _read(_config(4), json.loads(dataset.read_text()), 400)
    assert _said(consumed) == [(0, position) for position in range(len(consumed))]
    assert consumed.text_bytes == pytest.approx(sum(len(str(text).encode()) for text in consumed.sources[0].documents))


def test_an_unfinished_document_counts_with_its_read_tokens(dataset: Path) -> None:
    _, consumed = _read(_config(4), json.loads(dataset.read_text()), 1)
    opened = consumed.readings(consumed.chunks[-1])
    assert opened
    assert all(each.tokens and each.tokens <= 256 for each in opened)
    assert len(consumed) == len(_said(consumed)) - len(opened)


def test_a_state_of_another_batch_size_is_refused(dataset: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train\.global_batch_size=4"):
        Consumed(_config(4), json.loads(dataset.read_text()), [[1, 0, 0, 0]])


@pytest.fixture
def items(tmp_path: Path) -> Items:
    """Three items of 20 words each: of each, 8 n-grams of 13 words."""
    path = tmp_path / "items.jsonl"
    texts = {name: " ".join(f"{name}{word}" for word in range(20)) for name in "abc"}
    lines = [json.dumps({"task": "quiz", "item": name, "text": text}) for name, text in texts.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return Items(path)


def test_each_item_has_its_own_hits_and_the_first_of_them(items: Items) -> None:
    text = {items.tables[0].text(ngram).split()[0].decode(): ngram for ngram in range(len(items))}
    found = {text["a3"]: Place(2, 0, 0), text["a5"]: Place(1, 0, 7), text["c0"]: Place(0, 0, 1)}
    overlapping = items.results(found)["quiz"]["overlapping"]
    assert {name: (item["found"], item["ngrams"]) for name, item in overlapping.items()} == {"a": (2, 8), "c": (1, 8)}
    assert overlapping["a"]["place"] == Place(1, 0, 7)
    assert overlapping["a"]["example"].startswith("a5 ")


def test_nothing_found_is_no_overlap(items: Items) -> None:
    assert items.results({})["quiz"]["overlapping"] == {}


def test_items_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps({"task": "quiz", "item": "a", "text": "x " * 500}), encoding="utf-8")
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match="line 1 has 1,0"):
        Items(path)
    with path.open("ab") as file:
        file.truncate(2 << 30)
    with pytest.raises(DataError, match="2,147,483,648 bytes"):
        Items(path)
