"""A task of CORE, as lm-evaluation-harness runs it: prompts and scores as DCLM and nanochat define them.

The harness's own few-shot machinery and multiple choice can't give the same scores, for three reasons:

- The solved examples of an item are drawn from the other items, with a generator of the item's own.
- Which tokens are scored is decided on tokens, not on text: those in which the answers' prompts differ
  (``multiple_choice``), or those with which they all end (``schema``). So an answer can begin within a word.
- Every prompt begins with the token that begins a document.

So requests carry their tokens (:class:`eval.serving.answers.Encoded`). The harness keeps its part: items, limits,
requests, aggregation and samples. This module imports lm_eval: import it late.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig

from eval.serving.answers import Encoded
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DataError

_ORDER_SEED, _EXAMPLES_SEED = 1337, 1234
_FILTER = "none"
#: Keys that an item of each kind must have.
_KEYS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class Prompt:
    """One text that the model reads, in two parts.

    Args:
        shared: for ``language_modeling``, the text without the answer, whose tokens are not scored.
    """

    context: str
    continuation: str
    shared: str = ""

    @property
    def text(self) -> str:
        """The whole text."""
        return self.context + self.continuation


class CoreTask(Task):  # type: ignore[misc]  # lm_eval publishes no types
    """A task whose definition has ``metadata`` with ``kind``, ``delimiter`` and ``baseline_percent``.

    ``metadata.limit`` is ``eval.limit``: solved examples are drawn from the items that it leaves.
    """

    VERSION = 1
    #: The kind of task by which our own code that scores it has a version (``eval.source``).
    scored_as = "core"
    multiple_input = False

    def __init__(self, config: dict[str, Any]) -> None:
        """Read the items and put them into nanochat's order."""
        # Not super().__init__(): it would download a dataset, and makes a configuration without these keys.
        known = {field.name for field in fields(TaskConfig)}
        self._config = TaskConfig(**{key: value for key, value in config.items() if key in known})
        self._config.process_results = CoreTask.process_results  # so nobody else decides from texts what is right
        self._instances: list[Instance] = []
        self.fewshot_rnd: random.Random | None = None
        own = config["metadata"]
        self._kind, self._delimiter = str(own["kind"]), str(own["delimiter"])
        self._baseline = 0.01 * float(own["baseline_percent"])
        self._config.doc_to_choice = None if self._kind == "language_modeling" else _KEYS[self._kind][0]
        self.OUTPUT_TYPE = self._config.output_type
        self._docs = _read(Path(config["dataset_kwargs"]["data_files"]["test"]), self._kind)
        limit = own.get("limit")
        self._drawn_from = len(self._docs) if limit is None else min(len(self._docs), _count(limit, len(self._docs)))
        self._lm: Any = None
        self._first_token = 0

    def read_with(self, lm: Any, *, is_trained_here: bool) -> None:
        """Decide the tokens of all requests with a model's tokenizer.

        Args:
            is_trained_here: the model is a run's, in whose corpus the end-of-sequence token precedes every document.
                Otherwise prompts begin with the tokenizer's first token of a text (the harness's prefix token).
        """
        self._lm = lm
        self._first_token = int(lm.tokenizer.eos_token_id if is_trained_here else lm.prefix_token_id)

    def chance(self, metric: str) -> float | None:
        """Return the score of guessing, which the bundle defines; None for a metric of another kind."""
        return {"acc": self._baseline, "centered": 0.0}.get(metric)

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return a request for each answer."""
        prompts = self._prompts(doc)
        answers = [prompt.continuation for prompt in prompts] if self._lm is None else self._encoded(prompts)
        return [
            Instance(
                request_type="loglikelihood",
                doc=doc,
                arguments=(prompt.context, answer),
                idx=number,
                metadata=kwargs["metadata"],
            )
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def apply_filters(self) -> None:
        """Give ranked answers their mean log-likelihood per token; NaN for one without tokens of its own."""
        for request in self._instances:
            nats, is_greedy = request.resps[0]
            if self._kind != "language_modeling":
                scored = request.args[1].scored
                nats = nats / scored if scored else math.nan
            request.filtered_resps[_FILTER] = (nats, is_greedy)

    def process_results(self, doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
        """Return an item's accuracy, and the same on the scale from guessing (0) to all right (1)."""
        if self._kind == "language_modeling":
            is_right = results[0][1]
        else:
            losses = [-nats for nats, _ in results]
            is_right = losses.index(min(losses)) == doc["gold"]  # with NaN, the first one decides, as in nanochat
        return {"centered": (is_right - self._baseline) / (1 - self._baseline), "acc": float(is_right)}

    def _prompts(self, doc: dict[str, Any]) -> list[Prompt]:
        before = "".join(f"{self._solved(example)}\n\n" for example in self._examples(doc))
        if self._kind == "multiple_choice":
            context = f"{before}{doc['query']}{self._delimiter}"
            return [Prompt(context, str(choice)) for choice in doc["choices"]]
        if self._kind == "schema":
            return [
                Prompt(f"{before}{option}{self._delimiter}", str(doc["continuation"]))
                for option in doc["context_options"]
            ]
        stem = f"{before}{str(doc['context']).strip()}{self._delimiter}"
        context = stem.rstrip() or stem  # the white space before an answer belongs to the answer's first token
        return [Prompt(context, f"{stem[len(context) :]}{doc['continuation']}", shared=stem.strip())]

    def _solved(self, doc: dict[str, Any]) -> str:
        if self._kind == "multiple_choice":
            return f"{doc['query']}{self._delimiter}{doc['choices'][doc['gold']]}"
        if self._kind == "schema":
            return f"{doc['context_options'][doc['gold']]}{self._delimiter}{doc['continuation']}"
        return f"{str(doc['context']).strip()}{self._delimiter}{doc['continuation']}"

    def _examples(self, doc: dict[str, Any]) -> list[dict[str, Any]]:
        shots = self._config.num_fewshot or 0
        if not shots:
            return []
        own = doc["index"]
        others = [index for index in range(self._drawn_from) if index != own]
        if len(others) < shots:
            raise ConfigError(
                f"{self._config.task}: shows {shots} solved examples, which are drawn from the other evaluated items; "
                f"there are {len(others)}",
                hint=f"set eval.limit to {shots + 1} or more",
            )
        return [self._docs[index] for index in random.Random(_EXAMPLES_SEED + own).sample(others, shots)]

    def _encoded(self, prompts: list[Prompt]) -> list[Encoded]:
        texts = [self._tokens(prompt.text) for prompt in prompts]
        if self._kind == "multiple_choice":
            starts = [_common(texts)] * len(texts)
        elif self._kind == "schema":
            ending = _common([tokens[::-1] for tokens in texts])
            starts = [len(tokens) - ending for tokens in texts]
        else:
            starts = [_common([self._tokens(prompts[0].shared), *texts])]
        return [
            _request(prompt, tokens, start, most=self._lm.max_length)
            for prompt, tokens, start in zip(prompts, texts, starts, strict=True)
        ]

    def _tokens(self, text: str) -> list[int]:
        return [self._first_token, *self._lm.tok_encode(text, add_special_tokens=False)]

    def doc_to_text(self, doc: dict[str, Any]) -> Any:
        """Return the question; for ``schema`` the place of the right beginning among the choices."""
        keys = {"multiple_choice": "query", "schema": "gold", "language_modeling": "context"}
        return doc[keys[self._kind]]

    def doc_to_target(self, doc: dict[str, Any]) -> Any:
        """Return the right answer, or its place among the choices."""
        return doc["gold"] if self._kind == "multiple_choice" else str(doc["continuation"])

    def doc_to_choice(self, doc: dict[str, Any]) -> list[str]:
        """Return the answers, or the beginnings, that an item has."""
        return [str(choice) for choice in doc[_KEYS[self._kind][0]]]

    def doc_to_prefix(self, doc: dict[str, Any]) -> None:
        """Return that no answer has a given beginning."""

    def fewshot_context(self, doc: dict[str, Any], **kwargs: Any) -> str:
        """Return no text: the requests have the solved examples."""
        return ""

    def aggregation(self) -> dict[str, Any]:
        """Return how the items' scores are combined."""
        from lm_eval.api.metrics import mean

        return {"centered": mean, "acc": mean}

    def higher_is_better(self) -> dict[str, bool]:
        """Return that more is better."""
        return {"centered": True, "acc": True}

    def has_training_docs(self) -> bool:
        """Return that all items are evaluated."""
        return False

    def has_validation_docs(self) -> bool:
        """Return that all items are evaluated."""
        return False

    def has_test_docs(self) -> bool:
        """Return that all items are evaluated."""
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        """Return the items; each has its ``index`` in this order."""
        return self._docs


