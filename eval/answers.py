"""A model that remembers: generated answers are kept batch by batch, so that a task cut off goes on where it was.

Stands between the harness and its model, and passes everything on. The file of answers is append-only JSON Lines, one
request a line, under a key that holds all that decides the answer; a torn or damaged line is no answer. The harness's
own cache is not used: it keeps pickles, and no sampled answers. Also where requests are counted.
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

#: Told of requests answered, and of all of a task's.
Progress = Callable[[int, int], None]


class Remembering:
    """The harness's model of a runner, whose generated answers are kept in a file while a task runs.

    Args:
        lm: the model.
        batch_size: requests that it answers at once.
        seed: of sampled answers.
    """

    def __init__(self, lm: Any, *, batch_size: int, seed: int) -> None:
        self._lm, self._batch_size, self._seed = lm, batch_size, seed
        self._answers = _Answers(None, "")
        self._count = _Count(lambda done, total: None)

    def begin(self, path: Path, identity: str, progress: Progress) -> None:
        """A task begins.

        Args:
            path: of its answers; those of an earlier try are taken.
            identity: of model and contract; answers under another one are not taken.
            progress: told how many requests are answered.
        """
        self._answers = _Answers(path, identity)
        self._count = _Count(progress)
        self._lm.set_cache_hook(self._count)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the model's."""
        return getattr(self._lm, name)

    def loglikelihood(self, requests: list[Any]) -> list[Any]:
        """Pass on, and count."""
        self._count.expect(len(requests))
        return list(self._lm.loglikelihood(requests))

    def loglikelihood_rolling(self, requests: list[Any]) -> list[Any]:
        """Pass on, and count."""
        self._count.expect(len(requests))
        return list(self._lm.loglikelihood_rolling(requests))

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Answer what is not answered yet, in the batches that the model would make itself."""
        keys, known = self._answers.keys(requests), self._answers.known
        self._count.expect(len(requests), answered=sum(key in known for key in keys))
        for batch in self._batches(requests):
            lacking = any(keys[index] not in known for index in batch)
            if lacking:
                self._count.add(-sum(keys[index] in known for index in batch))
                self._settle_chance([keys[index] for index in batch], requests[batch[0]])
                answers = self._lm.generate_until([requests[index] for index in batch])
                self._answers.keep([keys[index] for index in batch], answers)
        return [known[key] for key in keys]

    def _batches(self, requests: list[Any]) -> Iterator[list[int]]:
        """Requests that go together, by place, in the harness's order: by settings, then from the longest prompt."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(index)
        for group in groups.values():
            ordered = sorted(group, key=lambda index: self._order(requests[index].args[0]))
            for start in range(0, len(ordered), self._batch_size):
                yield ordered[start : start + self._batch_size]

    def _order(self, prompt: str) -> tuple[int, str]:
        return -len(self._lm.tok_encode(prompt)), prompt

    def _settle_chance(self, keys: list[str], request: Any) -> None:
        """Draw the same sampled answers whatever came before: a batch done again, or after others were left out."""
        if not request.args[1].get("do_sample"):
            return
        import torch

        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {' '.join(keys)}".encode()).digest()[:4], "big")
        random.seed(seed)
        torch.manual_seed(seed)


class _Answers:
    """The answers of one task, in memory and in their file."""

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self.known: dict[str, str] = dict(_read(path)) if path and path.is_file() else {}

    def keys(self, requests: Iterable[Any]) -> list[str]:
        """A key a request; several answers to one prompt are told apart by their number."""
        seen: dict[str, int] = defaultdict(int)
        found = []
        for request in requests:
            text = json.dumps([self._identity, *request.args], sort_keys=True, default=str)
            seen[text] += 1
            found.append(hashlib.sha256(f"{seen[text]} {text}".encode()).hexdigest())
        return found

    def keep(self, keys: list[str], answers: list[str]) -> None:
        """Add answers, durably, in one piece."""
        self.known.update(zip(keys, answers, strict=True))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps([key, answer, _crc(key, answer)]) for key, answer in zip(keys, answers, strict=True)]
        with self._path.open("a", encoding="utf-8") as file:
            # The newline comes first: a torn line that a killed process has left must not swallow this one.
            file.write("\n" + "\n".join(lines))
            file.flush()
            os.fsync(file.fileno())


class _Count:
    """What the harness's models call a cache: they tell it each answer as they have it."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done, self._total = progress, 0, 0

    def expect(self, requests: int, *, answered: int = 0) -> None:
        """So many more requests are to be answered, of which some are already."""
        self._total += requests
        self.add(answered)

    def add(self, requests: int) -> None:
        """So many are."""
        self._done += requests
        self._progress(min(max(self._done, 0), self._total), self._total)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """One is; the harness's word."""
        self.add(1)


def _read(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            key, answer, crc = parse_json(line)
        except DAMAGED:
            continue  # torn or damaged: that request is asked again
        if crc == _crc(str(key), str(answer)):
            yield str(key), str(answer)


def _crc(key: str, answer: str) -> int:
    return zlib.crc32(json.dumps([key, answer]).encode())
