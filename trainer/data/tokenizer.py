"""Convert tokenizers to a Hugging Face folder that ``AutoTokenizer`` loads, and encode and decode text fast.

Kinds of ``tokenizer.path``: a SentencePiece ``.model``, a ``tokenizer.json``, a Hugging Face folder that has one, or
none (a byte-level BPE is trained). No torch, no transformers. A converted SentencePiece model must give the same ids as
SentencePiece itself on the corpus, otherwise it is refused.

Encoding: SentencePiece-style BPE treats a whole document as one word, so its word cache never hits. But if no piece of
the vocabulary has a space after another character, or a line end, then no merge crosses these places. Then the words
between them can be encoded one by one with equal ids, and cached. Text repeats its words, so most come from the cache.

Decoding: each token's bytes are looked up in a table and joined. This is valid for byte-level BPE (GPT-2, Llama 3) and
for SentencePiece's byte fallback (Llama 2), whose tokens have the same bytes everywhere. Other tokenizers decode with
their own code: 23 MB/s instead of 93 with GPT-NeoX's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hlatctl.run import files
from hlatctl.run.errors import DataError
from hlatctl.run.files import check_size, read_bytes, reading, why

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TOKENIZER_JSON = "tokenizer.json"
#: SentencePiece's visible space, U+2581.
_SPACE = "▁"
CONFIG_JSON = "tokenizer_config.json"
BOS, EOS = "<s>", "</s>"
#: Files of a tokenizer in a Hugging Face folder, which may also contain a model's files.
_FOLDER_FILES = (TOKENIZER_JSON, CONFIG_JSON, "special_tokens_map.json", "added_tokens.json")
_KNOWN = "a SentencePiece .model file, a tokenizer.json, or a Hugging Face folder that contains one"
#: Names of the end-of-text token in vocabularies, if no tokenizer_config.json names it.
_EOS_NAMES = (EOS, "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
_BOS_NAMES = (BOS, "<|endoftext|>", "<|begin_of_text|>", "<bos>", "[CLS]")


def kind_of(path: Path) -> str:
    """Return ``sentencepiece``, ``json`` or ``folder``, from the path alone.

    Raises a DataError if the path is missing, or is none of these.
    """
    if path.is_dir():
        if (path / TOKENIZER_JSON).is_file():
            return "folder"
        raise DataError(f"tokenizer.path={path}: the folder has no {TOKENIZER_JSON}", hint=f"set it to {_KNOWN}")
    if not path.is_file():
        raise DataError(f"tokenizer.path={path}: no such file or folder", hint=f"set it to {_KNOWN}")
    if path.suffix == ".model":
        return "sentencepiece"
    if path.suffix == ".json":
        return "json"
    raise DataError(f"tokenizer.path={path}: unknown kind of tokenizer", hint=f"set it to {_KNOWN}")


def prepare(path: Path | None, folder: Path, *, texts: Iterable[str], train_vocab_size: int) -> None:
    """Write the Hugging Face folder of a tokenizer.

    Args:
        path: the tokenizer; None: train one.
        texts: texts of the corpus, to train a tokenizer or compare a converted one.
        train_vocab_size: vocabulary size if a tokenizer is trained.
    """
    folder.mkdir(parents=True)
    if path is None:
        _save(_train(texts, train_vocab_size), folder, bos=BOS, eos=EOS)
        return
    kind = kind_of(path)
    if kind == "sentencepiece":
        _save(convert(path, texts), folder, bos=BOS, eos=EOS)
    elif kind == "json":
        tokenizer = load(path)
        _save(tokenizer, folder, bos=_named(tokenizer, _BOS_NAMES), eos=_named(tokenizer, _EOS_NAMES))
    else:
        for file in (path / name for name in _FOLDER_FILES):
            if file.is_file():
                with reading(file):
                    check_size(file)
                shutil.copyfile(file, folder / file.name)
        if not (folder / CONFIG_JSON).is_file():
            tokenizer = load(folder / TOKENIZER_JSON)
            _save(tokenizer, folder, bos=_named(tokenizer, _BOS_NAMES), eos=_named(tokenizer, _EOS_NAMES))


def look(path: Path) -> dict[str, Any]:
    """Return the result of :func:`describe` for the tokenizer at a path. Raises a DataError if it can't be used."""
    with tempfile.TemporaryDirectory(prefix="hlatctl-tokenizer-") as scratch:
        folder = Path(scratch) / "tokenizer"
        prepare(path, folder, texts=(), train_vocab_size=0)
        return describe(folder)