def _request(prompt: Prompt, tokens: list[int], start: int, *, most: int) -> Encoded:
    """Return a request that scores the tokens from ``start`` on, of at most as many as the context has.

    A text that is too long loses its beginning. If the scored tokens alone are too long, they lose theirs.
    """
    scored = len(tokens) - start if start else 0
    surplus = max(0, len(tokens) - most)
    kept, at = tokens[surplus:], max(1, start - surplus)
    scored = min(scored, len(kept) - 1)
    at = at if scored else len(kept) - 1  # a request must have a token; its answer isn't used
    return Encoded.of(prompt.continuation, kept[:at], kept[at:], scored=scored)


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens with which all sequences begin."""
    for number, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return number
    return min(map(len, sequences))


def _count(limit: float, items: int) -> int:
    return math.ceil(items * limit) if limit < 1 else int(limit)


def _read(path: Path, kind: str) -> list[dict[str, Any]]:
    items = list(_items(path, kind))
    random.Random(_ORDER_SEED).shuffle(items)
    return [{"index": index, **item} for index, item in enumerate(items)]


def _items(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, (line, length) in enumerate(files.lines(file, files.MAX_FILE_BYTES), start=1):
            if not line.strip():
                continue
            try:
                item = files.parse_json(line if length <= files.MAX_FILE_BYTES else b"", any_number=True)
                missing = [key for key in _KEYS[kind] if key not in item]
                if missing:
                    raise ValueError(f"{missing[0]} is missing")
                choices = item[_KEYS[kind][0]]
                if "gold" in item and kind != "language_modeling" and not 0 <= item["gold"] < len(choices):
                    raise ValueError(f"gold={item['gold']} is no place among {len(choices)} choices")
            except files.DAMAGED as error:
                raise DataError(
                    f"{path}: line {number} is no item of the kind {kind} ({error})",
                    hint="unpack the bundle again: hlatctl eval data download --to DIR eval=core",
                ) from None
            yield item
