"""Items in what a run has read are found, once; a scan continues after a stop, and its parts join."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from conf.load import load
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import ConfigError, DataError, HlatctlError
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeConfig, MakeRun
from trainer.data import overlap, overlap_scan, tokenize
from trainer.data.documents import sources_of
from trainer.data.loader import Loader
from trainer.data.ngrams import normalise
from trainer.data.overlap import find, shard_of
from trainer.data.prepare import prepare

STEP = 3
_ABSENT = "these words about purple elephants that juggle seven lemons stand nowhere in any python module at all"


@pytest.fixture
def trained(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run that has read a part of its corpus, in chunks of a few documents."""
    monkeypatch.setattr(overlap_scan, "_LEAST_BYTES", 2 << 10)
    run = make_run(tmp_path / "run", train={"tokens": 24 * 4 * 256, "seq_len": 256})
    _save(run, batches=20)
    return run


def _save(run: RunPaths, *, batches: int) -> None:
    """Write the checkpoint of a run that has read this many batches."""
    loader = Loader(load(run.config), json.loads(run.dataset.read_text()), rank=0, size=1)
    for _ in range(batches):
        loader.next()
    state = loader.state
    loader.close()
    files.write_json(_states(run), {"loader": state, "rng": [{}], "rng_of_rank": [0]})
    write_manifest(run.checkpoint(STEP), step=STEP, tokens=STEP, world={"world_size": 1})


def _documents(run: RunPaths) -> tuple[list[str], list[str]]:
    """Return texts that the run has read, and texts that it has not."""
    dataset = json.loads(run.dataset.read_text())
    said = overlap_scan.Consumed(load(run.config), dataset, files.read_json(_states(run))["loader"])
    read = {each.position for chunk in said.chunks for each in said.readings(chunk)}
    texts = [str(text) for text in sources_of(dataset)[0].documents]
    return [texts[i] for i in sorted(read)], [text for i, text in enumerate(texts) if i not in read]


def _states(run: RunPaths) -> Path:
    return run.checkpoint(STEP) / "ranks.json"


def _words(text: str, first: int, number: int) -> str:
    return b" ".join(normalise(text).split()[first : first + number]).decode()


def _long(texts: list[str], words: int) -> str:
    return next(text for text in texts if len(normalise(text).split()) >= words)


