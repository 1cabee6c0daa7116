"""``python -m eval.generate --scratch DIR``: continue prompts, one after the other, for the process that sends them.

stdin and stdout carry lines of JSON. First comes ``{"model", "context_tokens", "device", "needs_device",
"after_document"}``, answered by ``{"ready": {"device", "parameters", "context_tokens"}}``. Then each ``{"prompt",
"sampling"}`` is answered by ``{"text"}`` for each piece and ``{"end": {...}}`` (:class:`Text`), or by
``{"refused", "hint"}``. SIGINT ends the text that is being generated. The process ends with its stdin or its parent.

torch is imported before the first line is read, so that a checkpoint can be exported meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from conf.sampling import Sampling
from eval.serving import model
from eval.serving.model import Loaded
from hlatctl.run import processes
from hlatctl.run.errors import EvaluationError, run_main

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
#: Context in tokens of a model whose configuration sets no limit.
_UNLIMITED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Text:
    """The continuation of a prompt.

    Args:
        text: decoded, without special tokens.
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
        after_document: put the end-of-sequence token before the prompt, because it precedes every document in training.
            Otherwise only the tokenizer's own special tokens are added.
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


class _Answers:
    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_stopped = False
        self._loaded: model.Loaded | None = None
        self._after_document = True

    def stop(self, *_: Any) -> None:
        """End the text that is being generated; a signal handler."""
        self._is_stopped = True

    def load(self, asked: dict[str, Any]) -> None:
        device = str(asked["device"])
        if not model.is_there(device):
            if asked["needs_device"]:
                raise EvaluationError(f"--device={device}: PyTorch finds no such device here", hint="use --device cpu")
            device = "cpu"
        name = model.device_name(device)
        limit = asked["context_tokens"] or _UNLIMITED
        self._loaded = model.load(Path(asked["model"]), seq_len=limit, device=device)
        self._after_document = bool(asked["after_document"])
        parameters = sum(tensor.numel() for tensor in self._loaded.model.parameters())
        self._say(ready={"device": name, "parameters": parameters, "context_tokens": self._loaded.max_length})

    def answer(self, asked: dict[str, Any]) -> None:
        assert self._loaded is not None, "the first line names the model"
        self._is_stopped, started = False, time.monotonic()
        try:
            ids = encode(self._loaded, str(asked["prompt"]), after_document=self._after_document)
            text = generate(
                self._loaded,
                ids,
                Sampling(**asked["sampling"]),
                write=lambda piece: self._say(text=piece),
                is_stopped=lambda: self._is_stopped,
            )
        except EvaluationError as error:
            self._say(refused=error.message, hint=error.hint)
            return
        self._say(end={**dataclasses.asdict(text), "wall_s": round(time.monotonic() - started, 3)})

    def _say(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._output, flush=True)


def main() -> int:
    """Answer the lines of stdin; return 0 at its end."""
    parser = argparse.ArgumentParser(prog="python -m eval.generate", description="Continue prompts with a model.")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for caches")
    options = parser.parse_args()
    output = processes.serve_parent()
    answers = _Answers(output)
    signal.signal(signal.SIGINT, answers.stop)
    model.settle_environment(options.scratch, offline=True)
    with suppress(ImportError):  # loading the model says which package is missing
        import torch
        import transformers

        del torch
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with suppress(BrokenPipeError):
        for line in sys.stdin:
            asked = json.loads(line)
            if "model" in asked:
                answers.load(asked)
            else:
                answers.answer(asked)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
