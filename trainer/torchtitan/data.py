"""This project's corpus for torchtitan: packed sequences addressed by step, with the positions that mask documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

if TYPE_CHECKING:
    from trainer.torchtitan.training import Training


class NoTokenizer(BaseTokenizer):
    """torchtitan's tokenizer, which nothing uses: the batches are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raise: there is no text."""
        raise NotImplementedError

    decode = get_vocab_size = encode


class Loader(BaseDataLoader):
    """Yields this process's micro-batches of each step. Checkpoints have its position, not torchtitan's states."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Who has the batches."""

        _training: Training | None = None

    def __init__(self, config: Config, *, local_batch_size: int, **_: Any) -> None:
        assert config._training is not None
        self._training, self._sequences = config._training, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        end_id = self._training.document_end_id
        while True:
            inputs, targets = self._training.next_batch()
            yield from micro_batches(inputs, targets, self._sequences, end_id)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the manager saves the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; see :meth:`state_dict`."""


def micro_batches(
    inputs: Tensor, targets: Tensor, sequences: int, end_id: int | None
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield inputs and targets (n, seq_len) in pieces of so many sequences, as torchtitan's loop takes them."""
    for some, following in zip(*(torch.split(tokens, sequences) for tokens in (inputs, targets)), strict=True):
        yield {"input": some, "positions": positions(some, end_id)}, following


def positions(tokens: Tensor, end_id: int | None) -> Tensor:
    """Return each token's position (sequences, seq_len), int64: in its document, which ends with ``end_id``.

    torchtitan keeps attention within documents by the positions that restart. Without ``end_id`` the whole sequence is
    one document.
    """
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    if end_id is None:
        return places.contiguous()
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = torch.where(tokens[:, :-1] == end_id, places[:, 1:], 0)
    return places - begins.cummax(dim=1).values
