"""Answers of a model, stored batch by batch, so that an interrupted task continues where it stopped.

:class:`Remembering` sits between the harness and its model. It makes the same batches as the harness, from the longest
request to the shortest, because the order and the padding of a batch decide the last bits of a log-likelihood and which
answers are sampled. So every answer equals an undisturbed one bit for bit. The harness's own cache is not used: it
stores pickles, stores no sampled answers, and puts missing requests into other batches.

:class:`KeptAnswers` is the file: append-only JSON Lines, one batch per line, with a checksum. A line's key hashes
everything that decides its answers. Damaged lines are ignored, so their batches are computed again. A line reaches the
operating system immediately, so it survives the process. It reaches the disk within seconds: waiting for the disk takes
about 5 ms, often longer than a batch of a small model, and protects only from a crash of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from eval.serving.scoring import Answer, TokenizedRequest, rows_of
from hlatctl.run.files import DAMAGED, MAX_FILE_BYTES, lines, parse_json

_SYNC_EVERY_S = 5.0
#: Hexadecimal digits of a key: 128 bits.
_KEY_DIGITS = 32


class Encoded(str):
    """A continuation whose tokens, and those of its context, its task has chosen; otherwise they follow from the texts.

    Attributes:
        scored: how many of its tokens count; a request must have one, also if none counts.
    """

    _context: array[int]
    _continuation: array[int]
    scored: int

    @classmethod
    def of(cls, text: str, context: list[int], continuation: list[int], *, scored: int) -> Encoded:
        """Return a text with its tokens, in 4 bytes each."""
        encoded = cls(text)
        encoded._context, encoded._continuation = array("i", context), array("i", continuation)
        encoded.scored = scored
        return encoded

    @property
    def tokens(self) -> tuple[list[int], list[int]]:
        """The tokens of the context and of the continuation."""
        return list(self._context), list(self._continuation)


class KeptAnswers:
    """The answers of one task, in memory and in a file.

    Args:
        path: the file; None keeps the answers only in memory.
        identity: identifies model and contract; answers with another identity are ignored.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self._synced_s = time.monotonic()
        self._known: dict[str, list[Any]] = dict(_read(path)) if path and path.is_file() else {}

    def keys(self, batches: Iterable[bytes]) -> list[str]:
        """Return a key for each batch, from everything that its answers depend on; equal batches are numbered."""
        seen: Counter[bytes] = Counter()
        keys = []
        for batch in batches:
            content = hashlib.sha256(self._identity.encode() + b"\n" + batch).digest()
            seen[content] += 1
            keys.append(hashlib.sha256(content + str(seen[content]).encode()).hexdigest()[:_KEY_DIGITS])
        return keys

    def find(self, key: str, requests: int) -> list[Any] | None:
        """Return the answers of a batch, or None if they are not all stored."""
        answers = self._known.get(key)
        return answers if answers is not None and len(answers) == requests else None

    def keep(self, key: str, answers: list[Any]) -> None:
        """Add the answers of a batch, which are JSON values."""
        if self._path is None:
            return
        line = json.dumps([key, answers, _crc(key, answers)])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            # The newline comes first: a killed process may have left an incomplete line.
            file.write("\n" + line)
            file.flush()
            if time.monotonic() - self._synced_s >= _SYNC_EVERY_S:
                os.fsync(file.fileno())
                self._synced_s = time.monotonic()


def _read(path: Path) -> Iterator[tuple[str, list[Any]]]:
    with path.open("rb") as file:
        for line, length in lines(file, MAX_FILE_BYTES):
            try:
                key, answers, crc = parse_json(line if length <= MAX_FILE_BYTES else b"")
                if crc == _crc(key, answers) and isinstance(answers, list):
                    yield str(key), answers
            except DAMAGED:
                continue


def _crc(key: str, answers: list[Any]) -> int:
    return zlib.crc32(json.dumps([key, answers]).encode())


_T = TypeVar("_T")

#: Indices of requests, in the batch's order.
Batch = list[int]


def text_batches(requests: Sequence[Any], batch_size: int, tokens: Callable[[str], int]) -> list[Batch]:
    """Return the batches of prompts, grouped by settings and sorted from the longest prompt."""
    groups: dict[str, Batch] = defaultdict(list)
    for index, (_, settings) in enumerate(requests):
        groups[json.dumps(settings, sort_keys=True, default=str)].append(index)
    lengths = {prompt: tokens(prompt) for prompt in {prompt for prompt, _ in requests}}
    ordered = [
        sorted(group, key=lambda index: (-lengths[requests[index][0]], requests[index][0])) for group in groups.values()
    ]
    return [batch for group in ordered for batch in _cut(group, batch_size)]


def likelihood_batches(
    requests: Sequence[TokenizedRequest], batch_size: int, *, by_prefix: bool = False
) -> list[Batch]:
    """Return the batches of continuations, from the longest sequence.

    Args:
        by_prefix: keep sequences together that begin with the same tokens. The requests of a batch are in that order,
            and so are its rows, so the rows don't depend on how many batches are computed together.
    """
    _, sequences = rows_of(requests, order="prefix" if by_prefix else "length")
    batches = [[index for indices in cut for index in indices] for cut in _cut(sequences, batch_size)]
    return batches if by_prefix else [sorted(batch) for batch in batches]


