"""Log-likelihoods of answers, by a model of transformers that computes logits only where answers are.

lm-evaluation-harness computes logits and their softmax for every token of every prompt. A prompt has hundreds of tokens
and an answer a few, and Llama 3's vocabulary has 128,256 entries, so nearly all of that work is wasted. Here
the head gets only the hidden states before an answer's tokens. A product with fewer rows may be summed in another
order, so scores can differ from the harness's by rounding: up to 4e-6 nats a token in FP32 on a CPU.

If two requests have the same text but begin their answers at different tokens, the harness (0.4.13) scores the shorter
answer at the longer one's first tokens. Here each answer is scored where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eval.serving import prefixes
from eval.serving.prefixes import Packed
from hlatctl.run.errors import EvaluationError

if TYPE_CHECKING:
    from torch import Tensor

#: Log-likelihood in nats, and whether greedy decoding produces the answer.
Answer = tuple[float, bool]
Order = Literal["length", "prefix", "given"]
#: A request of the harness: its texts, and the tokens of its context and of its continuation.
TokenizedRequest = tuple[Any, list[int], list[int]]


@dataclass(frozen=True)
class ScoringRow:
    """One input of the model, which can score several answers that differ only in their last token.

    Args:
        tokens: context and answer, without the last token.
        answers: the tokens of each answer; an answer begins anywhere in the row and ends one token after it.
    """

    tokens: list[int]
    answers: list[list[int]]

    @property
    def scored_tokens(self) -> int:
        """The positions whose logits are needed."""
        return max(map(len, self.answers))


def rows_of(
    requests: Sequence[TokenizedRequest], *, order: Order = "length"
) -> tuple[list[ScoringRow], list[list[int]]]:
    """Return the rows of requests, and the indices of each row's requests.

    Args:
        order: ``length``: from the longest to the shortest. This is the harness's own order, so batches are equal to
            its batches. ``prefix``: keep requests together that begin with the same tokens. ``given``: keep the order.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (_, context, answer) in enumerate(requests):
        groups[tuple(context + answer[:-1])].append(index)

    def by_length(item: tuple[tuple[int, ...], list[int]]) -> tuple[int, tuple[int, ...]]:
        tokens, indices = item
        longest = max(indices, key=lambda index: len(requests[index][2]))
        return -len(tokens), (*tokens, requests[longest][2][-1])

    ordered = list(groups.items())
    if order == "length":
        ordered.sort(key=by_length)
    elif order == "prefix":
        ordered = [ordered[index] for index in prefixes.ordered([tokens for tokens, _ in ordered])]
    rows = [ScoringRow(list(tokens), [requests[index][2] for index in indices]) for tokens, indices in ordered]
    return rows, [indices for _, indices in ordered]


def score(
    model: Any, rows: Sequence[ScoringRow], *, max_length: int, share_prefixes: bool = False
) -> list[list[Answer]]:
    """Return the answers' log-likelihoods of each row.

    Args:
        rows: the batch. Rows longer than ``max_length`` are cut from the left, as by the harness.
    """
    _check_fits(rows, max_length)
    cut = [row.tokens[-max_length:] for row in rows]
    packed = prefixes.packed(cut) if share_prefixes else [prefixes.alone(index, row) for index, row in enumerate(cut)]
    scores: dict[int, list[Answer]] = {}
    for is_shared in (False, True):
        if batch := [row for row in packed if (len(row.paths) > 1) == is_shared]:
            scores |= _scores(model, batch, rows, is_shared)
    return [scores[index] for index in range(len(rows))]


def _scores(model: Any, batch: list[Packed], rows: Sequence[ScoringRow], is_shared: bool) -> dict[int, list[Answer]]:
    """Return the answers' log-likelihoods by the index of their row; one call of the model."""
    import torch

    indices = [index for packed in batch for index in packed.paths]
    counts = [rows[index].scored_tokens for index in indices]
    where = [
        (number, position)
        for number, packed in enumerate(batch)
        for index, path in packed.paths.items()
        for position in path[-rows[index].scored_tokens :]
    ]
    number, position = torch.tensor(where, device=model.device).T
    inputs = prefixes.inputs(batch, model.device) if is_shared else {"input_ids": _padded(batch, model.device)}
    with torch.inference_mode(), _only(model, lambda hidden: hidden[number, position].unsqueeze(0)):
        logits = model(**inputs, use_cache=False).logits[0].float()
        nats, greedy = torch.log_softmax(logits, dim=-1), logits.argmax(dim=-1)
        parts = zip(indices, nats.split_with_sizes(counts), greedy.split_with_sizes(counts), strict=True)
        return {index: [_answer(part, best, answer) for answer in rows[index].answers] for index, part, best in parts}


def _padded(batch: list[Packed], device: Any) -> Tensor:
    import torch

    longest = max(len(row.tokens) for row in batch)
    return torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in batch], device=device)


def _check_fits(rows: Sequence[ScoringRow], max_length: int) -> None:
    longest = max(row.scored_tokens for row in rows)
    if longest > max_length:
        raise EvaluationError(
            f"an answer has {longest} tokens, and the model's context only {max_length}",
            hint="choose tasks without such answers with eval.tasks, or evaluate a model with a longer context",
        )


def _answer(nats: Tensor, greedy: Tensor, answer: list[int]) -> Answer:
    """Return the log-likelihood of the answer that ends after the last position, and whether it is greedy."""
    tokens = nats.new_tensor(answer).long()
    chosen = nats[-len(answer) :].gather(1, tokens[:, None]).squeeze(1)
    return float(chosen.sum()), bool((greedy[-len(answer) :] == tokens).all())


@contextmanager
def _only(model: Any, choose: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass only the chosen hidden states to the model's head; other parts of the model don't change."""
    # prepend: before the hooks with which transformers distributes the head
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda head, inputs: (choose(inputs[0]), *inputs[1:]), prepend=True
    )
    try:
        yield
    finally:
        hook.remove()