def _items(folder: Path, *texts: str, task: str = "quiz") -> Path:
    path = folder / "items.jsonl"
    lines = [json.dumps({"task": task, "item": str(i), "text": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _quiz(summary: dict[str, Any]) -> dict[str, Any]:
    quiz: dict[str, Any] = summary["tasks"]["quiz"]
    return quiz


def test_items_in_read_documents_overlap_and_others_do_not(trained: RunPaths, tmp_path: Path) -> None:
    read, unread = _documents(trained)
    stem = _words(_long(read, 40), 5, 26)
    items = _items(tmp_path, f"{_ABSENT} {stem}", stem.upper().replace(" ", ", "), _ABSENT, _long(unread, 40))
    found = find(trained, STEP, items, tmp_path / "to", workers=1)
    quiz = _quiz(found)
    assert (quiz["words"], quiz["items"], quiz["short"]) == (13, 4, 0)
    assert quiz["overlapping"]["1"]["found"] == quiz["overlapping"]["1"]["ngrams"] == len(set(_grams(stem, 13)))
    assert 0 < quiz["overlapping"]["0"]["found"] < quiz["overlapping"]["0"]["ngrams"]
    assert quiz["overlapping"]["0"]["example"] == _words(stem, 0, 13)
    assert "2" not in quiz["overlapping"]
    shown = quiz["overlapping"]["0"]
    lines = Path(shown["file"]).read_text(encoding="utf-8").splitlines()
    assert shown["example"] in _words(json.loads(lines[shown["row"] - 1])["text"], 0, 10_000)
    truth = set().union(*(_grams(text, 13) for text in read))
    unread_hits = len(set(_grams(_long(unread, 40), 13)) & truth)
    assert quiz["overlapping"].get("3", {"found": 0})["found"] <= unread_hits
    assert found["complete"]
    assert found["documents"] == len(read)


def _results(folder: Path) -> list[dict[str, Any]]:
    return [files.read_sealed_json(path) for path in folder.glob(f"*/{overlap.RESULT}")]


def _grams(text: str, words: int) -> list[str]:
    split = normalise(text).decode().split()
    return [" ".join(split[i : i + words]) for i in range(len(split) - words + 1)]


def test_each_process_and_each_shard_finds_its_part_and_all_join(trained: RunPaths, tmp_path: Path) -> None:
    read, _ = _documents(trained)
    items = _items(tmp_path, *(text for text in read if len(text.split()) > 20))
    whole = find(trained, STEP, items, tmp_path / "whole", workers=1)
    for shard in ((0, 3), (2, 3)):
        part = find(trained, STEP, items, tmp_path / "parts", workers=1, shard=shard)
        assert not part["complete"]
        assert not _results(tmp_path / "parts")
    joined = find(trained, STEP, items, tmp_path / "parts", workers=1)
    assert joined["complete"]
    for name in ("tasks", "documents", "text_bytes"):
        assert joined[name] == whole[name]
    assert [result["tasks"] for result in _results(tmp_path / "parts")] == [whole["tasks"]]


def test_a_stopped_scan_continues_where_it_was(
    trained: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, _ = _documents(trained)
    items, to = _items(tmp_path, *(text for text in read if len(text.split()) > 20)), tmp_path / "to"
    seen: list[int] = []
    scan = overlap_scan.Worker.scan

    def interrupted(worker: Any, chunk: overlap_scan.Chunk) -> Any:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(chunk.number)
        return scan(worker, chunk)

    monkeypatch.setattr(overlap, "end_with_parent", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(overlap_scan.Worker, "scan", interrupted)
        argv = ["--run-dir", str(trained.root), "--step", str(STEP), "--items", str(items), "--to", str(to)]
        assert overlap.main([*argv, "--workers", "1"]) == 130
    assert "the same command continues" in capsys.readouterr().err
    rest = find(trained, STEP, items, to, workers=1, most=1)
    assert not rest["complete"]
    again = find(trained, STEP, items, to, workers=1)
    assert again["tasks"] == find(trained, STEP, items, tmp_path / "fresh", workers=1)["tasks"]
    assert again["documents"] == len(read), "no chunk is scanned twice"


def test_a_scan_of_other_items_keeps_the_progress_and_the_result_of_the_first(
    trained: RunPaths, tmp_path: Path
) -> None:
    items = _items(tmp_path, _long(_documents(trained)[0], 40))
    find(trained, STEP, items, tmp_path / "to", workers=1)
    (part,) = (tmp_path / "to").glob("*/part-1-of-1.json")
    before = part.read_bytes()
    find(trained, STEP, _items(tmp_path, _ABSENT), tmp_path / "to", workers=1, most=1)
    assert part.read_bytes() == before
    assert len(list((tmp_path / "to").glob("*/part-1-of-1.json"))) == 2
    find(trained, STEP, _items(tmp_path, _ABSENT), tmp_path / "to", workers=1)
    first, second = sorted(_results(tmp_path / "to"), key=lambda result: result["finished_unix_s"])
    assert (len(_quiz(first)["overlapping"]), len(_quiz(second)["overlapping"])) == (1, 0)


def test_only_as_many_processes_as_half_of_the_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for free_bytes, processes in ((7 * one_bytes, 3), (one_bytes, 1), (100 * one_bytes, 8)):
        monkeypatch.setattr(overlap, "free_host_bytes", lambda free=free_bytes: free)
        assert overlap._fitting(64) == processes
        assert ("instead of 8" in capsys.readouterr().err) == (processes < 8)


@pytest.mark.parametrize("content", ["{", '{"identity": 1}', "[]", "\0"])
def test_a_damaged_part_is_scanned_again(
    trained: RunPaths, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    items = _items(tmp_path, _long(_documents(trained)[0], 40))
    first = find(trained, STEP, items, tmp_path / "to", workers=1)
    (path,) = (tmp_path / "to").glob("*/part-1-of-1.json")
    path.write_text(content)
    again = find(trained, STEP, items, tmp_path / "to", workers=1)
    assert (again["tasks"], again["documents"]) == (first["tasks"], first["documents"])
    assert content.startswith('{"') or "its chunks are scanned again" in capsys.readouterr().err


def test_a_part_with_numbers_out_of_range_counts_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "part-1-of-1.json"
    record = {"identity": {}, "done": [[0, 2]], "documents": 1, "text_bytes": 1, "cpu_s": 1.0}
    for found in ([[7, 0, 0, 0]], [[0, 0]], [["x", 0, 0, 0]]):
        files.write_sealed_json(path, {**record, "found": found})
        assert overlap_scan.read_part(path, {}, ngrams=5, chunks=3) == overlap_scan.Part()
    files.write_sealed_json(path, {**record, "found": [[0, 1, 0, 5]]})
    assert overlap_scan.read_part(path, {}, ngrams=5, chunks=3).done == {0, 1}


def test_a_corpus_of_token_ids_has_the_overlaps_of_its_text(
    trained: RunPaths, make_config: MakeConfig, make_run: MakeRun, tmp_path: Path
) -> None:
    ids = tmp_path / "ids"
    tokenize.tokenize(_dataset_of(trained), ids, processes=1, validation_fraction=0.02)
    config = make_config(data={"path": os.fspath(ids)}, tokenizer={"path": os.fspath(ids / "tokenizer")})
    prepare(config, tmp_path / "prepared")
    dataset = json.loads((tmp_path / "prepared" / "dataset.json").read_text())
    trained.dataset.write_text(json.dumps(dataset), encoding="utf-8")
    _save(trained, batches=20)
    read = [text for text in _texts_of_ids(dataset, trained) if len(text.split()) > 20]
    quiz = _quiz(find(trained, STEP, _items(tmp_path, *read, _ABSENT), tmp_path / "to", workers=1))
    assert all(item["found"] == item["ngrams"] for item in quiz["overlapping"].values())
    assert len(quiz["overlapping"]) == len(read)


def _dataset_of(run: RunPaths) -> Path:
    path = run.root / "dataset-of-text.json"
    path.write_text(run.dataset.read_text(), encoding="utf-8")
    return path


def _texts_of_ids(dataset: dict[str, Any], run: RunPaths) -> list[str]:
    """Return finished documents that the run has read."""
    (source,) = sources_of(dataset)
    said = overlap_scan.Consumed(load(run.config), dataset, files.read_json(_states(run))["loader"])
    read = [each for chunk in said.chunks for each in said.readings(chunk) if each.tokens is None]
    return [source.excerpt(each.position, 1_000_000) for each in read][:20]


def test_words_of_an_ngram_follow_the_lengths_of_a_tasks_items(trained: RunPaths, tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    lengths = {"long": [30] * 20, "middle": [10] * 20, "short": [3] * 20}
    lines = [
        json.dumps({"task": task, "item": str(i), "text": " ".join(f"{task}{i}w{k}" for k in range(n))})
        for task, all_lengths in lengths.items()
        for i, n in enumerate(all_lengths)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    tasks = find(trained, STEP, path, tmp_path / "to", workers=1, most=1)["tasks"]
    assert {name: (task["words"], task["short"]) for name, task in tasks.items()} == {
        "long": (13, 0),
        "middle": (10, 0),
        "short": (8, 20),
    }


def test_a_template_of_a_task_is_not_counted(trained: RunPaths, tmp_path: Path) -> None:
    template = _words(_long(_documents(trained)[0], 40), 0, 20)
    items = _items(tmp_path, *(f"{template} {_ABSENT} number {i} of the quiz" for i in range(30)))
    assert _quiz(find(trained, STEP, items, tmp_path / "to", workers=1))["overlapping"] == {}


@pytest.mark.parametrize("content", ["{", "[1]", '{"task": "quiz"}', "\0"])
def test_damaged_items_give_an_error(trained: RunPaths, tmp_path: Path, content: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"items\.jsonl"):
        find(trained, STEP, path, tmp_path / "to", workers=1)


@pytest.mark.parametrize("content", ["", '{"task": 1, "item": [], "text": null}'])
def test_items_without_words_overlap_with_nothing(trained: RunPaths, tmp_path: Path, content: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(content)
    tasks = find(trained, STEP, path, tmp_path / "to", workers=1)["tasks"]
    assert not any(task["overlapping"] for task in tasks.values())


@pytest.mark.parametrize("damage", ['{"loader": [[1, "x", 0, 0]] }', '{"loader": [[]]}', "{", '{"loader": 1}'])
def test_a_damaged_checkpoint_gives_an_error(trained: RunPaths, tmp_path: Path, damage: str) -> None:
    _states(trained).write_text(damage)
    with pytest.raises(HlatctlError):
        find(trained, STEP, _items(tmp_path, _ABSENT), tmp_path / "to", workers=1)


@pytest.mark.parametrize("damage", ["{", "{}", '{"sources": [{}]}', '{"fingerprint": "x", "sources": [], "files": []}'])
def test_a_damaged_description_of_the_corpus_gives_an_error(trained: RunPaths, tmp_path: Path, damage: str) -> None:
    trained.dataset.write_text(damage)
    with pytest.raises(HlatctlError):
        find(trained, STEP, _items(tmp_path, _ABSENT), tmp_path / "to", workers=1)


def test_a_hostile_tokenizer_gives_an_error(trained: RunPaths, tmp_path: Path) -> None:
    dataset = files.read_sealed_json(trained.dataset)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}')
    trained.dataset.write_text(json.dumps({**dataset, "tokenizer": {**dataset["tokenizer"], "path": str(folder)}}))
    with pytest.raises(DataError, match="not a readable tokenizer"):
        find(trained, STEP, _items(tmp_path, _ABSENT), tmp_path / "to", workers=1)


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "a/b", "1/0", "1/3/5", "-1/3"])
def test_a_wrong_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--shard"):
        shard_of(text)
    assert shard_of("3/8") == (2, 8)
