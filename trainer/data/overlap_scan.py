"""Scan one chunk of a corpus for the n-grams of evaluation items: the work of one process of ``trainer.data.overlap``.

``Items`` has the n-grams to find, and reports what was found of each item. Each task has its own number of words per
n-gram, by GPT-3's rule (arXiv 2005.14165, appendix C): the 5th percentile of the lengths of its items, at least 8 and
at most 13. An n-gram in more than half of a task's items belongs to the template, not to an item, and is not counted.

``Part`` is the progress of a scan, with one file per shard; any number of them can be merged. A file is replaced as a
whole and has a checksum. A file that is damaged, or belongs to other items or another corpus, counts as missing: its
chunks are scanned again.

``Consumed`` lists the documents that a run has read up to a checkpoint, in chunks that any process can read in any
order. The order of documents is computed (``trainer.data.packing``), and a checkpoint has the position of each row of
the global batch. So the numbers of finished documents determine which they are, without replay or tokenization. Once
all rows have finished a source's first epoch, its documents are read in the order of the files. Before that, a document
that the run has read twice is read twice here, too. Documents of skipped batches count as read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.checkpoint import read_rank_states
from hlatctl.run.errors import CheckpointError, DataError
from hlatctl.run.files import DAMAGED, parse_json, reading, why
from hlatctl.run.paths import RunPaths
from trainer.data import workers
from trainer.data.documents import Source, TokenSource, deal_of, sources_of
from trainer.data.ngrams import Block, Flags, Table, Words, blocks, normalise
from trainer.data.packing import Position, encoded
from trainer.data.remote import in_order
from trainer.data.tokenizer import decoder, make_encoder, tokenizer_of

#: Minimum and maximum words of an n-gram, and the percentile of the lengths.
_LEAST_WORDS, MOST_WORDS, _PERCENTILE = 8, 13, 5
#: A task with fewer items has no templates.
_TEMPLATE_ITEMS = 10


@dataclass(frozen=True, order=True)
class Place:
    """Where an n-gram was found first: the chunk's number, the source's index, the document's position there."""

    chunk: int
    source: int
    position: int


@dataclass(frozen=True, kw_only=True)
class _Task:
    words: int
    items: list[str]
    #: The item's first n-gram in the table of its task's n-grams.
    first: int


class Items:
    """The n-grams of all items, numbered over all tasks, from JSON Lines with ``task``, ``item`` and ``text``.

    Raises a DataError if the file can't be read.
    """

    def __init__(self, path: Path) -> None:
        texts = _read(path)
        self.tables: list[Table] = []
        self._tasks: dict[str, tuple[int, _Task]] = {}
        by_words: dict[int, list[bytes]] = {}
        tasks: dict[str, _Task] = {}
        for task, items in texts.items():
            words = _words([len(text.split()) for text in items.values()])
            table = by_words.setdefault(words, [])
            tasks[task] = _Task(words=words, items=list(items), first=len(table))
            table.extend(items.values())
        for words, table in by_words.items():
            self._tasks |= {name: (len(self.tables), task) for name, task in tasks.items() if task.words == words}
            self.tables.append(Table(table, words))
        self._starts = np.cumsum([0, *(len(table) for table in self.tables)]).tolist()

    def __len__(self) -> int:
        """Return the number of different n-grams."""
        return int(self._starts[-1])

    def unknown(self) -> list[Flags]:
        """Return a false flag for each n-gram of each table, to pass to :meth:`find`."""
        return [np.zeros(len(table), np.bool_) for table in self.tables]

    def find(self, block: Block, known: list[Flags]) -> Iterator[tuple[int, int]]:
        """Yield the number of each n-gram of a block that is not known yet, and the number of its document."""
        words = Words(block.text)
        for table, start, flags in zip(self.tables, self._starts, known, strict=False):
            for ngram, byte in table.find(words, flags):
                yield start + ngram, block.document_at(byte)

    def results(self, found: Mapping[int, Place]) -> dict[str, dict[str, Any]]:
        """Return what was found of each task.

        Args:
            found: places of the n-grams by their numbers.

        Returns:
            By task: ``words``; ``items``, their number; ``short``, how many have fewer words; ``overlapping``: by item
            ``ngrams`` (distinct), ``found``, the first one found as ``example``, and its ``place``.
        """
        return {name: self._result(table, task, found) for name, (table, task) in self._tasks.items()}

    def _result(self, number: int, task: _Task, found: Mapping[int, Place]) -> dict[str, Any]:
        table, start = self.tables[number], self._starts[number]
        own = (table.text_of >= task.first) & (table.text_of < task.first + len(task.items))
        pairs = np.unique(np.stack([table.text_of[own] - task.first, table.ngram_of[own]]), axis=1)
        ngrams, counts = np.unique(pairs[1], return_counts=True)
        templates = ngrams[counts > max(_TEMPLATE_ITEMS, len(task.items) / 2)]
        of_items = pairs[:, ~np.isin(pairs[1], templates)]
        hit = np.fromiter((start + ngram in found for ngram in of_items[1].tolist()), np.bool_, of_items.shape[1])
        total = np.bincount(of_items[0], minlength=len(task.items))
        overlapping: dict[str, Any] = {}
        # Pairs are sorted by item, so an item's hits follow each other.
        hit_items, starts = np.unique(of_items[0][hit], return_index=True)
        for item, own_hits in zip(hit_items.tolist(), np.split(of_items[1][hit], starts)[1:], strict=True):
            hits = own_hits.tolist()
            first = min(hits, key=lambda ngram: (found[start + ngram], table.place(ngram)))
            overlapping[task.items[item]] = {
                "ngrams": int(total[item]),
                "found": len(hits),
                "example": table.text(first).decode("utf-8", "replace"),
                "place": found[start + first],
            }
        short = len(task.items) - len(np.unique(table.text_of[own]))
        return {"words": task.words, "items": len(task.items), "short": short, "overlapping": overlapping}