def load(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``; special tokens that occur in a text are encoded as plain text.

    Raises a DataError if it can't be read.
    """
    from tokenizers import Tokenizer

    try:
        check_size(path)
        tokenizer = Tokenizer.from_file(str(path))
    except OSError as error:
        raise DataError(f"{path}: not a readable tokenizer ({why(error)})") from None
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(f"{path}: not a readable tokenizer ({error})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_of(dataset: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a ``dataset.json``; raises as :func:`load`."""
    return load(Path(dataset["tokenizer"]["path"]) / TOKENIZER_JSON)


def describe(folder: Path) -> dict[str, Any]:
    """Return the entry of a tokenizer's folder in ``dataset.json``, without its path.

    Raises a DataError if it names no end-of-sequence token.
    """
    tokenizer = load(folder / TOKENIZER_JSON)
    with reading(folder / CONFIG_JSON):
        config = dict(files.read_json(folder / CONFIG_JSON))
    ids = {key: tokenizer.token_to_id(_content(config.get(f"{key}_token")) or "") for key in ("bos", "eos")}
    if ids["eos"] is None:
        raise DataError(
            f"{folder / CONFIG_JSON}: eos_token={config.get('eos_token')!r} is not in the vocabulary",
            hint="documents are separated by it; name it in the tokenizer's tokenizer_config.json",
        )
    content = (folder / TOKENIZER_JSON).read_bytes() + json.dumps(ids).encode()
    return {
        "vocab_size": max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        "bos_id": ids["eos"] if ids["bos"] is None else ids["bos"],
        "eos_id": ids["eos"],
        "fingerprint": hashlib.sha256(content).hexdigest()[:16],
    }


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    return tokenizer


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == 256:
            yield batch
            batch = []
    yield batch


def _save(tokenizer: Tokenizer, folder: Path, *, bos: str, eos: str) -> None:
    tokenizer.save(str(folder / TOKENIZER_JSON))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    files.write_json(folder / CONFIG_JSON, config)


def _named(tokenizer: Tokenizer, names: tuple[str, ...]) -> str:
    token = next((name for name in names if tokenizer.token_to_id(name) is not None), None)
    if token is None:
        raise DataError(
            f"tokenizer.path: its vocabulary has none of the tokens {', '.join(names)}",
            hint=f"use a folder whose {CONFIG_JSON} names bos_token and eos_token",
        )
    return token


def _content(token: Any) -> str | None:
    """Return the text of a special token of tokenizer_config.json, which may be a string or an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


#: ``TrainerSpec.ModelType`` and ``SentencePiece.Type`` of sentencepiece_model.proto.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_COMPARED_DOCUMENTS = 64
_COMPARED_CHARACTERS = 20_000
_PROBES = ("Hello, world", " two  spaces ", "\ttab\nand line\n\n", "naïve 東京 🤖 \u200b", "x" * 50, "")
#: BPE never merges characters to a control token; the fast unigram form does.
_BPE_PROBES = ("</s> as text",)


def convert(path: Path, texts: Iterable[str]) -> Tokenizer:
    """Return the fast tokenizer of a ``.model`` file; both must give the same ids on these real texts.

    Raises a DataError if the model is unreadable or of an unknown type, or the two disagree.
    """
    proto = _read(path)
    tokenizer = _build(path, proto)
    probes = _PROBES + _BPE_PROBES if proto.trainer_spec.model_type == _BPE else _PROBES
    _compare(path, tokenizer, itertools.chain(probes, itertools.islice(texts, _COMPARED_DOCUMENTS)))
    return tokenizer


def _read(path: Path) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(read_bytes(path))
    except OSError as error:
        raise DataError(f"tokenizer.path={path}: can't be read ({why(error)})") from None
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        raise DataError(f"tokenizer.path={path}: not a SentencePiece model", hint="set it to the .model file itself")
    return proto


def _build(path: Path, proto: Any) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    spec = proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    model: Any
    if spec.model_type == _BPE:
        vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocab, _merges(proto, vocab), unk_token=spec.unk_piece, fuse_unk=True, byte_fallback=spec.byte_fallback
        )
    elif spec.model_type == _UNIGRAM:
        model = models.Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    else:
        raise DataError(f"tokenizer.path={path}: SentencePiece type {spec.model_type}; only BPE and unigram are known")
    tokenizer = Tokenizer(model)
    for piece in proto.pieces:
        if piece.type in (_CONTROL, _USER_DEFINED):
            token = AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    tail = [decoders.Strip(content=" ", left=1, right=0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges(proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return every merge of two pieces to a third, ordered by the third's score."""
    ranked = []
    for piece, score in ((p.piece, p.score) for p in proto.pieces if p.type == _NORMAL):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        ranked += [(-score, vocab[left], vocab[right], (left, right)) for left, right in known]
    return [pair for *_, pair in sorted(ranked)]


def _normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _compare(path: Path, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_file=str(path))
    tokenizer.encode_special_tokens = True
    for text in (text[:_COMPARED_CHARACTERS] for text in texts):
        if tokenizer.encode(text, add_special_tokens=False).ids != reference.encode(text):
            raise DataError(
                f"tokenizer.path={path}: its fast form splits {text[:40]!r}… differently from SentencePiece",
                hint="convert it yourself and set tokenizer.path to the tokenizer.json",
            )


Tokens = npt.NDArray[np.int32]
#: Encodes a text to its ids, without special tokens.
Encode = Callable[[str], Tokens]

_WORD = re.compile(r" *[^ \n]+| +|\n")
_LINE_END_PIECE = "<0x0A>"
#: Words in a cache generation, about 25 MB; the previous one is kept too, so frequent words are never dropped.
_REMEMBERED_WORDS = 100_000
#: Longer words rarely repeat and are not cached.
_REMEMBERED_CHARACTERS = 64
_UNKNOWN = b"?"  # not valid ids, which have four bytes each


def make_encoder(tokenizer: Tokenizer) -> Encode:
    """Return the fastest exact encoder of a tokenizer from :func:`load`; it may change the tokenizer."""
    whole = _Whole(tokenizer)
    return _ByWord(tokenizer, whole) if splits_at_words(json.loads(tokenizer.to_str())) else whole


def splits_at_words(description: dict[str, Any]) -> bool:
    """Return whether a ``tokenizer.json`` proves that words can be encoded separately."""
    model = description["model"]
    return (
        model["type"] == "BPE"
        and description["pre_tokenizer"] is None
        and _is_metaspace(description["normalizer"])
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("ignore_merges")
        and model.get("byte_fallback") is True
        and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        and all(token["special"] for token in description["added_tokens"])
        and not any(re.search(rf"[^{_SPACE}]{_SPACE}|\n", piece) for piece in model["vocab"])
    )


def _is_metaspace(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalizer only prepends a space and replaces spaces, like SentencePiece."""
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return normalizer == {"type": "Sequence", "normalizers": [prepend, replace]}


class _Whole:
    """Encodes a text with one call of the tokenizer, which releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Tokens:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)


class _ByWord:
    """Encodes word by word from a cache; unknown words are encoded in one call."""

    def __init__(self, tokenizer: Tokenizer, whole: Encode) -> None:
        from tokenizers import Tokenizer, normalizers

        self._whole = whole
        words = Tokenizer.from_str(tokenizer.to_str())
        words.encode_special_tokens = True
        words.normalizer = normalizers.Replace(" ", _SPACE)
        self._encode_words = _Whole(words)
        self._line_end = np.int32(tokenizer.get_vocab()[_LINE_END_PIECE])
        self._known: dict[str, bytes] = {}
        self._before: dict[str, bytes] = {}

    def __call__(self, text: str) -> Tokens:
        if _SPACE in text or not text:
            return self._whole(text)  # a visible space in the text itself could merge with a real one
        words = _WORD.findall(f" {text}")
        known = self._known
        encoded = [known.get(word, _UNKNOWN) for word in words]
        if missing := [place for place, ids in enumerate(encoded) if ids is _UNKNOWN]:
            recalled = self._recall({words[place] for place in missing})
            for place in missing:
                encoded[place] = recalled[words[place]]
            self._remember(recalled)
        return np.frombuffer(b"".join(encoded), dtype=np.int32)

    def _remember(self, recalled: dict[str, bytes]) -> None:
        self._known.update((word, ids) for word, ids in recalled.items() if len(word) <= _REMEMBERED_CHARACTERS)
        if len(self._known) > _REMEMBERED_WORDS:
            self._known, self._before = {}, self._known

    def _recall(self, new: set[str]) -> dict[str, bytes]:
        """Return the ids of words, as bytes: from the previous cache generation, or encoded."""
        ids = {word: self._before[word] for word in new if word in self._before}
        ids["\n"] = self._line_end.tobytes()
        unknown = [word for word in new if word not in ids]
        return ids | self._learn(unknown) if unknown else ids

    def _learn(self, words: list[str]) -> dict[str, bytes]:
        """Encode words in one text, separated by line ends, and cache their ids."""
        ids = self._encode_words("\n".join(words))
        ends = [*np.flatnonzero(ids == self._line_end).tolist(), len(ids)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        content, size = ids.tobytes(), ids.itemsize
        return {word: content[start * size : end * size] for word, start, end in zip(words, starts, ends, strict=True)}


Decode = Callable[[Sequence[int]], bytes]
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: Decoders of SentencePiece's tokens; Strip and Fuse change only the ends of a text.
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def decoder(tokenizer: Tokenizer, vocab_size: int) -> Decode:
    """Return a function that turns ids below ``vocab_size`` into UTF-8 text; special tokens become spaces."""
    kinds = _decoders(json.loads(tokenizer.to_str()).get("decoder"))
    of_token = _of_byte_level() if kinds == {"ByteLevel"} else _of_pieces if _is_sentencepiece(kinds) else None
    if of_token is None:
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)).encode()
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * vocab_size
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if number < vocab_size:
            table[number] = of_token(token)
    for number, extra in added.items():
        if number < vocab_size:
            table[number] = b" " if extra.special else extra.content.encode()
    return lambda ids: b"".join(map(table.__getitem__, ids))


def _is_sentencepiece(kinds: set[str]) -> bool:
    return bool(kinds) and kinds <= _SENTENCEPIECE


def _decoders(described: Any) -> set[str]:
    """Return the kinds of decoders in a tokenizer.json; a Replace counts only if it is SentencePiece's of the space."""
    if not isinstance(described, dict):
        return set()
    if described.get("type") == "Sequence":
        return {kind for each in described.get("decoders", []) for kind in _decoders(each)}
    pair = (described.get("pattern"), described.get("content"))
    if described.get("type") == "Replace" and pair != ({"String": _SPACE}, " "):
        return {"another Replace"}
    return {str(described.get("type"))}


def _of_byte_level() -> Callable[[str], bytes]:
    """Return a function that maps a token of GPT-2's alphabet, with a printable character for each byte, to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return lambda token: bytes(byte_of[c] for c in token) if set(token) <= byte_of.keys() else token.encode()


def _of_pieces(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()
