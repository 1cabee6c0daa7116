"""Corpora of token ids: found by their files, and read by position like the documents of a text corpus.

Such a corpus is a folder that ``hlatctl data tokenize`` wrote (``trainer.data.tokenize``: pairs in Megatron's
format and ``token_ids.json``), a folder of Megatron's files, or the prefix of one pair. Nothing is copied. A prepared
folder is made by ``trainer.data.prepare_tokens``.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.reading import reading
from trainer.data import formats, megatron, tokenizer
from trainer.data.documents import Origin
from trainer.data.encoder import Tokens
from trainer.data.megatron import Ids, TokenFile
from trainer.data.permutation import Permutation
from trainer.data.read_ahead import in_order
from trainer.data.stand_in import remote_of, shown

MANIFEST = "token_ids.json"
#: Pairs of files mapped at once; each takes two file descriptors.
_OPEN_FILES = 128
_SUFFIXES = (".idx", ".bin")
#: Files of these kinds beside token ids are text that somebody meant to train on.
_TEXT_KINDS = ("arrow", "parquet", "jsonl")


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """A corpus of token ids.

    Args:
        name: its path in the configuration.
        prefixes: of its pairs of files, in order.
        folder: that contains tokenizer and held-out text; None for files of Megatron.
        manifest: ``token_ids.json``; empty for files of Megatron.
    """

    name: str
    prefixes: list[Path]
    folder: Path | None
    manifest: dict[str, Any]


def find(path: Path) -> TokenCorpus | None:
    """Return the corpus of token ids at a path; None if it is something else.

    Args:
        path: a folder, a prefix, or one file of a pair.

    Raises:
        DataError: a pair is incomplete, ``token_ids.json`` is damaged, or text lies beside the ids.
    """
    if not path.is_dir():
        prefix = path.with_suffix("") if path.suffix in _SUFFIXES else path
        if not megatron.is_index(megatron.index_path(prefix)):
            return None
        _check_pairs([prefix])
        return TokenCorpus(name=shown(path), prefixes=[prefix], folder=None, manifest={})
    if (path / MANIFEST).is_file():
        return _own(path)
    prefixes = [file.with_suffix("") for file in sorted(path.rglob("*.idx")) if _is_index(file, path)]
    if not prefixes:
        return None
    _check_pairs(prefixes)
    for folder in {prefix.parent for prefix in prefixes}:
        _refuse_text(path, prefixes[0], folder)
    return TokenCorpus(name=shown(path), prefixes=prefixes, folder=None, manifest={})


def _own(folder: Path) -> TokenCorpus:
    path = folder / MANIFEST
    with reading(path, hint="copy the folder again, or run `hlatctl data tokenize` again"):
        manifest = files.read_sealed_json(path)
        prefixes = [folder / Path(shard["name"]).name for shard in manifest["shards"]]
    return TokenCorpus(name=shown(folder), prefixes=prefixes, folder=folder, manifest=manifest)


def _is_index(file: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return not hidden and megatron.is_index(file)


def _check_pairs(prefixes: Sequence[Path]) -> None:
    for prefix in prefixes:
        if not megatron.data_path(prefix).is_file():
            raise DataError(
                f"{megatron.data_path(prefix)}: is missing beside {prefix.name}.idx", hint="copy both files of the pair"
            )


def _refuse_text(root: Path, prefix: Path, folder: Path) -> None:
    # Plain text and .json are often descriptions, such as Megatron's own.
    text = next(
        (p for p in sorted(folder.iterdir()) if formats.format_of(p) in _TEXT_KINDS and p.suffix != ".json"), None
    )
    if text is not None:
        raise DataError(
            f"data.path={root}: contains token ids ({prefix.name}.idx) and text ({text.name})",
            hint="move one of them to another folder",
        )


class TokenDocuments(Sequence[Tokens]):
    """The training documents of a corpus of ids, by position, with their end-of-sequence tokens.

    Args:
        entries: its pairs of files, with ``path`` (the prefix), and numbers of ``documents`` and ``tokens``.
        held_out: sorted positions among all documents that are skipped.
        vocab_size: larger ids are refused.
        eos_id: is added to a document that doesn't end with it; one without tokens stays empty.
    """

    def __init__(
        self, entries: Sequence[dict[str, Any]], *, held_out: Sequence[int], vocab_size: int, eos_id: int
    ) -> None:
        self._entries = entries
        self._starts = np.cumsum([0, *(int(entry["documents"]) for entry in entries)]).tolist()
        self._held_out = np.array(held_out, dtype=np.int64)
        #: Before the i-th held-out document there are this many others.
        self._before = self._held_out - np.arange(len(self._held_out))
        self._vocab_size, self._eos_id = vocab_size, eos_id
        self._open: OrderedDict[int, TokenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1]) - len(self._held_out)

    @overload
    def __getitem__(self, position: int) -> Tokens: ...

    @overload
    def __getitem__(self, position: slice) -> list[Tokens]: ...

    def __getitem__(self, position: int | slice) -> Tokens | list[Tokens]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.ids_of(self.among_all(position))

    def __iter__(self) -> Iterator[Tokens]:
        return in_order(self, range(len(self)))

    @property
    def is_remote(self) -> bool:
        """Whether the ids are in object storage."""
        return bool(self._entries) and remote_of(megatron.data_path(Path(self._entries[0]["path"]))) is not None

    def among_all(self, position: int) -> int:
        """Return the position among all documents of a training document."""
        return position + int(np.searchsorted(self._before, position, side="right"))

    def file_and_row(self, document: int) -> tuple[Path, int]:
        """Return the ``.bin`` file and the 1-based number there of a document, counted among all."""
        number = bisect_right(self._starts, document) - 1
        return megatron.data_path(Path(self._entries[number]["path"])), document - self._starts[number] + 1

    def stored(self, document: int) -> Ids:
        """Return a document's ids as they are stored, counted among all.

        Raises:
            DataError: a file is missing, damaged, or not the one that was prepared.
        """
        number = bisect_right(self._starts, document) - 1
        return self._file(number)[document - self._starts[number]]

    def ids_of(self, document: int) -> Tokens:
        """Return a document's ids with the end-of-sequence token, counted among all.

        Raises:
            DataError: an id is not in the vocabulary; or as :meth:`stored`.
        """
        ids = self.stored(document)
        if len(ids) and (int(ids.max()) >= self._vocab_size or int(ids.min()) < 0):
            self._refuse(document, ids)
        whole = not len(ids) or ids[-1] == self._eos_id
        return ids.astype(np.int32) if whole else np.append(ids, self._eos_id).astype(np.int32)

    def _refuse(self, document: int, ids: Ids) -> None:
        wrong = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
        path, row = self.file_and_row(document)
        raise DataError(
            f"{path}: token {wrong + 1} of document {row} is {ids[wrong]}, and the tokenizer has ids below "
            f"{self._vocab_size}",
            hint="set tokenizer.path to the tokenizer that made these ids, or copy the files again",
        )

    def _file(self, number: int) -> TokenFile:
        """Return a mapped pair of files; the most recently used ones stay mapped."""
        with self._lock:
            if number not in self._open:
                entry = self._entries[number]
                file = TokenFile(Path(entry["path"]))
                check_counts(entry, documents=len(file), tokens=file.tokens)
                self._open[number] = file
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return self._open[number]


class HeldOut:
    """The held-out documents of a corpus of ids."""

    def __init__(self, documents: TokenDocuments, numbers: Sequence[int]) -> None:
        self._documents, self._numbers = documents, numbers
        self.is_remote = documents.is_remote

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> Tokens:
        return self._documents.ids_of(self._numbers[position])


def describe_pair(prefix: Path) -> dict[str, Any]:
    """Return the entry of a pair of files for :class:`TokenDocuments`: prefix, documents, tokens.

    Raises:
        DataError: a file is missing or damaged.
    """
    header = megatron.read_header(prefix)
    tokens = megatron.data_path(prefix).stat().st_size // header.dtype.itemsize
    return {"path": str(prefix.absolute()), "documents": header.documents, "tokens": tokens}


def check_counts(entry: dict[str, Any], *, documents: int, tokens: int) -> None:
    """Refuse a pair of files that differs from its entry.

    Args:
        entry: of the pair, with ``path``, ``documents`` and ``tokens``.
        documents, tokens: that the files have.

    Raises:
        DataError: they differ.
    """
    for name, found in (("documents", documents), ("tokens", tokens)):
        if found != entry[name]:
            raise DataError(
                f"{entry['path']}.bin, .idx: {found} {name}, not {entry[name]}",
                hint="restore the files that the corpus had",
            )


class TokenSource:
    """One corpus of ids of a mixture; has what ``trainer.data.documents.Source`` has.

    Args:
        dataset: ``dataset.json``.
        index: of the source in it.
    """

    def __init__(self, dataset: dict[str, Any], index: int) -> None:
        entry, described = dataset["sources"][index], dataset["tokenizer"]
        self.name = str(entry["path"])
        self.fingerprint = str(entry["fingerprint"])
        self.estimated_tokens = int(entry["estimated_tokens"])
        self._held_out = held_out(self.fingerprint, entry["rows"], entry["held_out"])
        self.documents = TokenDocuments(
            entry["shards"], held_out=self._held_out, vocab_size=described["vocab_size"], eos_id=described["eos_id"]
        )
        self._decoder = tokenizer.load(Path(described["path"]) / tokenizer.TOKENIZER_JSON)

    def origin(self, position: int) -> Origin:
        """Return the ``.bin`` file of a document and its 1-based number there."""
        path, row = self.documents.file_and_row(self.documents.among_all(position))
        return Origin(file=shown(path), row=row)

    def excerpt(self, position: int, characters: int) -> str:
        """Return the beginning of a document as text."""
        return self._text(self.documents[position][: characters + 1])[:characters]

    def held_out_texts(self) -> Iterator[str]:
        """Yield the texts of the held-out documents."""
        held_out = HeldOut(self.documents, self._held_out)
        return (self._text(ids) for ids in in_order(held_out, range(len(held_out))))

    def _text(self, ids: Tokens) -> str:
        """Return the text of ids without the last one, which is the end of sequence or is not asked for."""
        return str(self._decoder.decode(ids[:-1].tolist(), skip_special_tokens=False))


def held_out(fingerprint: str, documents: int, count: int) -> list[int]:
    """Return the sorted positions that are held out: a pure function, so only their number is stored."""
    order = Permutation(documents, f"held out {fingerprint}")
    return sorted(order[place] for place in range(count))
