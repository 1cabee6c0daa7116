"""Batches of ``eval.batch_size=auto`` fit into memory, and their results are complete and in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.serving import memory
from eval.serving.model import Loaded
from eval.serving.scoring import ScoringRow
from hlatctl.run.errors import EvaluationError
from tests.eval.conftest import hugging_face

_COST = memory.Cost(token=10, kept_token=5, logit_token=100)


def _rows(*lengths: int) -> list[ScoringRow]:
    return [ScoringRow([1] * length, [[2]]) for length in lengths]


def test_rows_are_padded_to_the_longest_and_each_answer_has_its_logits() -> None:
    budget = memory.Budget(_COST, free_bytes=2 * (50 * 10 + 100))
    assert budget.fitting_rows(_rows(50, 3, 2)) == 2
    assert budget.fitting_rows(_rows(500, 3)) == 1, "one is always tried"
    assert budget.fitting_rows(_rows(3, 2, 1)) == 3
    assert budget.fitting_answers(context_tokens=30, most=9) == 2
    assert budget.fitting_answers(context_tokens=30, most=1) == 1


def test_half_as_many_are_tried_after_memory_was_exhausted() -> None:
    tried: list[int] = []

    def score(part: Sequence[int]) -> list[int]:
        tried.append(len(part))
        if len(part) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [-number for number in part]

    budget = memory.Budget(_COST, free_bytes=8 * 16 * 10)
    items = list(range(10))
    results = memory.in_parts(score, items, budget, lambda rest: budget.fitting_answers(1, len(rest)))
    assert results == [-number for number in items]
    assert tried[0] > 3
    assert max(tried[1:]) <= tried[0] // 2


def test_one_request_that_does_not_fit_is_an_error_with_a_way_out() -> None:
    def score(part: Sequence[int]) -> list[int]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 281474976710656 bytes")

    with pytest.raises(EvaluationError) as caught:
        memory.in_parts(score, [1], memory.Budget(_COST, 1), len)
    assert str(caught.value).endswith("hint: set eval.dtype=bfloat16, or raise eval.tensor_parallel_size")


def test_other_errors_are_not_taken_for_exhausted_memory() -> None:
    def score(part: Sequence[int]) -> list[int]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        memory.in_parts(score, [1, 2], memory.Budget(_COST, 1), len)


def test_processes_share_the_memory_of_a_host(loaded: Loaded) -> None:
    alone, shared = (memory.budget(loaded.model, processes=count).fitting_answers(200, 10**9) for count in (1, 8))
    assert 1 < shared < alone / 4


def test_scores_of_automatic_batches_are_those_of_fixed_ones(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = [((str(n), "x"), list(range(5, 5 + n)), [n, n + 1]) for n in (3, 9, 30, 100)]
    prompts = [
        SimpleNamespace(args=(text, {"until": [], "max_gen_toks": 4})) for text in ("a fox", "def add(", "Question")
    ]
    fixed, auto = hugging_face(loaded, batch_size=1), hugging_face(loaded, batch_size="auto")
    one_row = memory.Cost.of(loaded.model).token * 102 + 24 * 400
    monkeypatch.setattr(auto, "_budget", memory.Budget(memory.Cost.of(loaded.model), one_row))
    actual, expected = auto._loglikelihood_tokens(requests), fixed._loglikelihood_tokens(requests)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    # Some processors sum the products of larger batches in another order.
    assert [nats for nats, _ in actual] == pytest.approx([nats for nats, _ in expected], rel=0, abs=1e-5)
    assert auto.generate_until(prompts) == fixed.generate_until(prompts)


def test_a_fixed_batch_that_does_not_fit_names_the_automatic_one(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: Any, **keywords: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("eval.serving.scoring.score", exhausted)
    with pytest.raises(EvaluationError) as caught:
        hugging_face(loaded, batch_size=4).score(_rows(3, 2))
    assert str(caught.value) == (
        "eval.batch_size=2: memory is exhausted (CUDA out of memory)\nhint: set eval.batch_size=auto"
    )


def _out_of_memory_above(most: int, tried: list[int]) -> Any:
    def generate(requests: Sequence[Any]) -> list[str]:
        tried.append(len(requests))
        if len(requests) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [request.args[0].upper() for request in requests]

    return generate


def _prompts(**keys: Any) -> list[Any]:
    return [SimpleNamespace(args=("ab"[: n % 2 + 1], keys)) for n in range(16)]


def test_fewer_answers_are_generated_after_memory_was_exhausted(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    lm = hugging_face(loaded, batch_size="auto")
    monkeypatch.setattr(lm, "_generate", _out_of_memory_above(4, tried))
    of_one = lm.max_length * 15 + 100
    monkeypatch.setattr(lm, "_budget", memory.Budget(_COST, 16 * of_one))
    prompts = _prompts()
    assert lm.generate_until(prompts) == [prompt.args[0].upper() for prompt in prompts]
    assert tried == [16, 8, 4, 4, 4, 4]


@pytest.mark.parametrize(("batch_size", "keys", "hint"), [(8, {}, "auto"), ("auto", {"do_sample": True}, "8")])
def test_answers_of_a_fixed_batch_that_does_not_fit_are_an_error(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, batch_size: Any, keys: dict[str, Any], hint: str
) -> None:
    lm = hugging_face(loaded, batch_size=batch_size)
    monkeypatch.setattr(lm, "_generate", _out_of_memory_above(4, []))
    with pytest.raises(EvaluationError) as caught:
        lm.generate_until(_prompts(**keys))
    assert str(caught.value).endswith(f"hint: set eval.batch_size={hint}")


def test_a_guess_that_was_far_too_large_is_corrected_at_once() -> None:
    budget = memory.Budget(_COST, free_bytes=1e12)
    assert budget.fitting_rows(_rows(*[10] * 64)) == 64
    budget.halve()
    assert budget.fitting_rows(_rows(*[10] * 64)) == 32
    budget.halve()
    assert budget.fitting_rows(_rows(*[10] * 64)) == 16


def test_a_process_of_a_shared_model_reports_what_a_batch_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(part: Sequence[int]) -> list[int]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "is_shared", lambda: True)
    budget = memory.Budget(_COST, free_bytes=1e12)
    rows = _rows(10, 10, 10, 10)
    with pytest.raises(memory.Exhausted) as caught:
        memory.in_parts(score, rows, budget, budget.fitting_rows)  # type: ignore[arg-type]
    assert caught.value.most_bytes == 4 * (10 * 10 + 100) / 2


def test_processes_that_share_a_model_share_its_feed_forward_layers_and_cache(loaded: Loaded) -> None:
    alone, shared = memory.Cost.of(loaded.model), memory.Cost.of(loaded.model, sharing=2)
    assert shared.kept_token == alone.kept_token / 2
    assert alone.token - shared.token == 4 * 3 * 64 / 2, "FP32, three of the wider states"
    assert shared.logit_token == alone.logit_token
