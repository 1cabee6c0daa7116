"""Stored answers: the file, which requests are computed again, in which batches, and how answers are sampled."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.serving.answers import KeptAnswers, Remembering, likelihood_batches, text_batches

_GREEDY = {"until": ["\n"], "do_sample": False, "max_gen_toks": 6}
_SAMPLED = {"until": ["\n"], "do_sample": True, "temperature": 0.9, "max_gen_toks": 6}


@dataclass(frozen=True)
class _Request:
    args: tuple[Any, ...]


class _Model:
    """Answers with the prompt and a random number; raises KeyboardInterrupt after some batches."""

    max_length = 7

    def __init__(self, batches: int = 1000) -> None:
        self.asked: list[list[str]] = []
        self._left = batches

    def tok_encode(self, text: str) -> list[str]:
        return text.split()

    def generate_until(self, requests: list[_Request], disable_tqdm: bool) -> list[str]:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        self.asked.append([request.args[0] for request in requests])
        return [f"{request.args[0]} {random.random()}" for request in requests]


def _requests(*prompts: str, **settings: Any) -> list[_Request]:
    return [_Request((prompt, settings or _GREEDY)) for prompt in prompts]


def _ask(
    model: Any,
    path: Path,
    requests: list[_Request],
    *,
    identity: str = "one",
    progress: list[tuple[int, int]] | None = None,
) -> list[str]:
    remembering = Remembering(model, batch_size=2, seed=1)
    remembering.begin(
        path, identity, lambda done, total: progress.append((done, total)) if progress is not None else None
    )
    return remembering.generate_until(requests)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "answers" / "task.jsonl"


def test_batches_go_from_the_longest_prompt_and_answers_come_in_order(path: Path) -> None:
    model = _Model()
    answers = _ask(model, path, _requests("a", "b b b", "c c", "d d d d", "e"))
    assert model.asked == [["d d d d", "b b b"], ["c c", "a"], ["e"]]
    assert [answer.rsplit(" ", 1)[0] for answer in answers] == ["a", "b b b", "c c", "d d d d", "e"]
    assert Remembering(model, batch_size=2, seed=1).max_length == 7, "what it does not know is the model's"


def test_what_was_answered_before_a_death_is_not_asked_again(path: Path) -> None:
    requests = _requests("a", "b b b", "c c", "d d d d", "e")
    progress: list[tuple[int, int]] = []
    dying = _Model(batches=2)
    with pytest.raises(KeyboardInterrupt):
        _ask(dying, path, requests)
    model = _Model()
    answers = _ask(model, path, requests, progress=progress)
    assert (dying.asked, model.asked) == ([["d d d d", "b b b"], ["c c", "a"]], [["e"]])
    assert (progress[0], progress[-1]) == ((4, 5), (5, 5))
    assert _ask(silent := _Model(), path, requests) == answers
    assert silent.asked == []


@pytest.mark.parametrize(
    "harm",
    [lambda text: text[:-9], lambda text: text.replace("e 0.", "e 1."), lambda text: text + '\n["k", 3'],
    ids=["torn", "damaged", "torn by another"],
)
def test_a_torn_or_damaged_line_is_no_answer(path: Path, harm: Callable[[str], str]) -> None:
    requests = _requests("a a", "e")
    _ask(_Model(), path, requests[:1])
    _ask(_Model(), path, requests)
    path.write_text(harm(path.read_text(encoding="utf-8")), encoding="utf-8")
    model = _Model()
    first = _ask(model, path, requests)
    assert _ask(silent := _Model(), path, requests) == first
    assert len(model.asked) <= 1
    assert silent.asked == []


def test_answers_of_other_weights_or_another_contract_are_not_taken(path: Path) -> None:
    requests = _requests("a", "b")
    _ask(_Model(), path, requests)
    model = _Model()
    _ask(model, path, requests, identity="two")
    assert model.asked == [["a", "b"]]


def test_sampled_answers_differ_and_are_the_same_after_an_interruption(path: Path, tmp_path: Path) -> None:
    requests = _requests(*["a"] * 5, **_SAMPLED)
    whole = _ask(_Model(), tmp_path / "whole.jsonl", requests)
    with pytest.raises(KeyboardInterrupt):
        _ask(_Model(batches=1), path, requests)
    assert _ask(_Model(), path, requests) == whole
    assert len(set(whole)) == 5


def _instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", i, 1))
        for i, each in enumerate(arguments)
    ]


def test_the_real_model_gives_the_answers_that_it_gives_without_memory(lm: Any, path: Path) -> None:
    prompts = ["Question: How many apples", "The quick", "def add(a, b):", "A", "A model of language gives", "lazy dog"]
    requests = _instances("generate_until", *[(prompt, dict(_GREEDY)) for prompt in prompts])
    plain = lm.generate_until(requests)
    remembering = Remembering(lm, batch_size=4, seed=1)
    remembering.begin(path, "one", lambda done, total: None)
    assert remembering.generate_until(requests) == plain


_CHOICES = ("A", "B", " dog", " fox jumps over", " A", " language gives every text")
_CONTEXTS = ("The quick brown fox", "A model of ", "", "Question: How many apples are left? Answer:", "fox " * 150)


class _Watched:
    """Records the batches of the real model; raises KeyboardInterrupt after some batches."""

    def __init__(self, lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Any] = []
        self.left = 1000
        self._score = lm.score
        monkeypatch.setattr(lm, "score", self._watch)

    def _watch(self, rows: Any) -> Any:
        if len(self.batches) == self.left:
            raise KeyboardInterrupt
        self.batches.append([row.tokens for row in rows])
        return self._score(rows)

    def taken(self) -> list[Any]:
        """Return the batches since the last call."""
        batches, self.batches = self.batches, []
        return batches


def _likelihoods(lm: Any, path: Path, kind: str, requests: list[Any]) -> tuple[list[Any], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    remembering = Remembering(lm, batch_size=4, seed=1)
    remembering.begin(path, "one", lambda done, total: progress.append((done, total)))
    return getattr(remembering, kind)(requests), progress


@pytest.mark.parametrize("kind", ["loglikelihood", "loglikelihood_rolling"])
def test_likelihoods_are_asked_in_the_harness_own_batches_and_kept_one_by_one(
    lm: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    requests = {
        "loglikelihood": _instances(kind, *[(context, choice) for context in _CONTEXTS for choice in _CHOICES]),
        "loglikelihood_rolling": _instances(
            kind, *[(f"{n} apples in {context} " * 50,) for n, context in enumerate(_CONTEXTS)]
        ),
    }[kind]
    watched = _Watched(lm, monkeypatch)
    plain = getattr(lm, kind)(requests)
    batches = watched.taken()
    assert len(batches) > 4
    undisturbed, progress = _likelihoods(lm, tmp_path / "whole", kind, requests)
    assert undisturbed == plain
    assert watched.taken() == batches
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == progress[-1][1]

    watched.left = 3
    with pytest.raises(KeyboardInterrupt):
        _likelihoods(lm, path, kind, requests)
    assert watched.taken() == batches[:3]
    watched.left = 1000
    resumed, progress = _likelihoods(lm, path, kind, requests)
    assert resumed == plain
    assert watched.taken() == batches[3:]
    assert progress[0][0] >= 3
    assert _likelihoods(lm, path, kind, requests)[0] == plain
    assert watched.taken() == []


def test_answers_in_batches_of_another_size_are_not_taken(lm: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _instances("loglikelihood", *[(context, " dog") for context in _CONTEXTS])
    _likelihoods(lm, path, "loglikelihood", requests)
    watched = _Watched(lm, monkeypatch)
    remembering = Remembering(lm, batch_size=2, seed=1)
    remembering.begin(path, "one", lambda done, total: None)
    remembering.loglikelihood(requests)
    assert [len(batch) for batch in watched.batches] == [2, 2], "the last batch has one request with either size"


def test_a_context_is_tokenized_once_for_all_its_choices(lm: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    tok_encode = lm.tok_encode

    def encode(text: str, **options: Any) -> list[int]:
        texts.append(text)
        return list(tok_encode(text, **options))

    monkeypatch.setattr(lm, "tok_encode", encode)
    _likelihoods(lm, path, "loglikelihood", _instances("loglikelihood", *[("The fox", choice) for choice in _CHOICES]))
    assert texts.count("The fox") == 1
    assert len(texts) == 1 + len(_CHOICES)


def test_prompts_of_one_batch_have_the_same_settings_and_come_from_the_longest() -> None:
    greedy, sampled = {"do_sample": False}, {"do_sample": True}
    requests = [("a", greedy), ("b b", sampled), ("c c c", greedy), ("d d", greedy), ("a", greedy)]
    assert text_batches(requests, 2, lambda prompt: len(prompt.split())) == [[2, 3], [0, 4], [1]]


def test_a_prompt_that_is_asked_several_times_is_counted_once() -> None:
    counted: list[str] = []

    def tokens(prompt: str) -> int:
        counted.append(prompt)
        return 1

    text_batches([("a", {}), ("a", {}), ("b", {})], 2, tokens)
    assert sorted(counted) == ["a", "b"]


def test_choices_that_differ_in_their_last_token_are_one_sequence_of_a_batch() -> None:
    context, other = [5, 6, 7], [8, 9]
    requests = [(None, context, [1]), (None, other, [1, 2]), (None, context, [2]), (None, context, [3, 4])]
    assert likelihood_batches(requests, 1) == [[3], [0, 2], [1]]
    assert likelihood_batches(requests, 2) == [[0, 2, 3], [1]], "a batch has its requests in their own order"


def test_answers_are_found_by_content_and_number_with_every_bit_of_a_number(tmp_path: Path) -> None:
    path = tmp_path / "answers" / "task.jsonl"
    kept = KeptAnswers(path, "one")
    first, second, other = kept.keys([b"a", b"a", b"b"])
    assert len({first, second, other}) == 3
    kept.keep(second, [[-0.1 - 0.2, True], [-1e-17, False]])
    again = KeptAnswers(path, "one")
    assert again.keys([b"a", b"a"]) == [first, second]
    assert again.find(second, 2) == [[-0.1 - 0.2, True], [-1e-17, False]]
    assert again.find(first, 2) is None
    assert again.find(second, 3) is None, "a batch has all its answers or none"
    assert KeptAnswers(path, "two").keys([b"a", b"a"])[1] != second


def test_a_line_is_in_the_file_at_once_and_the_disk_is_awaited_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    now_s = 100.0
    monkeypatch.setattr(os, "fsync", waits.append)
    monkeypatch.setattr("eval.serving.answers.time.monotonic", lambda: now_s)
    path = tmp_path / "task.jsonl"
    kept = KeptAnswers(path, "one")
    for number, key in enumerate(kept.keys([b"a", b"b", b"c"]), start=1):
        kept.keep(key, ["text"])
        assert path.read_text(encoding="utf-8").count("\n") == number
    assert waits == []
    now_s += 60.0
    kept.keep("key", ["text"])
    kept.keep("key", ["text"])
    assert len(waits) == 1


def test_without_a_file_nothing_is_kept() -> None:
    kept = KeptAnswers(None, "")
    (key,) = kept.keys([b"a"])
    kept.keep(key, ["text"])
    assert kept.find(key, 1) is None
