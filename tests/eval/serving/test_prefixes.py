"""Sequences that are packed score as each alone, and models that can't be packed are refused."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval.serving import answers as batches
from eval.serving import prefixes, scoring
from eval.serving.model import Loaded
from hlatctl.run.errors import EvaluationError
from tests.eval.conftest import hugging_face

_SOLVED = [5, 6, 7, 8, 9, 10, 11, 12]


def _requests() -> list[Any]:
    """Two questions after the same solved examples, each with two long and two short answers, and one of its own."""
    questions = [[*_SOLVED, 20, 21], [*_SOLVED, 30]]
    answers = [[40, 41, 42], [40, 43], [44], [45]]
    asked = [((str(q), str(a)), q, a) for a in answers for q in questions]
    return [*asked, (("x", "y"), [50, 51], [52, 53, 54])]


def test_scores_of_packed_sequences_are_those_of_each_alone(loaded: Loaded) -> None:
    alone = hugging_face(loaded, batch_size=16)._loglikelihood_tokens(_requests())
    model = hugging_face(loaded, batch_size=16, share_prefixes=True)
    shared = model._loglikelihood_tokens(_requests())
    assert [greedy for _, greedy in shared] == [greedy for _, greedy in alone]
    assert [nats for nats, _ in shared] == pytest.approx([nats for nats, _ in alone], rel=0, abs=1e-5)
    apart = [model._loglikelihood_tokens([request])[0] for request in _requests()]
    assert [nats for nats, _ in shared] == pytest.approx([nats for nats, _ in apart], rel=0, abs=1e-5)


def test_shared_tokens_are_computed_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = scoring.rows_of(_requests(), order="prefix")
    seen: list[tuple[int, ...]] = []
    honest = loaded.model.forward

    def forward(input_ids: torch.Tensor, **keys: Any) -> Any:
        seen.append(tuple(input_ids.shape))
        return honest(input_ids, **keys)

    monkeypatch.setattr(loaded.model, "forward", forward)
    scoring.score(loaded.model, rows, max_length=256, share_prefixes=True)
    own = len(_SOLVED) + (2 + 2) + (1 + 2)  # each question, and all but the last token of its longest answer
    assert seen == [(1, 4), (1, own)]


def test_a_row_grows_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_MOST_TOKENS", 12)
    sequences = [[*_SOLVED, 20 + number, 0] for number in range(5)]
    rows = prefixes.packed(sequences)
    assert [len(row.tokens) for row in rows] == [12, 12, 10]
    assert [[row.tokens[place] for place in path] for row in rows for path in row.paths.values()] == sequences


def test_sequences_that_share_less_than_they_have_of_their_own_are_apart() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8, 9]]
    assert [len(row.paths) for row in prefixes.packed(sequences)] == [2, 1]


def test_requests_of_one_beginning_are_in_one_batch() -> None:
    context, other = [5, 6, 7], [8, 9, 9, 9, 9]
    requests = [
        (None, context, [1, 1, 2, 3, 4]),
        (None, other, [1, 2]),
        (None, other, [3, 2]),
        (None, context, [1, 1, 1]),
    ]
    assert batches.likelihood_batches(requests, 2) == [[0, 1], [2, 3]], "by length"
    assert batches.likelihood_batches(requests, 2, by_prefix=True) == [[3, 0], [1, 2]], "in the order of the row"


def test_rows_are_the_same_however_many_batches_are_asked_for_together() -> None:
    draw = random.Random(0)
    contexts = [[draw.randrange(4) for _ in range(draw.randint(3, 9))] for _ in range(20)]
    requests: list[Any] = [
        (None, [*_SOLVED, *c], [draw.randrange(9) for _ in range(3)]) for c in contexts for _ in "ab"
    ]

    def batched(together: int) -> list[list[list[int]]]:
        rows = []
        for asked in batches.likelihood_batches(requests, 4 * together, by_prefix=True):
            given, _ = scoring.rows_of([requests[index] for index in asked], order="given")
            rows += [[row.tokens for row in given[start : start + 4]] for start in range(0, len(given), 4)]
        return rows

    assert batched(1) == batched(3)


def _mistral(window: int | None) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model: Any = MistralForCausalLM(
        MistralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, sliding_window=window)
    )
    return model.eval()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    return model.eval()


def test_learned_positions_and_layers_without_a_window_can_be_packed() -> None:
    for model in (_gpt2(), _mistral(None)):
        prefixes.check(model)


def test_a_model_with_a_window_is_refused() -> None:
    with pytest.raises(
        EvaluationError,
        match=r"not with a model of type mistral: some of its layers don't see all tokens\nhint: eval\.",
    ):
        prefixes.check(_mistral(8))


def test_a_model_without_positions_or_without_its_own_attention_is_refused() -> None:
    model = _gpt2()
    model.config._attn_implementation = "eager"
    with pytest.raises(EvaluationError, match="doesn't compute attention with PyTorch's own function"):
        prefixes.check(model)
    config: Any = SimpleNamespace(model_type="mamba", _attn_implementation="sdpa", get_text_config=lambda: config)
    with pytest.raises(EvaluationError, match="it has no positions as an input"):
        prefixes.check(SimpleNamespace(config=config, forward=lambda input_ids, attention_mask: None))


@pytest.mark.parametrize("ignored", ["position_ids", "attention_mask"])
def test_a_model_that_ignores_what_it_is_told_fails_the_trial(ignored: str) -> None:
    torch.manual_seed(0)
    model = _gpt2()
    honest = model.forward

    def forward(input_ids: Any, position_ids: Any = None, attention_mask: Any = None, **keys: Any) -> Any:
        told = {"position_ids": position_ids, "attention_mask": attention_mask}
        return honest(input_ids, **{**told, ignored: None}, **keys)

    model.forward = forward
    with pytest.raises(EvaluationError, match=r"a trial gave log-likelihoods that differ by .* nats a token"):
        prefixes.check(model)
