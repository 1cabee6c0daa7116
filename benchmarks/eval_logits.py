"""Log-likelihoods by our class for transformers against lm-evaluation-harness's own.

Ours computes logits of the answers only, and with ``shared`` reads the common beginning of sequences once. All
score the same requests with the same random model, which has the vocabulary of Llama 3 and little else. Each runs in a
process of its own, in turn. Requests are like HellaSwag's (four answers of some 20 tokens for each context), or like
MMLU's (one letter after five solved examples, which all questions have in common).
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from typing import Any

_Bounds = tuple[int, int]
_VOCABULARY, _BATCH_SIZE, _CONTEXT_TOKENS, _ROUNDS = 128_256, 8, 2048, 2
#: Items, and the fewest and most tokens of solved examples, a question and an answer.
_TASKS = {"hellaswag": (8, (0, 0), (60, 160), (10, 30)), "mmlu": (16, (500, 500), (60, 160), (1, 1))}


def run() -> None:
    """Print processor time and memory of each task and class, their ratios, and the largest difference of a score."""
    for task in _TASKS:
        best: dict[str, dict[str, Any]] = {}
        for _ in range(_ROUNDS):
            for kind in ("harness", "ours", "shared"):
                measured = _measured(task, kind)
                best[kind] = min(best.get(kind, measured), measured, key=lambda one: float(one["processor_s"]))
        for kind, one in best.items():
            print(f"{task}, {kind}: {_line(one, best['harness'])}")


def _line(one: dict[str, Any], harness: dict[str, Any]) -> str:
    apart = [abs(a - b) for a, b in zip(harness["nats"], one["nats"], strict=True)]
    equal = sum(difference == 0 for difference in apart)
    greedy = sum(a != b for a, b in zip(harness["greedy"], one["greedy"], strict=True))
    return (
        f"{one['processor_s']:.2f} s of processor time ({one['processor_s'] / harness['processor_s']:.2f}), "
        f"{one['grown_bytes'] / 2**20:,.0f} MiB ({one['grown_bytes'] / harness['grown_bytes']:.2f}); "
        f"{equal} of {len(apart)} scores equal bit for bit, largest difference {max(apart):.1e} nats, "
        f"{greedy} greedy answers differ"
    )


def _measured(task: str, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, task, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "TQDM_DISABLE": "1"})
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _case(task: str, kind: str) -> dict[str, Any]:
    """Score the requests; memory is what the process grows by while it does."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from eval.serving.hugging_face import HuggingFace
    from eval.serving.model import Loaded

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_CONTEXT_TOKENS,
    )
    model: Any = LlamaForCausalLM(shape)
    model.eval()
    tokenizer = _tokenizer(PreTrainedTokenizerFast)
    lm: Any = (
        HFLM(model, tokenizer=tokenizer, max_length=_CONTEXT_TOKENS, batch_size=_BATCH_SIZE)
        if kind == "harness"
        else HuggingFace(
            Loaded(model, tokenizer, _CONTEXT_TOKENS), batch_size=_BATCH_SIZE, share_prefixes=kind == "shared"
        )
    )
    requests, before = _requests(*_TASKS[task]), resource.getrusage(resource.RUSAGE_SELF)
    start = time.process_time()
    answers = lm._loglikelihood_tokens(requests)
    processor_s, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "processor_s": processor_s,
        "grown_bytes": (after.ru_maxrss - before.ru_maxrss) << 10,
        "nats": [nats for nats, _ in answers],
        "greedy": [is_greedy for _, is_greedy in answers],
    }


def _tokenizer(kind: Any) -> Any:
    from tokenizers import Tokenizer, models

    return kind(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>")), eos_token="</s>")


def _requests(items: int, solved: _Bounds, question: _Bounds, answer: _Bounds) -> list[Any]:
    draw = random.Random(0)

    def tokens(bounds: _Bounds) -> list[int]:
        return [draw.randrange(_VOCABULARY) for _ in range(draw.randint(*bounds))]

    examples = tokens(solved)
    contexts = [examples + tokens(question) for _ in range(items)]
    return [((str(n), str(k)), c, tokens(answer)) for n, c in enumerate(contexts) for k in range(4)]


if __name__ == "__main__":
    print(json.dumps(_case(*sys.argv[1:])))
