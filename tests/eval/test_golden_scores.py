"""Scores of fixed models, which may change only together with the scoring version of their kind (``eval.source``).

The model has weights from a formula and a tokenizer without training, so that every machine and every version of torch
has the same ones. Written answers and programs are fixed texts. Numbers may differ by rounding.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema import CodeConfig
from eval import code, harness, source, validation
from eval.serving import model, runners
from eval.tasks import plan, suites
from eval.tasks.suites import Task
from tests.eval import tiny_data

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parents[1] / "golden" / "scores.json"
#: Set to write the scores of kinds whose version was raised; check the difference before you commit it.
UPDATE_ENV = "HLATCTL_UPDATE_GOLDEN"
_RELATIVE = 1e-4
_TOKENS = 256
_TEXTS = (
    "The quick brown fox jumps over the lazy dog. ",
    "Žluťoučký kůň příšerně úpěl 🐎. ",
    "def add(a, b):\n    return a\n",
)
#: What a model could answer to a question of arithmetic: the whole solution, the number alone, a wrong one, no number.
_ANSWERS: tuple[Callable[[str], str], ...] = (
    lambda solution: f" {solution}",
    lambda solution: f" It is ${solution.split('#### ')[1]}.",
    lambda solution: f" {solution}0",
    lambda solution: " I don't know.",
)
#: Bodies of a function: right, wrong, and with an exception.
_BODIES: tuple[Callable[[str], str], ...] = (
    lambda solution: solution,
    lambda solution: "    return None\n",
    lambda solution: "    raise ValueError\n",
)


@pytest.fixture(scope="module")
def golden_lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness's model around the model of the golden scores, which reads bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("golden")
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    llama = LlamaForCausalLM(shape)
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(llama.named_parameters())):
            steps = torch.arange(weight.numel(), dtype=torch.float64)
            values = torch.sin(0.37 * steps * (1 + steps / 1000) + place)
            weight.copy_((1 + 0.1 * values if "norm" in name else 0.5 * values).view_as(weight))
    llama.save_pretrained(folder)
    loaded = model.load(folder, seq_len=_TOKENS, device="cpu")
    return runners.make(
        "hf", runners.RunnerArguments(folder=folder, loaded=lambda: loaded, max_length=_TOKENS, batch_size=4, seed=1)
    )


def _answering(lm: Any, answer: Callable[[dict[str, Any]], str]) -> Any:
    """Return the model with a rule for its written answers, from the request's document."""
    fixed = copy.copy(lm)
    fixed.generate_until = lambda requests, **keys: [answer(request.doc) for request in requests]
    return fixed


def _nth(kinds: tuple[Callable[[str], str], ...], solutions: list[str]) -> Callable[[str], str]:
    """Return the answer to each question: the first kind to the first one, and so on in turn."""
    return lambda solution: kinds[solutions.index(solution) % len(kinds)](solution)


def _log_likelihood(lm: Any, folder: Path) -> dict[str, Any]:
    data = tiny_data.write(folder / "data")
    tasks = [suites.task("smoke", name) for name in ("smoke_mmlu", "smoke_bbh", "smoke_crows_pairs")]
    wanted = replace(compose(["eval=hlat"]).eval, data_dir=str(data), tasks=["hellaswag", "truthfulqa_mc2"])
    tasks += plan.make(wanted, folder).tasks
    found: dict[str, Any] = {}
    for task in tasks:
        result = harness.run(lm, task, folder, seed=1, limit=8)
        nats = [answer[0] for sample in result.samples for answer in sample["filtered_resps"]]
        found[task.name] = {**_numbers(result.metrics), "nats": sum(nats) / len(nats)}
    return found


def _generation(lm: Any, folder: Path) -> dict[str, Any]:
    task = suites.task("smoke", "smoke_gsm8k")
    solutions = [document["answer"] for document in code.read_jsonl(task.items)]
    answer = _nth(_ANSWERS, solutions)
    judged = harness.run(_answering(lm, lambda document: answer(document["answer"])), task, folder, seed=1, limit=12)
    written = harness.run(lm, task, folder, seed=1, limit=2, generation={"max_gen_toks": 12})
    return {"smoke_gsm8k": _numbers(judged.metrics), "texts": [sample["resps"][0][0] for sample in written.samples]}


def _programs(lm: Any, folder: Path) -> dict[str, Any]:
    task = suites.task("smoke", "smoke_humaneval")
    solutions = [document["canonical_solution"] for document in code.read_jsonl(task.items)]
    body = _nth(_BODIES, solutions)
    settings = CodeConfig(memory_bytes=512 << 20, allow_unsandboxed=True, workers=1)
    lm = _answering(lm, lambda document: body(document["canonical_solution"]))
    scores, tested = code.evaluate(lm, task, folder, settings, limit=8, seed=1)
    verdicts = {program["task_id"]: program["passed"] for program in tested}
    return {**{name: score.value for name, score in scores.items()}, "verdicts": verdicts}


