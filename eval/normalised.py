"""Metrics computed from the log-likelihoods of an item's answers, and the score of guessing.

Each metric is computed only if the harness has not computed one of the same name:

    bits_per_byte   -nats of the right answer / (its bytes x ln 2); the lowest value if there are several right answers
    acc             the likeliest choice is right
    acc_norm        the likeliest per character
    acc_bytes       the likeliest per byte (UTF-8)
    acc_per_token   the likeliest per token

The accuracies exist for ranked choices of unequal length. Accuracy with unconditional likelihoods (PMI) would need
another request per choice; the harness's own ``acc_mutual_info`` has it.

The harness's definition states the right answer. Ranked choices have log-likelihoods already. For a generated answer
the model gets one more request with the same prompt and the definition's answer; the other scores don't depend on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eval.scores import mean_error
from hlatctl.run.evaluations import ACCURACIES, BITS_PER_BYTE


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The possible answers of one item.

    Args:
        texts: ranked choices, or only the right answer; without the delimiter before them.
        requests: the same texts as they continue the prompt.
        nats: log-likelihoods of the requests.
        right: indices of the right answers.
    """

    texts: list[str]
    requests: list[str]
    nats: list[float]
    right: list[int]


def right_answers_of(
    lm: Any, loaded: Any, samples: list[dict[str, Any]], *, has_chat: bool = False
) -> dict[Any, Answers]:
    """Return the answers by ``doc_id``. Items without a known right answer are omitted.

    Args:
        has_chat: prompts end with the beginning of the answer's turn.
    """
    by_item = {sample["doc_id"]: sample for sample in reversed(samples)}  # those of the first filter
    items = [by_item[key] for key in sorted(by_item)]
    found: Iterable[tuple[dict[str, Any], Answers | None]]
    match loaded.config.output_type:
        case "multiple_choice" if not callable(loaded.config.process_results):
            found = ((item, _ranked(loaded, item)) for item in items)
        case "loglikelihood":
            found = ((item, _continued(item)) for item in items)
        case "generate_until":
            found = _written(lm, loaded, items, "" if has_chat else loaded.config.target_delimiter)
        case _:  # the definition's own function decides what is right
            return {}
    return {item["doc_id"]: answers for item, answers in found if answers}


def _ranked(loaded: Any, item: dict[str, Any]) -> Answers | None:
    choices = loaded.doc_to_choice(item["doc"])
    gold = loaded.doc_to_text(item["doc"]) if loaded.multiple_input else loaded.doc_to_target(item["doc"])
    known = gold if isinstance(gold, list) else [gold]
    places = [choices.index(each) if each in choices else -1 for each in known if isinstance(each, str)]
    places += [each for each in known if isinstance(each, int)]
    right = sorted({place for place in places if 0 <= place < len(choices)})
    requests = [request[1] for request in item["arguments"]][: len(choices)]
    nats = [float(each[0]) for each in item["filtered_resps"]][: len(choices)]
    texts = [str(item["target"])] * len(choices) if loaded.multiple_input else choices
    return Answers(texts=texts, requests=requests, nats=nats, right=right) if right else None


def _continued(item: dict[str, Any]) -> Answers:
    text = item["arguments"][0][1]
    nats = float(item["filtered_resps"][0][0])
    return Answers(texts=[text.removeprefix(" ")], requests=[text], nats=[nats], right=[0])


def _written(
    lm: Any, loaded: Any, items: Iterable[dict[str, Any]], delimiter: str
) -> Iterator[tuple[dict[str, Any], Answers | None]]:
    from lm_eval.api.instance import Instance

    asked = [(item, text) for item in items if (text := _target(loaded, item["doc"]))]
    requests = []
    for item, text in asked:
        prompt = item["arguments"][0][0]
        # As between a question and its answer in a solved example; a prompt that ends in white space needs none.
        answer = text if prompt[-1:].isspace() else f"{delimiter}{text}"
        requests.append(Instance("loglikelihood", item["doc"], (prompt, answer), 0))
    fitting = [len(lm.tok_encode(request.args[1], add_special_tokens=False)) <= lm.max_length for request in requests]
    kept = [(*pair, request) for pair, request, fits in zip(asked, requests, fitting, strict=True) if fits]
    if not kept:
        return
    results = lm.loglikelihood([request for _, _, request in kept])
    for (item, text, request), (nats, _) in zip(kept, results, strict=True):
        yield item, Answers(texts=[text], requests=[request.args[1]], nats=[float(nats)], right=[0])


def _target(loaded: Any, doc: dict[str, Any]) -> str:
    """Return the right answer, or the first if there are several; empty if the definition has none."""
    if isinstance(loaded.config.doc_to_target, int) and loaded.config.doc_to_choice is None:
        return ""  # a number instead of an answer: the definition's functions check the generated text
    target = loaded.doc_to_target(doc)
    if isinstance(target, list):
        target = target[0] if target else ""
    if loaded.config.doc_to_choice is not None and isinstance(target, int):
        target = next(iter(loaded.doc_to_choice(doc)[target:]), "") if target >= 0 else ""
    return "" if target is None else str(target)


