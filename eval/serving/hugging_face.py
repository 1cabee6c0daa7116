"""The harness's model for ``eval.runner=hf``: its class for transformers, with our log-likelihoods and batches.

Tokenization, windows of long texts, stop sequences and the text of answers are the harness's own. :class:`HuggingFace`
computes in this process. :class:`Replicas`, for ``eval.replicas`` and ``eval.tensor_parallel_size``, has a tokenizer
and no weights: worker processes compute its batches. These are the batches that one process would make, so scores don't
depend on the number of copies. The processes of one copy add the parts of a sum in another order than one process, so
scores with ``eval.tensor_parallel_size`` differ by rounding.

This module imports lm_eval and torch: import it late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import cached_property
from typing import Any, Literal, TypeVar

from lm_eval.models.huggingface import HFLM

from eval.serving import memory, prefixes, scoring
from eval.serving.model import Loaded
from eval.serving.pool import Pool
from eval.serving.scoring import Answer, ScoringRow, TokenizedRequest

BatchSize = int | Literal["auto"]
_T = TypeVar("_T")
_R = TypeVar("_R")
#: Requests that ``eval.batch_size=auto`` sorts by length together; each batch has as many of them as fit.
AUTO_REQUESTS = 256
#: Batch size of sampled answers with ``auto``. The answers depend on it, so memory must not decide it.
_AUTO_SAMPLED = 16


class HuggingFace(HFLM):  # type: ignore[misc]  # lm_eval publishes no types
    """A model of transformers that answers the harness's requests.

    Args:
        processes: number of processes that evaluate on this host; with ``auto`` they share its memory.
        share_prefixes: compute tokens once with which several sequences of a batch begin.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        batch_size: BatchSize,
        processes: int = 1,
        most_bytes: float | None = None,
        share_prefixes: bool = False,
    ) -> None:
        if share_prefixes:
            prefixes.check(loaded.model)
        self.share_prefixes = share_prefixes
        self.requests_per_batch = AUTO_REQUESTS if batch_size == "auto" else batch_size
        super().__init__(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            max_length=loaded.max_length,
            batch_size=self.requests_at_once,
        )
        self._is_auto, self._processes, self._most_bytes = batch_size == "auto", processes, most_bytes

    @cached_property
    def _budget(self) -> memory.Budget:
        return memory.budget(self.model, processes=self._processes, most_bytes=self._most_bytes)

    @property
    def requests_at_once(self) -> int:
        """How many requests to ask for together."""
        return self.requests_per_batch

    def score(self, rows: Sequence[ScoringRow]) -> list[list[Answer]]:
        """Return the answers' log-likelihoods of each row of a batch; with ``auto`` in parts that fit into memory."""

        def score(part: Sequence[ScoringRow]) -> list[list[Answer]]:
            return scoring.score(self.model, part, max_length=self.max_length, share_prefixes=self.share_prefixes)

        if self._is_auto:
            return memory.in_parts(score, rows, self._budget, self._budget.fitting_rows)
        return self._whole(score, rows)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the generated answers; with ``auto`` in parts that fit into memory."""
        if not self._is_auto:
            return self._whole(self._generate, requests)
        if requests[0].args[1].get("do_sample"):
            parts = [requests[at : at + _AUTO_SAMPLED] for at in range(0, len(requests), _AUTO_SAMPLED)]
            return [text for part in parts for text in self._whole(self._generate, part)]
        order = sorted(range(len(requests)), key=lambda index: -len(self.tok_encode(requests[index].args[0])))

        def generate(part: Sequence[int]) -> list[str]:
            return self._generate([requests[index] for index in part])

        def fitting(rest: Sequence[int]) -> int:  # computed again for each part, because an error halves the budget
            return self._budget.fitting_answers(self.max_length, len(rest))

        texts = memory.in_parts(generate, order, self._budget, fitting)
        return [text for _, text in sorted(zip(order, texts, strict=True))]

    def _generate(self, requests: Sequence[Any]) -> list[str]:
        texts: list[str] = super().generate_until(list(requests), disable_tqdm=True)
        return texts

    def _whole(self, do: Callable[[Sequence[_T]], list[_R]], items: Sequence[_T]) -> list[_R]:
        try:
            return do(items)
        except RuntimeError as error:
            if not memory.is_out_of_memory(error):
                raise
            at_once = min(len(items), self.requests_per_batch)
            raise memory.too_large(error, at_once, can_be_auto=not self._is_auto) from error

    def _scored(self, batches: Sequence[Sequence[ScoringRow]]) -> Iterator[list[list[Answer]]]:
        return map(self.score, batches)

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Return the log-likelihood of each request, in order; the harness calls it with tokens.

        Args:
            requests: text, tokens of the context, tokens of the answer.
            disable_tqdm: ignored; progress is counted by the cache's hook.
            override_bs: the requests are windows of long texts. They are cut into batches before they are ordered.
        """
        size = self.requests_per_batch
        starts = range(0, len(requests), size) if override_bs else range(len(requests) and 1)
        batches: list[tuple[list[ScoringRow], list[list[int]]]] = []
        for start in starts:
            rows, indices = scoring.rows_of(
                requests[start : start + size] if override_bs else requests,
                order="given" if self.share_prefixes and not override_bs else "length",
            )
            absolute = [[start + index for index in group] for group in indices]
            batches += [(rows[i : i + size], absolute[i : i + size]) for i in range(0, len(rows), size)]
        answers: list[Answer] = [(0.0, False)] * len(requests)
        for (_, groups), scores in zip(batches, self._scored([rows for rows, _ in batches]), strict=True):
            for index, answer in _flat(groups, scores):
                answers[index] = answer
                if requests[index][0] is not None:  # windows have no text; the harness counts their texts
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return answers


