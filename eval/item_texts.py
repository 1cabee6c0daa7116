"""``python -m eval.item_texts --config FILE --to FILE``: write the text of every item of a suite as JSON Lines.

A line has ``task``, ``item`` (its name in the files of items, see ``eval.items``) and ``text``: the question as the
harness renders it, without solved examples, and the right answer. The run's held-out text is not included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Config
from eval import harness
from eval.serving import model
from eval.tasks import plan
from eval.tasks.suites import Task
from hlatctl.run import processes
from hlatctl.run.errors import EvaluationError, cannot_write, run_main
from hlatctl.run.files import new_file, private_folder


def write(config: Config, path: Path) -> int:
    """Write the file and return the number of items; any error of a suite that can't be run."""
    with private_folder("eval-items") as own:
        model.settle_environment(own.path, offline=not plan.uses_network(config.eval))
        harness.quiet()
        tasks = plan.make(config.eval, own.path).tasks
        try:
            return _write(path, ((task.name, *pair) for task in tasks for pair in texts(task, own.path, config)))
        except OSError as error:
            raise cannot_write(path, error) from None


def _write(path: Path, records: Iterable[tuple[str, str, str]]) -> int:
    number = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for task, item, text in records:
            file.write(json.dumps({"task": task, "item": item, "text": text}) + "\n")
            number += 1
    return number


def texts(task: Task, scratch: Path, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each item of a task, whatever ``eval.limit`` and ``eval.items`` choose."""
    loaded = harness.load(task, scratch, shots=0, seed=config.seed)["tasks"][task.name]
    for number, document in enumerate(loaded.eval_docs):
        try:
            name = str(document["task_id"]) if task.is_code else str(number)
            yield name, _text(loaded, document)
        except Exception as error:  # templates and functions of definitions raise all kinds of errors for bad items
            raise EvaluationError(
                f"{task.name}: item {number} can't be rendered ({type(error).__name__}: {error})",
                hint="`hlatctl eval data status` lists the task's files; one may be damaged",
            ) from error


def _text(loaded: Any, document: Any) -> str:
    """Return question and answer; if each choice has its own question, those of the right choice."""
    question, answer = loaded.doc_to_text(document), loaded.doc_to_target(document)
    if loaded.config.doc_to_choice is not None:
        choices = loaded.doc_to_choice(document)
        question, answer = _chosen(question, choices), _chosen(answer, choices)
    return f"{question} {answer[0] if isinstance(answer, list) and answer else answer}"


def _chosen(value: Any, choices: list[str]) -> Any:
    """Return the choice at an index, or at the first of several; other values as they are."""
    first = value[0] if isinstance(value, list) and value else value
    return choices[first] if isinstance(first, int) and 0 <= first < len(choices) else value


def main(argv: list[str] | None = None) -> int:
    """Write the file, and print the number of items as JSON."""
    parser = argparse.ArgumentParser(prog="eval.item_texts", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True, help="file to write")
    options = parser.parse_args(argv)
    if argv is None:  # runs as a separate process in its own session
        processes.end_with_parent()
    config = load(options.config)
    print(json.dumps({"items": write(config, options.to.absolute())}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
