"""Convert SentencePiece models to Hugging Face fast tokenizers with identical ids.

The conversion is compared with SentencePiece itself on the corpus, so a model that converts differently is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlatctl.run.errors import DataError
from hlatctl.run.reading import read_bytes, why

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: ``TrainerSpec.ModelType`` and ``SentencePiece.Type`` of sentencepiece_model.proto.
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"
_COMPARED_DOCUMENTS = 64
_COMPARED_CHARACTERS = 20_000
_PROBES = ("Hello, world", " two  spaces ", "\ttab\nand line\n\n", "naïve 東京 🤖 \u200b", "x" * 50, "")
#: BPE never merges characters to a control token; the fast unigram form does.
_BPE_PROBES = ("</s> as text",)


def convert(path: Path, texts: Iterable[str]) -> Tokenizer:
    """Return the fast tokenizer of a ``.model`` file.

    Args:
        path: the model.
        texts: real text on which both must agree.

    Raises:
        DataError: the model is unreadable or of an unknown type, or the two disagree.
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
