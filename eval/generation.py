"""Continue a prompt with a model, using transformers' own generation. Imports torch and transformers late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.sampling import Sampling
from eval.model import Loaded
from hlatctl.run.errors import EvaluationError

if TYPE_CHECKING:
    from torch import Tensor

#: Why a text ended.
END_OF_DOCUMENT, MAX_NEW_TOKENS, CONTEXT_FULL, STOPPED = "end_of_document", "max_new_tokens", "context_full", "stopped"
#: Tokens before a new one that can change how it is decoded: parts of a character, a word's leading space.
_BEFORE_TOKENS = 8
#: Tokens that are decoded together. Decoding the whole text for each token would take quadratic time.
_WINDOW_TOKENS = 64
#: What a decoder writes for bytes that are not (yet) a character.
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class Text:
    """The continuation of a prompt.

    Args:
        text: decoded, without special tokens.
        token_ids: all sampled tokens.
        prompt_tokens: tokens in the prompt, including the token before it.
        stop: why it ended: ``end_of_document``, ``max_new_tokens``, ``context_full`` or ``stopped``.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    stop: str


def encode(loaded: Loaded, prompt: str, *, after_document: bool) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: may be empty.
        after_document: put the end-of-sequence token before the prompt, because it precedes every document in training.
            Otherwise only the tokenizer's own special tokens are added.

    Raises:
        EvaluationError: the prompt leaves no room in the model's context.
    """
    tokenizer = loaded.tokenizer
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=not after_document, verbose=False)
    if after_document or not ids:
        ids = [tokenizer.eos_token_id or 0, *ids]
    if len(ids) >= loaded.max_length:
        limit = f"it must have fewer than the model's context, {loaded.max_length:,} tokens"
        raise EvaluationError(f"prompt: has {len(ids):,} tokens; {limit}", hint="shorten the prompt")
    return ids


def generate(
    loaded: Loaded,
    prompt_ids: list[int],
    sampling: Sampling,
    *,
    write: Callable[[str], None] = lambda piece: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Text:
    """Continue a prompt until the end of the document, the token limit or the end of the context.

    Args:
        prompt_ids: from :func:`encode`.
        write: called with each new piece of the text.
        is_stopped: called after each token; ends the text if true.

    Raises:
        EvaluationError: the model can't generate, for example because memory ran out or its weights aren't finite.
    """
    import torch
    from transformers import StoppingCriteriaList

    def stopping(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((ids.shape[0],), is_stopped(), device=ids.device)

    model, room = loaded.model, loaded.max_length - len(prompt_ids)
    ends = _end_ids(loaded)
    pieces = _Pieces(loaded.tokenizer, prompt_ids, write)
    ids = torch.tensor([prompt_ids], device=model.device)
    usual, model.generation_config = model.generation_config, _settings(sampling, room, ends)
    torch.manual_seed(sampling.seed)
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=model.generation_config,
            stopping_criteria=StoppingCriteriaList([stopping]),
            streamer=pieces,
        )
    except RuntimeError as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "if memory ran out: --device cpu; if training has diverged: --step of an earlier checkpoint"
        raise EvaluationError(f"the model can't generate a text ({why})", hint=hint) from error
    finally:
        model.generation_config = usual
    drawn = pieces.token_ids
    if drawn and drawn[-1] in ends:
        stop = END_OF_DOCUMENT
    elif len(drawn) == sampling.max_new_tokens:
        stop = MAX_NEW_TOKENS
    else:
        stop = CONTEXT_FULL if len(drawn) == room else STOPPED
    return Text(text=pieces.text, token_ids=drawn, prompt_tokens=len(prompt_ids), stop=stop)


def _end_ids(loaded: Loaded) -> list[int]:
    """Return the tokens that end a text: the tokenizer's, and those that the model's folder names."""
    named = loaded.model.generation_config.eos_token_id
    ids = {loaded.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return sorted(one for one in ids if isinstance(one, int))


def _settings(sampling: Sampling, room: int, ends: list[int]) -> Any:
    """Return transformers' generation settings, without the defaults of the model's folder."""
    from transformers import GenerationConfig

    drawing = {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p), "top_k": sampling.top_k}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=min(sampling.max_new_tokens, room),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        do_sample=not sampling.is_greedy,
        **({} if sampling.is_greedy else drawing),
    )


class _Pieces:
    """Decodes tokens as they are sampled. A streamer of transformers, whose protocol is :meth:`put` and :meth:`end`.

    A character can consist of several tokens, so a piece ends with a whole character.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], write: Callable[[str], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._has_prompt = False
        self._begin(prompt_ids[-_BEFORE_TOKENS:])
        self.text, self.token_ids = "", list[int]()

    def put(self, value: Tensor) -> None:
        """Take the prompt, which comes first, or a token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        ids = value.flatten().tolist()
        self.token_ids += ids
        self._window += ids
        text = self._decode()
        if text.endswith(_NO_CHARACTER):
            return
        self._add(text)
        if len(self._window) > _WINDOW_TOKENS:
            self._begin(self._window[-_BEFORE_TOKENS:])

    def end(self) -> None:
        """Write the rest, which may end with bytes that are not a character."""
        self._add(self._decode())

    def _begin(self, before: list[int]) -> None:
        self._window = before
        self._done = len(self._decode())

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _add(self, text: str) -> None:
        piece = text[self._done :]
        if piece:
            self.text += piece
            self._write(piece)
            self._done = len(text)
