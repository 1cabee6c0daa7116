"""Rules of ``eval.*``: limits, chosen items, chat templates, and how answers are generated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from conf.constraints import Range
from conf.listing import is_url
from conf.schema import Config, EvalConfig
from hlatctl.cache.trust import require_own
from hlatctl.run.errors import ConfigError
from hlatctl.run.suggest import nearest, unset

#: Settings of generated answers that each runner understands, with type and bounds; names as in lm-evaluation-harness.
_GENERATION: dict[str, tuple[type, Range | None]] = {
    "do_sample": (bool, None),
    "temperature": (float, Range(gt=0)),
    "top_p": (float, Range(gt=0, le=1)),
    "min_p": (float, Range(ge=0, le=1)),
    "top_k": (int, Range(ge=0)),
    "repetition_penalty": (float, Range(gt=0)),
    "max_gen_toks": (int, Range(gt=0)),
    "until": (list, None),
}
#: Without ``do_sample`` they have no effect.
_OF_SAMPLING = ("temperature", "top_p", "min_p", "top_k")
#: The harness's tasks whose answers are programs, with what tests them, and such tasks of a built-in suite.
CODE_TASKS: dict[str, Literal["human_eval", "mbpp"]] = {"humaneval": "human_eval", "mbpp": "mbpp"}
BUILT_IN_CODE_TASKS = {"smoke": ("smoke_humaneval",)}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", list: "a list of texts"}


def code_tasks(wanted: EvalConfig) -> list[str]:
    """Return the tasks of an evaluation whose answers are programs, which run only in a sandbox."""
    of_suite = [] if wanted.groups else list(BUILT_IN_CODE_TASKS.get(wanted.suite, ()))
    chosen = set(wanted.tasks)
    groups = [group for name, group in wanted.groups.items() if not chosen or name in chosen]
    named = [name for name in of_suite if not chosen or name in chosen]
    named += [name for group in groups if group.judge != "harness" for name in group.tasks]
    return list(dict.fromkeys([*named, *(name for name in wanted.tasks if name in CODE_TASKS)]))


def _limit(config: Config) -> Iterator[ConfigError]:
    limit = config.eval.limit
    if limit is None or (isinstance(limit, int) and limit > 0) or 0 < limit < 1:
        return
    hint = "eval.limit=null evaluates all items"
    if isinstance(limit, float) and limit > 1 and math.isfinite(limit):
        hint = f"eval.limit={int(limit)} evaluates {int(limit)} items of each task"
    yield ConfigError(
        f"eval.limit={limit}: must be a whole number greater than 0, or a fraction above 0 and below 1", hint=hint
    )


def _items(config: Config) -> Iterator[ConfigError]:
    for task, items in config.eval.items.items():
        key = f"eval.items.{task}"
        if not items:
            yield ConfigError(f"{key}=[]: must name an item", hint=f"all items: {unset(key)}")
        twice = next((item for item in items if items.count(item) > 1), None)
        if twice is not None:
            yield ConfigError(f"{key}: names item {twice} more than once", hint=f"list {twice} once")


def _chat(config: Config) -> Iterator[ConfigError]:
    if config.eval.chat_template == "":
        yield ConfigError(
            "eval.chat_template='': must be true, false or the name of a template",
            hint="eval.chat_template=true uses the tokenizer's own template",
        )
    if config.eval.system_prompt is not None and not config.eval.system_prompt.strip():
        yield ConfigError("eval.system_prompt: is empty", hint="eval.system_prompt=null uses none")


def _groups(config: Config) -> Iterator[ConfigError]:
    groups = config.eval.groups
    for name in (name for name, group in groups.items() if not group.tasks):
        key, near = f"eval.groups.{name}", nearest(name, [other for other, group in groups.items() if group.tasks])
        question = f"did you mean eval.groups.{near}? " if near else ""
        others = f"{key}.tasks=[TASK] names its tasks; ~{key} removes a group that the suite has"
        yield ConfigError(f"{key}.tasks=[]: must name a task", hint=question + others)


def _include_path(config: Config) -> Iterator[ConfigError]:
    for index, path in enumerate(config.eval.include_path):
        key = f"eval.include_path[{index}]={path}"
        if not path or is_url(path):
            yield ConfigError(f"{key}: must be a folder", hint="eval.include_path=[FOLDER]")


def require_own_tasks(place: Path, folder: Path) -> None:
    """Refuse a folder of ``eval.include_path``, or a file that its tasks use, that another user can write to.

    Raises:
        StorageError: names the place.
    """
    rule = "the task's templates and Python functions run with your rights, so that no other user may write there"
    hint = f"if you trust it: `chmod -R go-w {folder}`; or copy it to a folder of your own"
    require_own(place, rule, hint)


def _generation(config: Config) -> Iterator[ConfigError]:
    for name, group in config.eval.groups.items():
        settings, key = group.generation, f"eval.groups.{name}.generation"
        for setting, value in settings.items():
            yield from _setting(f"{key}.{setting}", setting, value)
        asks_code_often = group.judge != "harness" and config.eval.code.samples_per_problem > 1
        if settings.get("do_sample") is True and "temperature" not in settings and not asks_code_often:
            yield ConfigError(
                f"{key}.do_sample=true: needs a temperature; the harness's default of 0 can't be sampled",
                hint=f"{key}.temperature=0.8",
            )
        idle = [setting for setting in _OF_SAMPLING if setting in settings]
        if idle and settings.get("do_sample") is not True:
            yield ConfigError(
                f"{key}.{idle[0]}={settings[idle[0]]}: has no effect without {key}.do_sample=true",
                hint=f"{key}.do_sample=true samples the answers",
            )


def _setting(key: str, name: str, value: Any) -> Iterator[ConfigError]:
    if name not in _GENERATION:
        yield ConfigError(f"{key}: unknown key", hint=f"known here: {', '.join(_GENERATION)}")
        return
    kind, bounds = _GENERATION[name]
    right = type(value) is kind or (kind is float and type(value) is int)
    if kind is list:
        right = right and bool(value) and all(isinstance(text, str) and text for text in value)
    if not right or (kind is float and not math.isfinite(value)):
        yield ConfigError(f"{key}={value}: must be {_WORDS[kind]}", hint=f"the tasks' own: {unset(key)}")
    elif bounds and value not in bounds:
        yield ConfigError(f"{key}={value}: must be {bounds}", hint=f"the tasks' own: {unset(key)}")


RULES = (_limit, _items, _chat, _groups, _include_path, _generation)
