"""How many requests fit into memory together, for ``eval.batch_size=auto``.

The first guess is computed from the model's size. On a device that raises an error when its memory is exhausted, the
guess uses most of the free memory and is halved after each such error, and the batch is tried again in smaller parts. A
CPU raises no such error (the kernel ends a process), so the guess is cautious there, and shared by all processes of the
evaluation.

The processes of a shared model agree on the smallest of their budgets, so that all compute the same batches. A process
whose memory is exhausted can't tell the others, which wait for it in a sum. So it reports to the process that started
it, and that process starts them again with half of that batch's memory (``eval.serving.pool``).
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from conf.devices import DEVICES
from eval.serving.scoring import ScoringRow
from hlatctl.run.errors import EvaluationError
from hlatctl.run.processes import free_host_bytes

#: Shares of the free memory that a batch may take.
_OF_HOST, _OF_DEVICE = 0.25, 0.9
#: Assumed memory of a device that doesn't report how much it has.
_UNKNOWN_BYTES = 16 << 30
#: Copies of a token's hidden state, and of its wider one in the feed-forward layer, that exist simultaneously.
_HIDDEN_COPIES, _INTERMEDIATE_COPIES = 8, 3
#: Logits, their FP32 copy and their softmax.
_LOGITS_BYTES = 12
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a process needs in addition to a model's weights.

    Args:
        token: activations of one input token in one layer.
        kept_token: keys and values of one token in all layers, while answers are generated.
        logit_token: logits of one token.
    """

    token: int
    kept_token: int
    logit_token: int

    @classmethod
    def of(cls, model: Any, *, sharing: int = 1) -> Cost:
        """Return the costs of a model of transformers for each of the processes that share it.

        These share the feed-forward layers, the keys and the values. Each has all hidden states and logits.
        """
        config = model.config.get_text_config()
        hidden, size = int(config.hidden_size), int(model.dtype.itemsize)
        intermediate = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or hidden // heads)
        kept = 2 * int(config.num_hidden_layers) * int(getattr(config, "num_key_value_heads", None) or heads) * width
        return cls(
            token=size * (_HIDDEN_COPIES * hidden + -(-_INTERMEDIATE_COPIES * intermediate // sharing)),
            kept_token=-(-size * kept // sharing),
            logit_token=_LOGITS_BYTES * int(config.vocab_size),
        )


class Budget:
    """The memory of a batch: at most ``free_bytes``."""

    def __init__(self, cost: Cost, free_bytes: float) -> None:
        self._cost, self.free_bytes = cost, free_bytes
        self._tried_bytes = free_bytes

    def fitting_rows(self, rows: Sequence[ScoringRow]) -> int:
        """Return how many of the first rows fit, at least one."""
        longest, scored, self._tried_bytes = 0, 0, 0.0
        for count, row in enumerate(rows, 1):
            longest, scored = max(longest, len(row.tokens)), scored + row.scored_tokens
            needed = count * longest * self._cost.token + scored * self._cost.logit_token
            if needed > self.free_bytes and count > 1:
                return count - 1
            self._tried_bytes = needed
        return len(rows)

    def fitting_answers(self, context_tokens: int, most: int) -> int:
        """Return how many answers can be generated together in a context of this many tokens, at least one."""
        of_one = context_tokens * (self._cost.token + self._cost.kept_token) + self._cost.logit_token
        count = max(1, min(most, int(self.free_bytes // of_one)))
        self._tried_bytes = count * of_one
        return count

    def halve(self) -> None:
        """From now on, allow half of what was tried last."""
        self.free_bytes = min(self.free_bytes, self._tried_bytes) / 2


class Exhausted(Exception):
    """A process of a shared model has no memory for a batch; restart all with at most ``most_bytes`` for one."""

    def __init__(self, most_bytes: float) -> None:
        super().__init__(most_bytes)
        self.most_bytes = most_bytes


def budget(model: Any, *, processes: int = 1, most_bytes: float | None = None) -> Budget:
    """Return the memory that a batch of a loaded model may take now; all processes that share the model call this."""
    free = min(_free_bytes(model.device, processes), most_bytes or math.inf)
    if not is_shared():
        return Budget(Cost.of(model), free)
    import torch
    import torch.distributed as dist

    smallest = torch.tensor(free, dtype=torch.float32, device=model.device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return Budget(Cost.of(model, sharing=dist.get_world_size()), float(smallest))


def in_parts(
    do: Callable[[Sequence[_T]], list[_R]], items: Sequence[_T], limit: Budget, fitting: Callable[[Sequence[_T]], int]
) -> list[_R]:
    """Return the results of all items, computing as many together as fit; after an out-of-memory error, half as many.

    Args:
        items: ordered from the largest.

    Raises:
        EvaluationError: memory is too small for one item.
        Exhausted: this process shares the model, and memory is too small for the batch.
    """
    results: list[_R] = []
    while len(results) < len(items):
        rest = items[len(results) :]
        done = _attempt(do, rest[: fitting(rest)])
        if done is None:
            limit.halve()
            if is_shared():
                raise Exhausted(limit.free_bytes)
            _release()
        else:
            results += done
    return results


def _attempt(do: Callable[[Sequence[_T]], list[_R]], items: Sequence[_T]) -> list[_R] | None:
    """Return the results of some items, or None if they don't fit into memory."""
    try:
        return do(items)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if len(items) == 1:
            raise too_large(error, 1) from error
        return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of PyTorch says that memory is exhausted, on any device."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or bool(
        re.search(r"out of memory|can't allocate memory|Insufficient memory", str(error), re.IGNORECASE)
    )


def is_shared() -> bool:
    """Return whether this process has only a part of the model."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def too_large(error: RuntimeError, batch_size: int, *, can_be_auto: bool = True) -> EvaluationError:
    """Return the error for a batch that doesn't fit."""
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    smaller = "set eval.dtype=bfloat16, or raise eval.tensor_parallel_size"
    fewer = "auto" if can_be_auto else f"{batch_size // 2}"
    hint = f"set eval.batch_size={fewer}" if batch_size > 1 else smaller
    return EvaluationError(f"eval.batch_size={batch_size}: memory is exhausted ({why})", hint=hint)


def _free_bytes(device: Any, processes: int) -> float:
    import torch

    if DEVICES[device.type].memory == "host":
        return host_share_bytes(processes)
    module = torch.get_device_module(device.type)
    if not hasattr(module, "mem_get_info"):  # unknown memory: begin with a large value; errors show what fits
        return float(_UNKNOWN_BYTES)
    return float(_OF_DEVICE * module.mem_get_info(device)[0])


def host_share_bytes(processes: int) -> float:
    """Return what each of some processes on this host may take of its free memory; training may need the rest."""
    return _OF_HOST * free_host_bytes() / processes


def _release() -> None:
    import torch

    gc.collect()
    module = torch.get_device_module()
    if hasattr(module, "empty_cache"):
        module.empty_cache()
