"""Loss on the run's held-out text: nats per token, perplexity, bits per UTF-8 byte.

As in training, documents are joined by the end-of-sequence token and cut into windows of the model's context. Every
token is predicted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema import Config
from eval.scores import Score, Scores
from eval.serving.model import Loaded
from eval.tasks.suites import VALIDATION
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.files import DAMAGED, parse_json
from hlatctl.run.paths import RunPaths

if TYPE_CHECKING:
    import torch

# Limits the logits of a batch (windows x length x vocabulary, FP32). Larger blocks are slower on a CPU, because the
# allocator returns them to the kernel after every batch.
_LOGITS_BYTES = 16 << 20
#: Limit of a line: the longest document that preparation accepts, 64 MiB, with every byte as JSON's ``\\u0000``.
_MAX_LINE_BYTES = 6 * (64 << 20) + 1024
#: Token ids of windows of equal length.
Windows = list[list[int]]
#: Returns :func:`window_losses` of each batch.
Losses = Callable[[list[Windows]], Iterable[list[float]]]


@dataclass(frozen=True)
class HeldOut:
    """Token ids, and the UTF-8 bytes of their text; the first token is only context."""

    ids: list[int]
    text_bytes: int


def held_out(run: RunPaths | None, config: Config) -> Path | None:
    """Return the run's held-out text; None for an external model.

    ConfigError: ``eval.tasks`` names the text of an external model. DataError: it is missing.
    """
    if run is None:
        if VALIDATION in config.eval.tasks:
            raise ConfigError(
                "eval.tasks: validation is a run's own held-out text, and this model belongs to no run",
                hint="remove validation from eval.tasks",
            )
        return None
    try:
        path = Path(files.read_sealed_json(run.dataset)["validation"]["path"])
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{run.dataset}: names no held-out text ({error!r})") from None
    if not path.is_file():
        raise DataError(f"{run.dataset}: validation.path={path}: no such file")
    return path


def evaluate(loaded: Loaded, path: Path, *, max_tokens: int, losses: Losses | None = None) -> Scores:
    """Return ``validation_loss``, ``validation_perplexity`` and ``validation_bits_per_byte`` of a model.

    The standard error treats windows as independent, not tokens; it is None for a single window.

    Args:
        path: JSON Lines with a field ``text``.
        max_tokens: at most this many tokens are predicted.
        losses: computes the losses in other processes; None: the model computes them here.
    """
    held_out = tokenize(loaded.tokenizer, path, max_tokens=max_tokens)
    batches = _batches(loaded, held_out.ids)
    computed = losses(batches) if losses else (window_losses(loaded.model, batch) for batch in batches)
    sums = [nats for batch in computed for nats in batch]
    counts = [len(window) - 1 for batch in batches for window in batch]
    tokens, nats = sum(counts), sum(sums)
    loss, stderr = nats / tokens, _ratio_stderr(sums, counts)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows a double at 709
    bits_per_loss = tokens / math.log(2) / held_out.text_bytes

    def score(metric: str, value: float, per_loss: float) -> Score:
        return Score(metric=metric, value=value, stderr=None if stderr is None else stderr * per_loss, n=tokens)

    return {
        "validation_loss": score("loss_nats_per_token", loss, 1.0),
        "validation_perplexity": score("perplexity", perplexity, perplexity),
        "validation_bits_per_byte": score("bits_per_byte", loss * bits_per_loss, bits_per_loss),
    }


def tokenize(tokenizer: Any, path: Path, *, max_tokens: int) -> HeldOut:
    """Return the first tokens of the held-out documents, each between end-of-sequence tokens.

    The last document is cut if it doesn't fit; its bytes are then those of the decoded tokens.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError("dataset.json: the tokenizer has no end-of-sequence token")
    ids, text_bytes = [eos], 0
    for text in _texts(path):
        document = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        room = max_tokens + 1 - len(ids)
        if len(document) > room:
            text = tokenizer.decode(document[:room])
        text_bytes += len(text.encode("utf-8"))
        ids += [*document, eos][:room]
        if len(ids) > max_tokens:
            break
    if text_bytes == 0:
        raise DataError(f"{path}: has no text to validate on", hint="raise data.validation_fraction")
    return HeldOut(ids, text_bytes)


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, (line, length) in enumerate(files.lines(file, _MAX_LINE_BYTES), start=1):
                if length > _MAX_LINE_BYTES:
                    raise DataError(f"{path}: line {number} has {length:,} bytes, the limit is {_MAX_LINE_BYTES:,}")
                try:
                    yield str(parse_json(line)["text"])
                except DAMAGED:
                    raise DataError(f"{path}: line {number} is not a JSON object with a field text") from None
    except OSError as error:
        raise DataError(f"{path}: held-out text can't be read ({error})") from None


def _batches(loaded: Loaded, ids: list[int]) -> list[Windows]:
    """Return batches of windows; each window begins with the last token of the one before."""
    length = loaded.max_length
    whole = (len(ids) - 1) // length
    rows = [ids[i * length : (i + 1) * length + 1] for i in range(whole)]
    batch_size = max(1, _LOGITS_BYTES // (4 * length * loaded.model.config.vocab_size))
    batches = [rows[i : i + batch_size] for i in range(0, whole, batch_size)]
    rest = ids[whole * length :]
    return [*batches, [rest]] if len(rest) > 1 else batches


def window_losses(model: Any, windows: Windows) -> list[float]:
    """Return the summed nats of each window of a batch."""
    import torch

    with torch.inference_mode():
        losses = _token_losses(model, torch.tensor(windows, device=model.device))
        sums: list[float] = losses.double().sum(dim=1).tolist()
        return sums


def _token_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the nats of each token after the first, ``[windows, length]``; ids are ``[windows, length + 1]``."""
    from torch.nn import functional

    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    targets = ids[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def _ratio_stderr(sums: list[float], counts: list[int]) -> float | None:
    """Return the standard error of sum(sums)/sum(counts) over independent windows (ratio estimator)."""
    windows, tokens = len(sums), sum(counts)
    if windows < 2:
        return None
    loss = sum(sums) / tokens
    squares = sum((nats - loss * count) ** 2 for nats, count in zip(sums, counts, strict=True))
    return math.sqrt(squares * windows / (windows - 1)) / tokens
