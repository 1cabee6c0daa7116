"""MBPP (Austin et al., arXiv 2108.07732): the harness's prompts, and its tests in the format of cells.

The harness's definition runs generated programs in its own process, and importing its functions does so too. So only
its texts are read here. As in the harness, a program is the answer itself, and the first three tests decide.

Unlike in the harness, tests run outside the program's cell and see only the function that they call: a problem whose
tests need another name of the program (a class, a module that it imports) can't be solved.
"""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

from eval.tasks.catalog import Definition
from hlatctl.run.errors import DataError, EvaluationError

_KEPT = (
    "task",
    "dataset_path",
    "dataset_name",
    "output_type",
    "test_split",
    "doc_to_text",
    "target_delimiter",
    "generation_kwargs",
    "num_fewshot",
    "metadata",
)
#: Tests of a problem that the harness's definition shows and applies.
_TESTS = 3
#: A problem's answer is the given solution; in solved examples it ends with ``[DONE]``, as in the harness.
_TARGET = "{{code}}{% if is_fewshot is defined %}\n[DONE]{% endif %}"


def config(definition: Definition) -> dict[str, Any]:
    """Return the task's prompts and generation, without the functions that run programs in the harness."""
    shown = definition["fewshot_config"]
    bypass = {"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}
    return {key: definition[key] for key in _KEPT} | {
        "fewshot_config": {**shown, "samples": _returned(str(shown["samples"]))},
        "doc_to_target": _TARGET,
        "metric_list": [bypass],
    }


def problem(record: dict[str, Any]) -> dict[str, Any]:
    """Return a problem of the dataset in HumanEval's format; its ``question`` is the text for people.

    DataError: its tests are not Python, or call no function.
    """
    number = record.get("task_id")
    try:
        tests = "\n".join(record["test_list"][:_TESTS])
        name = _called(ast.parse(tests))
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(
            f"mbpp: problem {number} has no usable tests ({type(error).__name__}: {error})",
            hint="replace the file; `hlatctl eval data download --to DIR` fetches datasets",
        ) from None
    return {
        "task_id": number,
        "question": str(record.get("text", "")),
        "prompt": "",
        "entry_point": name,
        "canonical_solution": "",
        "test": f"def check(candidate):\n    exec(compile({tests!r}, '<tests>', 'exec'), globals())\n",
    }


def _called(tests: ast.Module) -> str:
    """Return the first function that the tests call and that is not built in."""
    calls = (node for node in ast.walk(tests) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    named = [(call.lineno, call.col_offset, call.func.id) for call in calls if isinstance(call.func, ast.Name)]
    own = [name for _, _, name in sorted(named) if not hasattr(builtins, name)]
    if not own:
        raise ValueError("they call no function")
    return own[0]


def _returned(function: str) -> Any:
    """Return what a function of the harness returns as a literal, without importing its module."""
    path, _, name = function.rpartition(".")
    try:
        tree = ast.parse(Path(f"{path}.py").read_text(encoding="utf-8"))
        body = next(node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
        returned = next(node.value for node in body if isinstance(node, ast.Return) and node.value)
        return ast.literal_eval(returned)
    except (OSError, StopIteration, SyntaxError, ValueError) as error:
        raise EvaluationError(
            f"mbpp: {function} of lm-evaluation-harness has no solved examples that can be read ({error!r})",
            hint="install the version of lm-eval in constraints.txt",
        ) from None
