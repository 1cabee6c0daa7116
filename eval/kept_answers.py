"""The file of a task's answers: append-only JSON Lines, one batch per line, with a checksum.

A line's key hashes everything that decides its answers. Damaged lines are ignored, so their batches are asked again. A
line reaches the operating system at once, so it survives the process. It reaches the disk within seconds: waiting for
the disk takes about 5 ms, often longer than a batch of a small model, and protects only from a crash of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hlatctl.run.reading import DAMAGED, MAX_FILE_BYTES, lines, parse_json

_SYNC_EVERY_S = 5.0
#: Hexadecimal digits of a key: 128 bits.
_KEY_DIGITS = 32


class KeptAnswers:
    """The answers of one task, in memory and in a file.

    Args:
        path: of the file; None: only in memory.
        identity: of model and contract; answers with another identity are ignored.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self._path, self._identity = path, identity
        self._synced_s = time.monotonic()
        self._known: dict[str, list[Any]] = dict(_read(path)) if path and path.is_file() else {}

    def keys(self, batches: Iterable[bytes]) -> list[str]:
        """Return a key for each batch, given all that its answers depend on; equal batches are numbered."""
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
