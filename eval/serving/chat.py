"""Chat templates of a tokenizer: select the configured one and check that it can be used. Needs no weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from conf.schema import EvalConfig
from eval.serving.model import missing_package
from hlatctl.run.errors import ConfigError, EvaluationError, first_line

_PLAIN = "eval.chat_template=false asks in plain text"


def digest(folder: Path, wanted: EvalConfig) -> str:
    """Return the SHA-256 of the configured chat template, as hex.

    ConfigError: the folder's tokenizer has no such template, or the template takes no system prompt.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise missing_package(error.name) from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds of errors for damaged files
        raise EvaluationError(f"{folder}: its tokenizer can't be loaded ({first_line(error)})") from error
    try:
        select(tokenizer, wanted.chat_template)
    except ConfigError as error:
        raise ConfigError(f"{error.message} (tokenizer in {folder})", hint=error.hint) from None
    _try(tokenizer, wanted)
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def select(tokenizer: Any, template: bool | str) -> None:
    """Make a template the tokenizer's only one, because the harness applies the default one for every name.

    True: the default template. ConfigError: the tokenizer has no such template.
    """
    known = tokenizer.chat_template
    if not known:
        raise ConfigError(f"eval.chat_template={_text(template)}: the tokenizer has no chat template", hint=_PLAIN)
    if isinstance(known, dict):
        name = template if isinstance(template, str) else "default"
        if name not in known:
            raise ConfigError(
                f"eval.chat_template={_text(template)}: the tokenizer has no template of the name {name}",
                hint=f"it has {', '.join(sorted(known))}",
            )
        tokenizer.chat_template = known[name]
    elif isinstance(template, str) and template != "default":
        raise ConfigError(
            f"eval.chat_template={template}: the tokenizer has one template, which has no name",
            hint="eval.chat_template=true uses it",
        )


def _try(tokenizer: Any, wanted: EvalConfig) -> None:
    """Apply the template to a short conversation; the harness silently drops a system prompt that is refused."""
    system = [] if wanted.system_prompt is None else [{"role": "system", "content": wanted.system_prompt}]
    turns = ("user", "assistant", "user") if wanted.fewshot_as_multiturn else ("user",)
    talk = [*system, *({"role": role, "content": "text"} for role in turns)]
    try:
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program; Jinja's errors have many types
        what = "a system prompt" if system and _takes(tokenizer, talk[1:]) else "the conversation"
        raise ConfigError(
            f"eval.chat_template={_text(wanted.chat_template)}: the template refuses {what} ({first_line(error)})",
            hint="eval.system_prompt=null uses none" if what == "a system prompt" else _PLAIN,
        ) from None


def _takes(tokenizer: Any, talk: list[dict[str, str]]) -> bool:
    try:
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    except Exception:
        return False
    return True


def _text(template: bool | str) -> str:
    return template if isinstance(template, str) else str(template).lower()
