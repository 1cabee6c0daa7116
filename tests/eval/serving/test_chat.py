"""A tokenizer without the configured chat template is refused before the weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import EvalConfig
from eval.serving import chat
from hlatctl.run.errors import ConfigError


def _tokenizer(template: Any) -> Any:
    return SimpleNamespace(chat_template=template)


def test_the_named_template_becomes_the_only_one() -> None:
    tokenizer = _tokenizer({"default": "d", "tool_use": "t"})
    chat.select(tokenizer, "tool_use")
    assert tokenizer.chat_template == "t"
    one = _tokenizer("d")
    chat.select(one, True)
    assert one.chat_template == "d"
    several = _tokenizer({"default": "d", "tool_use": "t"})
    chat.select(several, True)
    assert several.chat_template == "d"


@pytest.mark.parametrize(
    ("known", "template", "message"),
    [
        (None, True, "eval.chat_template=true: the tokenizer has no chat template"),
        (None, "x", "eval.chat_template=x: the tokenizer has no chat template"),
        ("d", "x", "eval.chat_template=x: the tokenizer has one template, which has no name"),
        ({"a": "d"}, True, "eval.chat_template=true: the tokenizer has no template of the name default"),
    ],
)
def test_a_missing_template_is_named(known: Any, template: bool | str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chat.select(_tokenizer(known), template)
    assert caught.value.message == message
    assert caught.value.hint


def test_a_template_that_refuses_a_system_prompt_does_not_drop_it(chat_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "strict"
    shutil.copytree(chat_folder, folder)
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}text"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert len(chat.digest(folder, EvalConfig(chat_template=True))) == 64
    with pytest.raises(ConfigError) as caught:
        chat.digest(folder, EvalConfig(chat_template=True, system_prompt="Be brief."))
    assert str(caught.value) == (
        "eval.chat_template=true: the template refuses a system prompt (no system role)\n"
        "hint: eval.system_prompt=null uses none"
    )


def test_the_folder_of_a_tokenizer_without_a_template_is_named(model_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        chat.digest(model_folder, EvalConfig(chat_template=True))
    assert str(caught.value) == (
        f"eval.chat_template=true: the tokenizer has no chat template (tokenizer in {model_folder})\n"
        "hint: eval.chat_template=false asks in plain text"
    )
