"""A model that stores its generated answers batch by batch, so that an interrupted task continues where it stopped.

It sits between the harness and its model, and also counts requests. The file of answers is append-only JSON Lines, one
request per line, with a key that hashes everything that decides the answer; damaged lines are ignored. The harness's
own cache is not used: it stores pickles, and no sampled answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hlatctl.run.reading import DAMAGED, parse_json

#: Called with the number of answered requests, and of all requests of the task.
Progress = Callable[[int, int], None]


class Remembering:
    """A model of the harness whose generated answers are stored in a file while a task runs.

    Args:
        lm: the harness's model.
        batch_size: requests that it answers at once.
        seed: of sampled answers.
    """

    def __init__(self, lm: Any, *, batch_size: int, seed: int) -> None:
        self._lm, self._batch_size, self._seed = lm, batch_size, seed
        self._answers = _Answers(None, "")
        self._count = _Count(lambda done, total: None)

    def begin(self, path: Path, identity: str, progress: Progress) -> None:
        """Begin a task.

        Args:
            path: file of its answers; those of an earlier try are used.
            identity: of model and contract; answers with another identity are not used.
            progress: called when requests are answered.
        """
        self._answers = _Answers(path, identity)
        self._count = _Count(progress)
        self._lm.set_cache_hook(self._count)

    def __getattr__(self, name: str) -> Any:
        """Forward everything else to the model."""
        return getattr(self._lm, name)

    def loglikelihood(self, requests: list[Any]) -> list[Any]:
        """Forward to the model and count."""
        self._count.expect(len(requests))
        return list(self._lm.loglikelihood(requests))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """Forward to the model and count."""
        self._count.expect(len(requests))
        return list(self._lm.loglikelihood_rolling(requests))

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the answers; the model generates only missing ones, in the batches that it would make itself."""
        keys, known = self._answers.keys(requests), self._answers.known
        self._count.expect(len(requests), answered=sum(key in known for key in keys))
        for batch in self._batches(requests):
            if any(keys[index] not in known for index in batch):
                self._count.add(-sum(keys[index] in known for index in batch))
                self._seed_sampling([keys[index] for index in batch], requests[batch[0]])
                answers = self._lm.generate_until([requests[index] for index in batch])
                self._answers.keep([keys[index] for index in batch], answers)
        return [known[key] for key in keys]

    def _batches(self, requests: list[Any]) -> Iterator[list[int]]:
        """Yield the indices of each batch in the harness's order: by settings, then from the longest prompt."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        for group in groups.values():
            ordered = sorted(group, key=lambda index: self._order(requests[index].args[0]))
            for start in range(0, len(ordered), self._batch_size):
                yield ordered[start : start + self._batch_size]

    def _order(self, prompt: str) -> tuple[int, str]:
        return -len(self._lm.tok_encode(prompt)), prompt

    def _seed_sampling(self, keys: list[str], request: Any) -> None:
        """Seed sampling by the batch, so that its answers don't depend on the batches before it."""
        if not request.args[1].get("do_sample"):
            return
        import torch

        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {' '.join(keys)}".encode()).digest()[:4], "big")
        random.seed(seed)
        torch.manual_seed(seed)


class _Answers:
    """The answers of one task, in memory and in a file."""

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self.known: dict[str, str] = dict(_read(path)) if path and path.is_file() else {}

    def keys(self, requests: Iterable[Any]) -> list[str]:
        """Return a key for each request; equal requests are numbered."""
        seen: dict[str, int] = defaultdict(int)
        keys = []
        for request in requests:
            text = json.dumps([self._identity, *request.args], sort_keys=True, default=str)
            seen[text] += 1
            keys.append(hashlib.sha256(f"{seen[text]} {text}".encode()).hexdigest())
        return keys

    def keep(self, keys: list[str], answers: list[str]) -> None:
        """Add answers, durably and in one write."""
        self.known.update(zip(keys, answers, strict=True))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps([key, answer, _crc(key, answer)]) for key, answer in zip(keys, answers, strict=True)]
        with self._path.open("a", encoding="utf-8") as file:
            # The newline comes first: a killed process may have left an incomplete line.
            file.write("\n" + "\n".join(lines))
            file.flush()
            os.fsync(file.fileno())


class _Count:
    """Counts requests; the harness's models call it as their cache, once per answer."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done, self._total = progress, 0, 0

    def expect(self, requests: int, *, answered: int = 0) -> None:
        """Add requests to the total, some of which are answered already."""
        self._total += requests
        self.add(answered)

    def add(self, requests: int) -> None:
        """Add answered requests and report progress."""
        self._done += requests
        self._progress(min(max(self._done, 0), self._total), self._total)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Count one answer; called by the harness."""
        self.add(1)


def _read(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            key, answer, crc = parse_json(line)
        except DAMAGED:
            continue  # the request is asked again
        if crc == _crc(str(key), str(answer)):
            yield str(key), str(answer)


def _crc(key: str, answer: str) -> int:
    return zlib.crc32(json.dumps([key, answer]).encode())