#: Its key among a task's metrics; it is the same under every filter.
KEY = f"{BITS_PER_BYTE},none"
#: Metrics of answers that can't be guessed, by the kind of the task.
_UNGUESSED = {"generate_until": "exact_match", "loglikelihood": "acc"}
#: A written answer is open, so nobody guesses it, if no text is right for more than one item, or this share of them.
_SHARE_OF_OPEN = 0.05
#: The harness's metric of CrowS-Pairs: one of two sentences is likelier.
_PAIRED = "pct_stereotype"

Values = dict[str, dict[Any, float]]


def add(
    lm: Any, loaded: Any, metrics: dict[str, Any], samples: list[dict[str, Any]], *, has_chat: bool = False
) -> dict[str, Any]:
    """Return a task's metrics with ours, their standard errors, and ``<metric>_chance`` where guessing has a score.

    Args:
        samples: one per item and filter; each gets its values of the metrics.
        has_chat: prompts end with the beginning of the answer's turn.
    """
    answers = right_answers_of(lm, loaded, samples, has_chat=has_chat)
    present = {key.partition(",")[0] for key in metrics}
    whole = dict(metrics)
    for name, values in _values(lm, loaded, answers).items():
        if values and name not in present:
            whole |= {f"{name},none": math.fsum(values.values()) / len(values)}
            whole |= {f"{name}_stderr,none": error for error in [mean_error(values.values())] if error is not None}
            _keep(samples, name, values)
    chances = {key: chance(key.partition(",")[0], loaded, answers, samples) for key in whole if "_stderr," not in key}
    return whole | {chance_key(key): value for key, value in chances.items() if value is not None}


def chance_key(key: str) -> str:
    """Return the key of a metric's score of guessing: ``acc_chance,none`` for ``acc,none``."""
    metric, _, filter_name = key.partition(",")
    return f"{metric}_chance,{filter_name}"


def bits_per_byte(answers: Answers) -> float | None:
    """Return the bits per byte of the right answer; None if it has no bytes."""
    sized = [(answers.nats[at], len(answers.texts[at].encode())) for at in answers.right]
    return min((-nats / (size * math.log(2)) for nats, size in sized if size), default=None)


def chance(metric: str, loaded: Any, answers: Mapping[Any, Answers], samples: list[dict[str, Any]]) -> float | None:
    """Return the score of guessing at each item; None if it is unknown."""
    if hasattr(loaded, "chance"):
        own: float | None = loaded.chance(metric)
        return own
    kind = loaded.config.output_type
    if kind != "multiple_choice":
        is_unguessed = metric == _UNGUESSED.get(kind) and (kind != "generate_until" or _are_open(answers))
        return 0.0 if is_unguessed else None
    if metric == _PAIRED:
        return _mean(1 / len(sample["arguments"]) for sample in samples)
    if metric not in ACCURACIES or len(answers) < len({sample["doc_id"] for sample in samples}):
        return None
    return _mean(len(each.right) / len(each.nats) for each in answers.values())


def _are_open(answers: Mapping[Any, Answers]) -> bool:
    """Return whether generated answers are open, not one of a few such as yes and no."""
    texts = Counter(each.texts[at] for each in answers.values() for at in each.right)
    return bool(texts) and max(texts.values()) <= max(1, _SHARE_OF_OPEN * len(answers))


def _values(lm: Any, loaded: Any, answers: Mapping[Any, Answers]) -> Values:
    bits = {key: value for key, each in answers.items() if (value := bits_per_byte(each)) is not None}
    found: Values = {BITS_PER_BYTE: bits}
    is_ranked = loaded.config.output_type == "multiple_choice" and not loaded.multiple_input
    if not is_ranked or all(len({len(text) for text in each.texts}) == 1 for each in answers.values()):
        return found
    for name, size in _sizes(lm).items():
        found[name] = {key: float(_best(each, size) in each.right) for key, each in answers.items()}
    return found


def _sizes(lm: Any) -> dict[str, Callable[[str, str], int]]:
    """Return the length of an answer by metric; arguments are its text and its request."""
    tokens: dict[str, int] = {}

    def count(request: str) -> int:
        if request not in tokens:
            tokens[request] = len(lm.tok_encode(request, add_special_tokens=False))
        return tokens[request]

    return {
        "acc": lambda text, request: 1,
        "acc_norm": lambda text, request: len(text),
        "acc_bytes": lambda text, request: len(text.encode()),
        "acc_per_token": lambda text, request: count(request),
    }


def _best(answers: Answers, size: Callable[[str, str], int]) -> int:
    sizes = [max(1, size(*pair)) for pair in zip(answers.texts, answers.requests, strict=True)]
    return max(range(len(sizes)), key=lambda at: answers.nats[at] / sizes[at])


def _keep(samples: list[dict[str, Any]], name: str, values: Mapping[Any, float]) -> None:
    for sample in samples:
        if sample["doc_id"] in values:
            sample[name] = values[sample["doc_id"]]
            sample["metrics"] = [*sample["metrics"], name]


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return math.fsum(known) / len(known) if known else None