def _cut(values: list[_T], size: int) -> list[list[_T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


#: Called with the number of answered requests and the number of all requests of the task.
Progress = Callable[[int, int], None]


class Remembering:
    """A model of the harness whose answers are stored in a file while a task runs."""

    def __init__(self, lm: Any, *, batch_size: int, seed: int) -> None:
        self._lm, self._batch_size, self._seed = lm, batch_size, seed
        # A question is encoded alone and with each choice in turn.
        self.tok_encode = lru_cache(maxsize=2)(lm.tok_encode)
        self.begin(None, "", lambda done, total: None)

    def begin(self, path: Path | None, identity: str, progress: Progress) -> None:
        """Begin a task.

        Args:
            path: file of its answers; those of an earlier try are used. None stores nothing.
            identity: identifies model and contract; answers with another identity are not used.
        """
        self._kept = KeptAnswers(path, identity)
        self._progress, self._done, self._total = progress, 0, 0

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the model."""
        return getattr(self._lm, name)

    def loglikelihood(self, requests: list[Any]) -> list[Answer]:
        """Return the log-likelihood in nats of each continuation, and whether it is the likeliest.

        The harness's own function converts requests to token ids and calls the methods below instead of the model's.
        """
        from lm_eval.api.model import TemplateLM

        answers: list[Answer] = TemplateLM.loglikelihood(self, requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood in nats of each text.

        The harness's own function cuts the texts into windows. Progress counts the windows that it has requested.
        """
        answers: list[float] = type(self._lm).loglikelihood_rolling(self, requests, disable_tqdm=True)
        return answers

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the generated answers."""
        asked = [request.args for request in requests]

        def generate(batch: list[Any], key: str) -> list[str]:
            self._seed_sampling(key, batch[0].args[1])
            return list(self._lm.generate_until(batch, disable_tqdm=True))

        return self._answer(
            requests,
            text_batches(asked, self._batch_size, lambda prompt: len(self._lm.tok_encode(prompt))),
            content=lambda batch: json.dumps([each.args for each in batch], sort_keys=True, default=str).encode(),
            ask=generate,
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if isinstance(continuation, Encoded):
            return continuation.tokens
        pair: tuple[list[int], list[int]] = type(self._lm)._encode_pair(self, context, continuation)
        return pair

    def _loglikelihood_tokens(self, requests: Sequence[TokenizedRequest], **options: Any) -> list[Answer]:
        """Return the answers to all requests of a task; called by the harness.

        With the option ``override_bs`` the requests are windows of long texts, already a batch.
        """
        is_batch = options.get("override_bs") is not None
        answers = self._answer(
            requests,
            [list(range(len(requests)))]
            if is_batch
            else likelihood_batches(requests, self._batch_size, by_prefix=getattr(self._lm, "share_prefixes", False)),
            content=_token_bytes,
            ask=lambda batch, key: self._lm._loglikelihood_tokens(batch, **options),
        )
        return [(nats, is_greedy) for nats, is_greedy in answers]

    def _answer(
        self,
        requests: Sequence[Any],
        batches: list[Batch],
        *,
        content: Callable[[list[Any]], bytes],
        ask: Callable[[list[Any], str], list[Any]],
    ) -> list[Any]:
        """Return the answers in the order of the requests; compute only the batches that are not stored."""
        answers: list[Any] = [None] * len(requests)
        asked = [[requests[index] for index in batch] for batch in batches]
        missing = []
        for batch, questions, key in zip(batches, asked, self._kept.keys(map(content, asked)), strict=True):
            known = self._kept.find(key, len(batch))
            if known is None:
                missing.append((batch, questions, key))
            for index, answer in zip(batch, known or (), strict=False):
                answers[index] = answer
        self._count(total=len(requests), done=len(requests) - sum(len(batch) for batch, _, _ in missing))
        for batch, questions, key in missing:
            given = ask(questions, key)
            self._kept.keep(key, given)
            for index, answer in zip(batch, given, strict=True):
                answers[index] = answer
            self._count(done=len(batch))
        return answers

    def _count(self, *, total: int = 0, done: int = 0) -> None:
        self._total += total
        self._done += done
        self._progress(self._done, self._total)

    def _seed_sampling(self, key: str, settings: dict[str, Any]) -> None:
        """Seed sampling by the batch, so that its answers don't depend on the batches before it."""
        if not settings.get("do_sample"):
            return
        import torch

        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {key}".encode()).digest()[:4], "big")
        random.seed(seed)
        torch.manual_seed(seed)


def _token_bytes(batch: list[TokenizedRequest]) -> bytes:
    return b"".join(array("q", [len(ids), *ids]).tobytes() for _, *pair in batch for ids in pair)