def _words(lengths: list[int]) -> int:
    return int(np.clip(np.percentile(lengths, _PERCENTILE), _LEAST_WORDS, MOST_WORDS))


#: Limit of the items, which are kept in memory. Those of all tasks of the built-in suites have some 100 MB.
_MAX_ITEMS_BYTES = 1 << 30


def _read(path: Path) -> dict[str, dict[str, bytes]]:
    texts: dict[str, dict[str, bytes]] = {}
    try:
        files.check_size(path, _MAX_ITEMS_BYTES)
        with path.open("rb") as file:
            for number, (line, length) in enumerate(files.lines(file, files.MAX_FILE_BYTES), start=1):
                if length > files.MAX_FILE_BYTES:
                    raise ValueError(f"line {number} has {length:,} bytes")
                record = parse_json(line)
                texts.setdefault(str(record["task"]), {})[str(record["item"])] = normalise(str(record["text"]))
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{path}: no items can be read ({why(error)})", hint="run the same command again") from None
    return texts


@dataclass(kw_only=True)
class Part:
    """What was scanned and what was found.

    Args:
        done: numbers of the scanned chunks.
        found: places of the n-grams by their numbers.
        documents, text_bytes: amount of text that was read.
        cpu_s: CPU time of all processes.
    """

    done: set[int] = field(default_factory=set)
    found: dict[int, Place] = field(default_factory=dict)
    documents: int = 0
    text_bytes: int = 0
    cpu_s: float = 0.0

    def add(self, other: Part) -> None:
        """Add another part; an n-gram found in both keeps the first place."""
        self.done |= other.done
        for ngram, place in other.found.items():
            self.found[ngram] = min(place, self.found.get(ngram, place))
        self.documents += other.documents
        self.text_bytes += other.text_bytes
        self.cpu_s += other.cpu_s


def write_part(path: Path, part: Part, identity: Mapping[str, Any]) -> None:
    """Write a part; ``identity`` states which corpus is scanned for which items."""
    record = {
        "identity": dict(identity),
        "done": _ranges(part.done),
        "found": [[ngram, place.chunk, place.source, place.position] for ngram, place in part.found.items()],
        "documents": part.documents,
        "text_bytes": part.text_bytes,
        "cpu_s": part.cpu_s,
    }
    files.write_sealed_json(path, record)


def read_part(path: Path, identity: Mapping[str, Any], *, ngrams: int, chunks: int) -> Part:
    """Return a part; an empty one if there is none to continue.

    The file must have the identity, and only numbers of n-grams and chunks of the scan.
    """
    try:
        record = files.read_sealed_json(path)
        if record["identity"] != dict(identity):
            return Part()
        part = Part(
            done={number for first, last in record["done"] for number in range(int(first), min(int(last), chunks))},
            found={int(ngram): Place(*map(int, place)) for ngram, *place in record["found"]},
            documents=int(record["documents"]),
            text_bytes=int(record["text_bytes"]),
            cpu_s=float(record["cpu_s"]),
        )
        if not all(0 <= ngram < ngrams for ngram in part.found) or min(part.done, default=0) < 0:
            raise ValueError("names n-grams or chunks that don't exist")
    except FileNotFoundError:
        return Part()
    except (OSError, *DAMAGED) as error:
        print(f"{path}: can't be read ({why(error)}); its chunks are scanned again", file=sys.stderr, flush=True)
        return Part()
    return part


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return ``[[1, 4], [7, 8]]`` for 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


