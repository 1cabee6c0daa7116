"""Sequences that begin with the same tokens, packed so that the model reads these once, for ``eval.share_prefixes``.

All choices of a question begin with the question, and all questions of a task with its solved examples. A packed row
has the shared beginning once and then each sequence's remaining tokens. A token sees only the tokens of its sequence,
and its position counts only those. So the model computes the same as for each sequence alone, except for rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hlatctl.run.errors import EvaluationError

if TYPE_CHECKING:
    from torch import Tensor

#: Maximum tokens of a packed row, unless a single sequence is longer. The cost of attention grows with its square.
_MOST_TOKENS = 2048
#: Tokens of each sequence of a trial (:func:`_try`).
_PROBE = 32
#: Largest difference that rounding causes in a trial in FP32.
_ROUNDING_NATS = 1e-5
_HINT = "eval.share_prefixes=false reads each sequence alone"


@dataclass(frozen=True)
class Packed:
    """A row of the model's input; ``paths`` has the positions of each sequence's tokens, by the sequence's index."""

    tokens: list[int]
    paths: dict[int, list[int]]


def alone(index: int, tokens: list[int]) -> Packed:
    """Return the row of one sequence."""
    return Packed(list(tokens), {index: list(range(len(tokens)))})


def ordered(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of sequences, longest first, with those together that are worth packing in one row."""
    groups: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda index: tuple(sequences[index])):
        if groups and _is_worth(_shared(sequences[groups[-1][-1]], sequences[index]), sequences[index]):
            groups[-1].append(index)
        else:
            groups.append([index])
    groups.sort(key=lambda group: -max(len(sequences[index]) for index in group))  # stable, so equal for equal requests
    return [index for group in groups for index in group]


def packed(sequences: Sequence[list[int]]) -> list[Packed]:
    """Return the rows for sequences in the order of :func:`ordered`, without padding."""
    rows: list[Packed] = []
    for index, tokens in enumerate(sequences):
        shared = _shared(sequences[index - 1], tokens) if rows else 0
        if _is_worth(shared, tokens):
            row, length = rows[-1], len(rows[-1].tokens)
            if length + len(tokens) - shared <= _MOST_TOKENS:
                row.paths[index] = row.paths[index - 1][:shared] + list(range(length, length + len(tokens) - shared))
                row.tokens.extend(tokens[shared:])
                continue
        rows.append(alone(index, tokens))
    return rows


def inputs(rows: Sequence[Packed], device: Any) -> dict[str, Tensor]:
    """Return the arguments of the model: ids, positions and attention mask."""
    import torch

    longest = max(len(row.tokens) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions = torch.zeros_like(ids)
    sees = torch.eye(longest, dtype=torch.bool).repeat(
        len(rows), 1, 1, 1
    )  # padding sees itself, because otherwise its result is NaN
    for number, row in enumerate(rows):
        ids[number, : len(row.tokens)] = torch.tensor(row.tokens)
        for path in row.paths.values():
            places = torch.tensor(path)
            positions[number, places] = torch.arange(len(path))
            sees[number, 0, places[:, None], places] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
    return {"input_ids": ids.to(device), "position_ids": positions.to(device), "attention_mask": sees.to(device)}


def check(model: Any) -> None:
    """Check that a model's attention obeys a mask that says which tokens each token sees, or raise an EvaluationError.

    A model with weights computes two short sequences in both ways.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    reason = None
    if getattr(config, "_attn_implementation", None) != "sdpa":
        reason = "it doesn't compute attention with PyTorch's own function"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        reason = "it has no positions as an input"
    elif kinds != {"full_attention"} or (window and getattr(config, "use_sliding_window", True)):
        reason = "some of its layers don't see all tokens"
    elif model.device.type != "meta":
        reason = _try(model)
    if reason:
        raise EvaluationError(
            f"eval.share_prefixes: not with a model of type {config.model_type}: {reason}", hint=_HINT
        )


def _try(model: Any) -> str | None:
    """Return why a model ignores the positions or the mask of packed rows; None if it doesn't.

    A model that ignores one of them computes the same without it. So the difference to each sequence alone must be far
    smaller than that of a trial without one of them, in any number format.
    """
    try:
        difference = _difference(model)
        wrong = min(_difference(model, without=name) for name in ("position_ids", "attention_mask"))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"a trial failed ({type(error).__name__}: {error})"
    if difference <= max(_ROUNDING_NATS, wrong / 4):
        return None
    return f"a trial gave log-likelihoods that differ by {difference:.2g} nats a token"


def _difference(model: Any, *, without: str = "") -> float:
    """Return the mean difference of packed log-likelihoods from separate ones, ``without`` an argument of the model."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    sequences = [[(7 * place + end * (place >= _PROBE // 2)) % vocabulary for place in range(_PROBE)] for end in (0, 3)]
    (row,) = packed(sequences)
    with torch.inference_mode():
        alone = model(input_ids=torch.tensor(sequences, device=model.device), use_cache=False).logits
        told = {name: value for name, value in inputs([row], model.device).items() if name != without}
        shared = model(**told, use_cache=False).logits[0]
    together = torch.stack([shared[path] for path in row.paths.values()])
    return float((together.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().mean())


def _is_worth(shared: int, tokens: Sequence[int]) -> bool:
    """Return whether a sequence shares at least as many tokens with the previous one as it has of its own."""
    return 0 < len(tokens) <= 2 * shared


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
