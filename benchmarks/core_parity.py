"""CORE by our tasks against nanochat's own functions, item by item: the same answer must be right.

``HLATCTL_BENCH_NANOCHAT`` is a copy of nanochat (https://github.com/karpathy/nanochat), whose ``core_eval.py`` is
called for every item. Both read ``HLATCTL_BENCH_LIMIT`` items (default 300) of each task: of those of nanochat's bundle
whose files are present, if ``HLATCTL_BENCH_BUNDLE`` is the folder with ``eval_bundle``; else of nine tasks of all three
kinds, made here from other datasets in the bundle's format. The models are a pre-trained one, and a checkpoint that is
trained and exported for this (``HLATCTL_BENCH_MODELS`` names one of them).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.eval_command import BATCH_SIZE, DATA, MODEL, SEED, SEQ_LEN
from benchmarks.eval_parity import exported
from conf.compose import compose
from eval import harness
from eval.serving import answers, model, runners
from eval.tasks import core, plan

_NANOCHAT = os.environ.get("HLATCTL_BENCH_NANOCHAT")
_BUNDLE = os.environ.get("HLATCTL_BENCH_BUNDLE")
_MODELS = os.environ.get("HLATCTL_BENCH_MODELS", "stories260K,checkpoint").split(",")
_ITEMS = int(os.environ.get("HLATCTL_BENCH_LIMIT", "300"))

Item = dict[str, Any]


def run() -> None:
    """Print for each model and task how many items are answered alike, and both scores."""
    if not DATA.is_dir() or not _NANOCHAT:
        print("skipped: the datasets are not here, or HLATCTL_BENCH_NANOCHAT names no copy of nanochat")
        return
    nanochat = _module(Path(_NANOCHAT) / "nanochat" / "core_eval.py")
    with tempfile.TemporaryDirectory(prefix="hlatctl-bench-") as folder:
        root = Path(folder)
        data = Path(_BUNDLE) if _BUNDLE else root / "data"
        if not _BUNDLE:
            _write_bundle(data)
        tasks = [row.name for row in core.ROWS if (data / row.place).is_file()]
        print(f"{len(tasks)} of {len(core.ROWS)} tasks have their files")
        core.check_bundle(data, tasks)
        for name in _MODELS:
            is_ours = name != MODEL.name
            model_folder = exported(root / "trained") if is_ours else MODEL
            _compare(name, model_folder, nanochat, data, tasks, root, is_ours=is_ours)


def _compare(
    name: str, folder: Path, nanochat: Any, data: Path, tasks: list[str], root: Path, *, is_ours: bool
) -> None:
    loaded = model.load(folder, seq_len=SEQ_LEN, device="cpu")
    request = runners.RunnerArguments(
        folder=folder, loaded=lambda: loaded, max_length=SEQ_LEN, batch_size=BATCH_SIZE, seed=SEED
    )
    lm = answers.Remembering(runners.make("hf", request), batch_size=BATCH_SIZE, seed=SEED)
    first = lm.tokenizer.eos_token_id if is_ours else lm.prefix_token_id
    theirs = _Nanochat(nanochat, loaded, int(first))
    wanted = replace(compose(["eval=core"]).eval, data_dir=str(data), tasks=tasks, limit=_ITEMS)
    equal = asked = 0
    for task in plan.make(wanted, root).tasks:
        row, result = (
            core.TASKS[task.name],
            harness.run(lm, task, root, seed=SEED, limit=_ITEMS, is_trained_here=is_ours),
        )
        their_answers = [theirs.answer(row, data, index) for index in range(len(result.samples))]
        same = sum(_answer(sample) == their for sample, their in zip(result.samples, their_answers, strict=True))
        own, their_score = result.scores[task.name].value, _centered(row, [right for right, _ in their_answers])
        print(
            f"{name}: {task.name} ({row.kind}): {same} of {len(their_answers)} items equal; "
            f"centered {own:.6f}, nanochat {their_score:.6f}",
            flush=True,
        )
        equal, asked = equal + same, asked + len(their_answers)
    print(f"{name}: {equal} of {asked} items equal", flush=True)


#: Whether an item is answered correctly, and the chosen answer's place; -1 if the model writes the answer.
Answer = tuple[bool, int]


def _answer(sample: Item) -> Answer:
    losses = [-nats for nats, _ in sample["filtered_resps"]]
    return bool(sample["acc"]), losses.index(min(losses)) if len(losses) > 1 else -1


class _Nanochat:
    """nanochat's functions around a model of transformers."""

    def __init__(self, module: Any, loaded: model.Loaded, first_token: int) -> None:
        self._module, self._loaded, self._first = module, loaded, first_token
        self._data: dict[Path, list[Item]] = {}
        self.max_seq_len = loaded.max_length

    def __call__(self, ids: Any, prepend: int | None = None) -> Any:
        """Return logits of tokens, as its model; or tokens of texts, as its tokenizer."""
        if prepend is None:
            return self._loaded.model(ids).logits
        return [[prepend, *self._loaded.tokenizer.encode(text, add_special_tokens=False)] for text in ids]

    def get_bos_token_id(self) -> int:
        return self._first

    def answer(self, row: core.Row, data: Path, index: int) -> Answer:
        about = {"task_type": row.kind, "num_fewshot": row.shots, "continuation_delimiter": row.delimiter}
        items = list(self._items(data / row.place))
        seen = _Gold(items[index].get("gold", 0))
        items[index] = {**items[index], "gold": seen}
        found = self._module.evaluate_example(index, self, self, items, "cpu", about)
        return bool(found[0] if isinstance(found, tuple) else found), seen.compared_with

    def _items(self, path: Path) -> list[Item]:
        if path not in self._data:
            items = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
            random.Random(1337).shuffle(items)
            self._data[path] = items[:_ITEMS]
        return self._data[path]