def _perplexity(lm: Any, folder: Path) -> dict[str, Any]:
    items, definition = folder / "texts.jsonl", folder / "texts.yaml"
    items.write_text("".join(json.dumps({"text": text * 7}) + "\n" for text in _TEXTS), encoding="utf-8")
    metrics = "[{metric: byte_perplexity}, {metric: bits_per_byte}]"
    definition.write_text(
        "dataset_path: json\ntest_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        f"doc_to_target: '{{{{text}}}}'\nmetric_list: {metrics}\nmetadata: {{version: 1}}\n"
    )
    config = {"include": str(definition), "task": "texts"}
    task = Task(name="texts", definition=definition, config=config, files={"test": items})
    return {"texts": _numbers(harness.run(lm, task, folder, seed=1).metrics)}


def _held_out(lm: Any, folder: Path) -> dict[str, Any]:
    text = folder / "validation.jsonl"
    text.write_text("".join(json.dumps({"text": one * 4}) + "\n" for one in _TEXTS * 3), encoding="utf-8")
    loaded = model.Loaded(lm.model, lm.tokenizer, _TOKENS)
    found = validation.evaluate(loaded, text, max_tokens=1000)
    return {name: [score.value, score.stderr] for name, score in found.items()}


def _core(lm: Any, folder: Path) -> dict[str, Any]:
    data = tiny_data.write_bundle(folder / "data")
    names = ["core_arc_easy", "core_winograd", "core_bigbench_operators"]
    wanted = replace(compose(["eval=core"]).eval, data_dir=str(data), tasks=names)
    found: dict[str, Any] = {}
    for task in plan.make(wanted, folder).tasks:
        result = harness.run(lm, task, folder, seed=1, limit=12)
        nats = [answer[0] for sample in result.samples for answer in sample["filtered_resps"]]
        found[task.name] = {**_numbers(result.metrics), "nats": sum(nats) / len(nats)}
    return found


_SCORERS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    source.LOG_LIKELIHOOD: _log_likelihood,
    source.GENERATION: _generation,
    source.PROGRAMS: _programs,
    source.PERPLEXITY: _perplexity,
    source.HELD_OUT: _held_out,
    source.CORE: _core,
}


def _numbers(metrics: harness.Metrics) -> dict[str, float]:
    return {name: value for name, value in sorted(metrics.items()) if isinstance(value, float)}


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return the scores that differ by more than rounding, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted({*before, *now})
        return [one for key in names for one in _differences(before.get(key), now.get(key), f"{name}.{key}".strip("."))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            one for at, pair in enumerate(zip(before, now, strict=True)) for one in _differences(*pair, f"{name}.{at}")
        ]
    is_same = before == (pytest.approx(now, rel=_RELATIVE, abs=1e-9) if isinstance(now, float) else now)
    return [] if is_same else [f"{name}: {before!r} -> {now!r}"]


def judge(kind: str, stored: dict[str, Any] | None, version: int, now: dict[str, Any]) -> str:
    """Return what is wrong with the scores of a kind; empty if nothing is."""
    changed = _differences(stored["scores"], now) if stored else []
    if stored and stored["version"] == version:
        return (
            ""
            if not changed
            else (
                f"scores of {kind} changed, and their version is still {version}: {'; '.join(changed)}\n"
                f"If they may change, raise eval.source.SCORING[{kind!r}] and run this test with {UPDATE_ENV}=1"
            )
        )
    return f"version {version} of {kind} has no scores in {GOLDEN.name}: run this test with {UPDATE_ENV}=1"


@pytest.mark.parametrize("kind", source.SCORING)
def test_scores_change_only_with_their_version(golden_lm: Any, tmp_path: Path, kind: str) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    version, now = source.SCORING[kind], _SCORERS[kind](golden_lm, tmp_path)
    if os.environ.get(UPDATE_ENV) and golden.get(kind, {}).get("version") != version:
        golden[kind] = {"version": version, "scores": now}
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert judge(kind, golden.get(kind), version, now) == ""


def test_a_changed_score_names_the_version_to_raise_and_rounding_is_no_change() -> None:
    stored = {"version": 1, "scores": {"piqa": {"acc": 0.5, "nats": -3.0}}}
    assert judge("generation", stored, 1, {"piqa": {"acc": 0.5, "nats": -3.00001}}) == ""
    wrong = judge("generation", stored, 1, {"piqa": {"acc": 0.25, "nats": -3.0}})
    assert wrong.startswith("scores of generation changed, and their version is still 1: piqa.acc: 0.5 -> 0.25\n")
    assert "raise eval.source.SCORING['generation']" in wrong
    assert judge("generation", stored, 1, {"piqa": {"acc": 0.5}}).count("piqa.nats: -3.0 -> None") == 1
    assert judge("generation", stored, 2, {}).startswith("version 2 of generation has no scores")


def test_every_kind_has_golden_scores_of_its_version() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert {kind: stored["version"] for kind, stored in golden.items()} == source.SCORING