#: Minimum and maximum text of a chunk; a small corpus has :data:`_CHUNKS`. 1.8 T tokens have about 28,000.
_LEAST_BYTES, _MOST_BYTES, _CHUNKS = 1 << 20, 256 << 20, 64
#: Maximum documents of a chunk: their places are in memory, about 200 bytes each.
_MOST_DOCUMENTS = 1 << 18
#: UTF-8 bytes of a token, for corpora that don't state it.
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Chunk:
    """Some of a source's documents.

    Args:
        number: position in the order of chunks.
        first, last: range in the source's list of read documents; ``last`` is excluded.
        opened: the chunk has the unfinished documents of all rows, from all sources.
    """

    number: int
    source: int
    first: int
    last: int
    opened: bool = False


@dataclass(frozen=True)
class Reading:
    """A document's position in its source, and how many of its tokens were read; None: all."""

    source: int
    position: int
    tokens: int | None = None


class Consumed:
    """The documents that a run has read.

    Args:
        state: a checkpoint's rows of all data loaders.

    Raises:
        CheckpointError: the state belongs to another global batch size.
        DataError: the corpus can't be read.
    """

    def __init__(self, config: Config, dataset: dict[str, Any], state: Sequence[Sequence[int]]) -> None:
        self.sources = sources_of(dataset)
        rows = config.data_rows
        if len(state) != rows:
            raise CheckpointError(
                f"the checkpoint's global batch has {len(state)} sequences, train.global_batch_size={rows}"
            )
        try:
            self._rows = [Position.from_json([int(n) for n in row[1:]], len(self.sources)) for row in state]
        except (TypeError, ValueError):
            raise CheckpointError(f"the data loader's state is invalid: {str(state)[:200]}") from None
        self._counts = [len(source.documents) for source in self.sources]
        self._deal = deal_of(config, self.sources)
        #: For each source, the cumulative sums of the rows' finished documents; None: all of its documents were read.
        self._sums = [None if self._is_whole(i) else self._finished(i) for i in range(len(self.sources))]
        self._size = [bytes_of(s) / max(1, n) for s, n in zip(self.sources, self._counts, strict=True)]
        self.chunks = list(self._chunks())

    def __len__(self) -> int:
        """Return the number of finished documents."""
        return sum(self._documents(source) for source in range(len(self.sources)))

    @property
    def text_bytes(self) -> int:
        """Estimated UTF-8 bytes of the documents."""
        return round(sum(self._documents(source) * size for source, size in enumerate(self._size)))

    def readings(self, chunk: Chunk) -> list[Reading]:
        """Return the documents of a chunk in the order of their positions, each once."""
        if chunk.opened:
            return list(self._opened())
        sums = self._sums[chunk.source]
        if sums is None:
            return [Reading(chunk.source, position) for position in range(chunk.first, chunk.last)]
        return [Reading(chunk.source, position) for position in sorted(set(self._dealt(chunk, sums)))]

    def _dealt(self, chunk: Chunk, sums: npt.NDArray[np.int64]) -> Iterator[int]:
        for place in range(chunk.first, chunk.last):
            row = int(np.searchsorted(sums, place, side="right"))
            nth = place - (int(sums[row - 1]) if row else 0)
            yield self._deal.document(row, chunk.source, nth)

    def _opened(self) -> Iterator[Reading]:
        """Yield the beginning of each row's unfinished document, unless its whole source was read."""
        for row, position in enumerate(self._rows):
            source = position.source
            if source is not None and self._sums[source] is not None:
                document = self._deal.document(row, source, position.finished[source][0])
                yield Reading(source, document, position.token)

    def _documents(self, source: int) -> int:
        sums = self._sums[source]
        return self._counts[source] if sums is None else int(sums[-1])

    def _finished(self, source: int) -> npt.NDArray[np.int64]:
        return np.cumsum([row.finished[source][0] for row in self._rows], dtype=np.int64)

    def _is_whole(self, source: int) -> bool:
        """Return whether every document of a source was read: the rows share them, or each row goes through all."""
        count, rows = self._counts[source], len(self._rows)
        finished = [row.finished[source][0] for row in self._rows]
        if count < rows:
            return max(finished) >= count
        return all(n >= len(range(row, count, rows)) for row, n in enumerate(finished))

    def _chunks(self) -> Iterator[Chunk]:
        target = min(max(self.text_bytes // _CHUNKS, _LEAST_BYTES), _MOST_BYTES)
        number = 0
        for source, size in enumerate(self._size):
            documents, step = self._documents(source), min(max(1, round(target / max(1.0, size))), _MOST_DOCUMENTS)
            for first in range(0, documents, step):
                yield Chunk(number, source, first, min(first + step, documents))
                number += 1
        yield Chunk(number, 0, 0, 0, opened=True)


def bytes_of(source: Source | TokenSource) -> int:
    """Return the UTF-8 bytes of a source's text; an estimate for token ids."""
    return source.text_bytes if isinstance(source, Source) else source.estimated_tokens * _TOKEN_BYTES


#: Bytes of text between updates of the progress.
_COUNT_BYTES = 1 << 20
_DATASET = "copy the dataset.json of another run with the same corpus"


@dataclass(frozen=True)
class Scan:
    """One scan: the run's folder, the checkpoint's step, the file of items, and what distinguishes it from others."""

    run: Path
    step: int
    items: Path
    token: str


@dataclass(frozen=True)
class Task:
    """One chunk of a scan."""

    scan: Scan
    chunk: Chunk


def scan_chunk(task: Task) -> Part:
    """Return the part of one chunk; called in each process, with chunks in ascending order.

    N-grams that this process has found before are not included again.
    """
    return worker_of(task.scan).scan(task.chunk)


class Worker:
    """What all chunks of a process share."""

    def __init__(self, scan: Scan) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
        run = RunPaths(scan.run)
        dataset = dataset_of(run)
        config = of_run(run).during(scan.step)
        self.items = Items(scan.items)
        state = read_rank_states(run.checkpoint(scan.step)).loader
        with reading(run.dataset, hint=_DATASET):
            self.consumed = Consumed(config, dataset, state)
            described = dataset["tokenizer"]
            loaded = tokenizer_of(dataset)
            self._eos_id = int(described["eos_id"])
            self._decode = decoder(loaded, int(described["vocab_size"]))
        self._encode = make_encoder(loaded)
        self._known = self.items.unknown()

    def scan(self, chunk: Chunk) -> Part:
        """Scan one chunk."""
        part, began_s = Part(done={chunk.number}), time.process_time()
        readings = self.consumed.readings(chunk)
        for block in blocks(self._texts(readings, part), words=MOST_WORDS):
            for ngram, number in self.items.find(block, self._known):
                part.found[ngram] = Place(chunk.number, readings[number].source, readings[number].position)
        part.cpu_s = time.process_time() - began_s
        return part

    def _texts(self, readings: list[Reading], part: Part) -> Iterator[tuple[int, bytes]]:
        """Yield the place of each document in the list, and its words."""
        counted = 0
        for number, (read, document) in enumerate(zip(readings, self._documents(readings), strict=True)):
            if read.tokens is not None:
                document = encoded(document, self._encode, self._eos_id)[: read.tokens]
            text = document.encode("utf-8", "replace") if isinstance(document, str) else self._decode(document.tolist())
            part.documents += 1
            part.text_bytes += len(text)
            if part.text_bytes - counted >= _COUNT_BYTES or number == len(readings) - 1:
                workers.count(input_bytes=part.text_bytes - counted)
                counted = part.text_bytes
            yield number, normalise(text)
        workers.count(documents=part.documents)

    def _documents(self, readings: list[Reading]) -> Iterator[Any]:
        sources: Any = self.consumed.sources
        if readings and all(reading.source == readings[0].source for reading in readings):
            return in_order(sources[readings[0].source].documents, [reading.position for reading in readings])
        return (sources[reading.source].documents[reading.position] for reading in readings)


@lru_cache(maxsize=1)
def worker_of(scan: Scan) -> Worker:
    """Return what all chunks of a process share, made once."""
    return Worker(scan)


def dataset_of(run: RunPaths) -> dict[str, Any]:
    """Return the description of a run's corpus. Raises a DataError if it is missing or damaged."""
    with reading(run.dataset, hint=_DATASET):
        dataset = files.read_sealed_json(run.dataset)
        str(dataset["fingerprint"])
        return dataset
