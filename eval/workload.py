"""``python -m eval.workload --config FILE``: how many requests and tokens a suite needs, as JSON for ``hlatctl plan``.

The harness renders the requests of some items of every task, so the figures match the data, the shots and the prompts
that an evaluation uses. No model is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config, EvalConfig
from eval import harness
from eval.serving import model
from eval.tasks import catalog, plan
from eval.tasks.suites import Task
from hlatctl.run.errors import run_main
from hlatctl.run.files import private_folder

#: Items of a task whose requests are rendered, spread evenly over its data; smaller tasks are rendered as a whole.
_SAMPLED_ITEMS = 32


def workload(config: Config, scratch: Path) -> list[dict[str, Any]]:
    """Return a record for each task of the suite, without the held-out text.

    A record has ``group``, ``task``, ``items`` (at most ``eval.limit``), per item ``requests`` and ``sequences`` (those
    that the model reads: choices of one letter share one), and per sequence ``characters`` and ``generated_tokens``
    (at most).
    """
    planned, groups = plan.make(config.eval, scratch), _groups(config.eval)
    return [
        {"group": groups.get(task.name, task.name), "task": task.name, **_of_task(config, task, scratch)}
        for task in planned.tasks
    ]


def _groups(wanted: EvalConfig) -> dict[str, str]:
    asked, _ = plan.ask(wanted)
    return {
        one.definition.name: name for one in asked for name, group in wanted.groups.items() if group == one.settings
    }


def _of_task(config: Config, task: Task, scratch: Path) -> dict[str, Any]:
    loaded = harness.load(task, scratch, shots=task.shots, seed=config.seed)["tasks"][task.name]
    asked = harness.asked(task, loaded, config.eval.limit)
    items = len(asked)
    with catalog.running_own_code(task):
        loaded.build_all_requests(samples=list(asked[:: max(1, items // _SAMPLED_ITEMS)])[:_SAMPLED_ITEMS])
    rendered = len({request.doc_id for request in loaded.instances})
    texts = [_sequence(request) for request in loaded.instances]
    sequences = list(dict.fromkeys(zip([request.doc_id for request in loaded.instances], texts, strict=True)))
    repeats = config.eval.code.samples_per_problem if task.is_code else 1
    return {
        "items": items,
        "requests": repeats * len(texts) / rendered,
        "sequences": repeats * len(sequences) / rendered,
        "characters": statistics.fmean(len(text) for _, text in sequences),
        "generated_tokens": max(_generated_tokens(request, config) for request in loaded.instances),
    }


def _sequence(request: Any) -> str:
    """Return the text that the model reads for a request. Single letters after the same prompt share one."""
    if request.request_type != "loglikelihood":
        return str(request.args[0])
    prompt, continuation = request.args
    return str(prompt) if len(continuation.strip()) <= 1 else f"{prompt}{continuation}"


def _generated_tokens(request: Any, config: Config) -> int:
    if request.request_type != "generate_until":
        return 0
    tokens = int(request.args[1].get("max_gen_toks", harness.DEFAULT_GENERATED_TOKENS))
    return tokens if tokens < config.train.seq_len else config.train.seq_len // 2


def main(argv: list[str] | None = None) -> int:
    """Print the records."""
    parser = argparse.ArgumentParser(prog="eval.workload", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args(argv)
    config = load(options.config)
    with private_folder("eval-workload") as own:
        model.settle_environment(own.path, offline=not plan.uses_network(config.eval))
        print(json.dumps(workload(config, own.path)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
