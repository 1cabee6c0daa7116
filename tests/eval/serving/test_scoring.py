"""Scores equal the harness's own, and only the needed logits are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.serving import scoring
from eval.serving.model import Loaded
from hlatctl.run.errors import EvaluationError
from tests.eval.conftest import hugging_face

#: A context with two answers that differ in their last token, an answer of several tokens, and a context that is cut.
_REQUESTS: list[Any] = [
    (("a", "b"), [5, 6, 7, 8], [9]),
    (("a", "c"), [5, 6, 7, 8], [10]),
    (("d", "e"), [20, 21], [22, 23, 24, 25]),
    (("g", "h"), list(range(30, 330)), [40, 41, 42]),
    (("i", "j"), [1], [2, 3]),
]
#: The text of the first request, with an answer that begins earlier.
_SAME_TEXT: Any = (("a", "fb"), [5, 6, 7], [8, 9])


def _harness(loaded: Loaded, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(loaded.model, tokenizer=loaded.tokenizer, max_length=loaded.max_length, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_scores_are_those_of_the_harness(loaded: Loaded, batch_size: int) -> None:
    expected = _harness(loaded, batch_size)._loglikelihood_tokens(_REQUESTS)
    actual = hugging_face(loaded, batch_size=batch_size)._loglikelihood_tokens(_REQUESTS)
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    # A product with one row may be summed in another order (eval.serving.scoring).
    assert [nats for nats, _ in actual] == pytest.approx([nats for nats, _ in expected], rel=0, abs=4e-6)


def test_answers_of_one_text_are_scored_where_they_begin(loaded: Loaded) -> None:
    model = hugging_face(loaded, batch_size=4)
    together = model._loglikelihood_tokens([_REQUESTS[0], _SAME_TEXT])
    apart = [model._loglikelihood_tokens([request])[0] for request in (_REQUESTS[0], _SAME_TEXT)]
    assert [nats for nats, _ in together] == pytest.approx([nats for nats, _ in apart], rel=0, abs=4e-6)
    assert abs(together[0][0] - together[1][0]) > 0.1


def test_an_answer_that_greedy_decoding_gives_is_recognized(loaded: Loaded) -> None:
    context = [5, 6, 7]
    with torch.inference_mode():
        best = int(loaded.model(torch.tensor([context])).logits[0, -1].argmax())
    (answers,) = scoring.score(loaded.model, [scoring.ScoringRow(context, [[best], [best + 1]])], max_length=256)
    assert [is_greedy for _, is_greedy in answers] == [True, False]
    assert answers[0][0] > answers[1][0]


def test_requests_with_equal_inputs_are_one_row_and_long_rows_come_first() -> None:
    rows, indices = scoring.rows_of([*_REQUESTS, _SAME_TEXT])
    assert indices == [[3], [2], [0, 1, 5], [4]]
    assert rows[2] == scoring.ScoringRow([5, 6, 7, 8], [[9], [10], [8, 9]])
    assert rows[2].scored_tokens == 2


def test_the_head_computes_logits_of_answers_only(loaded: Loaded) -> None:
    seen: list[int] = []
    head = loaded.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, logits: seen.append(logits[..., 0].numel()))
    try:
        scoring.score(loaded.model, scoring.rows_of(_REQUESTS)[0], max_length=256)
    finally:
        hook.remove()
    assert seen == [3 + 4 + 1 + 2]
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.shape[1] == 3, "the model is as before"


def test_an_answer_longer_than_the_context_is_refused(loaded: Loaded) -> None:
    answer = list(range(10, 30))
    rows, _ = scoring.rows_of([(None, [5, 6, 7], answer)])
    assert len(scoring.score(loaded.model, rows, max_length=20)) == 1
    with pytest.raises(EvaluationError, match="an answer has 20 tokens, and the model's context only 19\nhint: "):
        scoring.score(loaded.model, rows, max_length=19)
