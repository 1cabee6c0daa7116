"""What an evaluation can't be is refused before anything starts, with a hint that works."""

from __future__ import annotations

import pytest

from conf.compose import compose, override_eval
from conf.eval_rules import code_tasks
from conf.schema import EvalConfig
from hlatctl.run.errors import ConfigError


def test_each_new_key_reaches_the_configuration() -> None:
    overrides = [
        "eval=hlat_core",
        "eval.limit=0.1",
        "eval.items={gsm8k:[5,1]}",
        "eval.chat_template=tool_use",
        "eval.system_prompt=Answer briefly.",
        "eval.groups.math.generation={do_sample:true,temperature:0.8,top_k:5,until:[END]}",
        "eval.groups.reading={tasks:[boolq]}",
    ]
    wanted = compose(overrides).eval
    assert (wanted.limit, wanted.items, wanted.chat_template) == (0.1, {"gsm8k": [5, 1]}, "tool_use")
    assert wanted.groups["math"].generation == {"do_sample": True, "temperature": 0.8, "top_k": 5, "until": ["END"]}
    assert wanted.groups["math"].tasks == ["gsm8k"]
    assert wanted.groups["reading"].tasks == ["boolq"]
    assert wanted.system_prompt == "Answer briefly."


@pytest.mark.parametrize("limit", ["3", "0.5", "null"])
def test_a_limit_is_a_number_of_items_or_a_fraction_of_them(limit: str) -> None:
    assert compose([f"eval.limit={limit}"]).eval.limit == {"3": 3, "0.5": 0.5, "null": None}[limit]


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("eval.limit=1.0", "eval.limit=1.0: must be a whole number", "eval.limit=null evaluates all items"),
        ("eval.limit=7.5", "eval.limit=7.5: must be a whole number", "eval.limit=7 evaluates 7 items of each task"),
        ("eval.limit=-1", "eval.limit=-1: must be a whole number", "eval.limit=null evaluates all items"),
        ("eval.items={boolq:[]}", "eval.items.boolq=[]: must name an item", "~eval.items.boolq"),
        ("eval.items={boolq:[1,2,1]}", "eval.items.boolq: names item 1 more than once", "list 1 once"),
        ("eval.items={boolq:[-1]}", "eval.items.boolq[0]=-1: must be at least 0", ""),
        ("eval.chat_template=''", "eval.chat_template='': must be true, false or the name", "eval.chat_template=true"),
        ("eval.system_prompt=' '", "eval.system_prompt: is empty", "eval.system_prompt=null"),
        ("eval.include_path=['s3://b/t']", "eval.include_path[0]=s3://b/t: must be a folder", "[FOLDER]"),
        (
            "eval.groups.math.generation={temperature:0.8}",
            "eval.groups.math.generation.temperature=0.8: has no effect without",
            "eval.groups.math.generation.do_sample=true",
        ),
        ("eval.groups.math.generation={temp:1}", "eval.groups.math.generation.temp: unknown key", "temperature"),
        ("eval.groups.math.generation={max_gen_toks:0}", "max_gen_toks=0: must be greater than 0", "~eval.groups"),
        ("eval.groups.math.generation={until:END}", "until=END: must be a list of texts", "~eval.groups"),
        ("eval.groups.math.generation={top_p:1.5,do_sample:true}", "top_p=1.5: must be greater than 0", ""),
        ("eval.groups.math.generation={do_sample:1}", "do_sample=1: must be true or false", ""),
    ],
)
def test_a_wrong_value_is_refused(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["eval=hlat_core", override])
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "hinted", "name"),
    [
        ("eval.groups.maht.shots=5", "eval.groups.math", "eval.groups.math.shots=5"),
        ("eval.groups.maht.shots=5", "eval.groups.maht.tasks=[TASK]", "eval.groups.maht.tasks=[piqa]"),
        ("eval.groups.math.tasks=[]", "~eval.groups.math", "~eval.groups.math"),
        ("~eval.groups.maht", "~eval.groups.math", "~eval.groups.math"),
        ("eval.items.boolq=[]", "leave it out", "eval.limit=null"),
        ("~eval.items.boolq", "leave out ~eval.items.boolq", "eval.limit=null"),
        ("eval.groups.math.generation.max_gen_toks=0", "leave it out", "eval.limit=null"),
    ],
)
def test_the_hint_of_a_wrong_name_or_entry_works(wrong: str, hinted: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["eval=hlat_core", wrong])
    assert hinted in caught.value.hint
    compose(["eval=hlat_core", name])


def test_an_entry_that_a_file_sets_is_removed_as_the_hint_says() -> None:
    run = compose(["eval=hlat_core", "eval.items.boolq=[1]"])
    with pytest.raises(ConfigError) as caught:
        override_eval(run, ["eval.items.boolq=[]"])
    assert caught.value.hint == "all items: leave it out, or use ~eval.items.boolq if a file sets it"
    assert override_eval(run, ["~eval.items.boolq"]).eval.items == {}
    with pytest.raises(ConfigError, match=r"~eval.items.bolq: nothing sets it\nhint: did you mean ~eval.items.boolq"):
        override_eval(run, ["~eval.items.bolq"])


def test_the_defaults_ask_as_before() -> None:
    wanted = EvalConfig()
    assert not any((wanted.include_path, wanted.chat_template, wanted.system_prompt, wanted.items))
    assert (wanted.limit, wanted.fewshot_seed) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "tasks"),
    [
        (["eval=smoke"], ["smoke_humaneval"]),
        (["eval=smoke", "eval.tasks=[validation]"], []),
        (["eval=hlat"], ["humaneval"]),
        (["eval=hlat", "eval.tasks=[commonsense]"], []),
        (["eval=hlat", "eval.tasks=[commonsense,mbpp]"], ["mbpp"]),
        (["eval=olmes_tasks"], []),
    ],
)
def test_the_tasks_that_need_a_sandbox_are_known(overrides: list[str], tasks: list[str]) -> None:
    assert code_tasks(compose(overrides).eval) == tasks