class _Gold(int):
    """The place of the right answer, which remembers the place that it was compared with."""

    compared_with = -1

    def __eq__(self, other: object) -> bool:
        self.compared_with = int(str(other))
        return int(self) == other

    __hash__ = int.__hash__


def _centered(row: core.Row, right: list[bool]) -> float:
    guessing = 0.01 * row.baseline_percent
    return (sum(right) / len(right) - guessing) / (1 - guessing)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("nanochat_core_eval", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_bundle(folder: Path) -> None:
    for label, items in _ITEMS_OF.items():
        path = folder / core.TASKS[f"core_{label}"].place
        path.parent.mkdir(parents=True, exist_ok=True)
        chosen = [item for _, item in zip(range(_ITEMS), items(), strict=False)]
        path.write_text("".join(json.dumps(item) + "\n" for item in chosen), encoding="utf-8")


def _records(place: str) -> Iterator[Item]:
    with (DATA / place).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _hellaswag() -> Iterator[Item]:
    for each in _records("hellaswag/validation.jsonl"):
        query = f"{each['activity_label']}: {each['ctx']}"
        yield {"query": query, "choices": each["endings"], "gold": int(each["label"])}


def _piqa() -> Iterator[Item]:
    for each in _records("piqa/validation.jsonl"):
        yield {"query": f"Question: {each['goal']}", "choices": [each["sol1"], each["sol2"]], "gold": each["label"]}


def _boolq() -> Iterator[Item]:
    for each in _records("boolq/validation.jsonl"):
        query = f"Passage: {each['passage']}\nQuestion: {each['question']}?"
        yield {"query": query, "choices": ["no", "yes"], "gold": int(each["label"])}


def _questions() -> Iterator[Item]:
    for each in _records("nq_open/validation.jsonl"):
        yield {"context": f"Question: {each['question']}? ", "continuation": each["answer"][0]}


def _brackets() -> Iterator[Item]:
    for each in _records("bbh/dyck_languages.jsonl"):
        yield {"context": each["input"], "continuation": each["target"]}


def _short_words() -> Iterator[Item]:
    """Yield the beginnings of texts up to a word of at most three letters, which a small model can get right."""
    for each in _records("hellaswag/validation.jsonl"):
        words = each["ctx"].split()
        last = max((at for at, word in enumerate(words) if word.isalpha() and len(word) <= 3), default=0)
        if last > 2:
            yield {"context": " ".join(words[:last]), "continuation": words[last]}


def _pairs() -> Iterator[Item]:
    """Yield two beginnings of a sentence with one ending; which one is right is arbitrary."""
    for each in _records("crows_pairs/test.jsonl"):
        pair = [each["sent_more"].split(), each["sent_less"].split()]
        shortest = min(map(len, pair))
        same = next((n for n in range(shortest) if pair[0][-1 - n] != pair[1][-1 - n]), shortest)
        if 0 < same < shortest:
            beginnings = [" ".join(words[:-same]) for words in pair]
            yield {"context_options": beginnings, "continuation": " ".join(pair[0][-same:]), "gold": each["id"] % 2}


_ITEMS_OF = {
    "hellaswag_zeroshot": _hellaswag,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "boolq": _boolq,
    "jeopardy": _questions,
    "lambada_openai": _short_words,
    "bigbench_dyck_languages": _brackets,
    "winograd": _pairs,
    "winogrande": _pairs,
}