def _flat(groups: list[list[int]], scores: list[list[Answer]]) -> Iterator[tuple[int, Answer]]:
    for indices, row in zip(groups, scores, strict=True):
        yield from zip(indices, row, strict=True)


#: Batches per copy that are requested together. With more, copies wait less for the slowest, but more answers are lost
#: when a process is killed.
_ROUNDS = 4


class Replicas(HuggingFace):
    """A model whose copies compute in other processes.

    Args:
        share_prefixes: must equal the copies' setting.
    """

    def __init__(self, described: Loaded, pool: Pool, *, batch_size: BatchSize, share_prefixes: bool = False) -> None:
        self._pool = pool
        super().__init__(described, batch_size=batch_size, share_prefixes=share_prefixes)

    @property
    def requests_at_once(self) -> int:
        """How many requests to ask for together."""
        return self.requests_per_batch * self._pool.replicas * _ROUNDS

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the generated answers. Sampled ones depend on the batch, not on the copy that computes it."""
        import torch

        seed, batches = torch.initial_seed() % 2**32, list(self._batches(requests))
        jobs = [
            {"requests": [requests[index].args for index in batch], "seed": seed + number}
            for number, batch in enumerate(batches)
        ]
        answers = [""] * len(requests)
        for batch, texts in zip(batches, self._pool.map("generate", jobs), strict=True):
            for index, text in zip(batch, texts, strict=True):
                answers[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return answers

    def _batches(self, requests: Sequence[Any]) -> Iterator[list[int]]:
        """Yield the indices of each batch in the harness's order: by settings, then from the longest prompt."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        prompts = [request.args[0] for request in requests]
        for group in groups.values():
            ordered = sorted(group, key=lambda index: (-len(self.tok_encode(prompts[index])), prompts[index]))
            for start in range(0, len(ordered), self.requests_per_batch):
                yield ordered[start : start + self.requests_per_batch]

    def _scored(self, batches: Sequence[Sequence[ScoringRow]]) -> Iterator[list[list[Answer]]]:
        jobs = ({"rows": [astuple(row) for row in rows]} for rows in batches)
        for rows in self._pool.map("score", jobs):
            yield [[(nats, is_greedy) for nats, is_greedy in answers] for answers in rows]
