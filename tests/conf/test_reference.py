from __future__ import annotations

import pytest

from conf.load import flatten
from conf.reference import Key, keys
from conf.schema import Config
from hlatctl.run.errors import ConfigError


def key(name: str) -> Key:
    (found,) = (key for key in keys() if key.name == name)
    return found


def test_every_key_of_a_configuration_is_there_with_its_default_and_a_meaning() -> None:
    known = {key.name: key for key in keys()}
    for name, default in flatten(Config()).items():
        assert known[name].default == default
    assert [name for name, key in known.items() if not key.meaning.endswith((".", "`."))] == []


@pytest.mark.parametrize(
    ("name", "accepts"),
    [
        ("train.seq_len", "whole number greater than 0"),
        ("optimizer.min_lr_fraction", "number at least 0 and at most 1"),
        ("optimizer.schedule", "cosine, linear or wsd"),
        ("sweep.sampler", "grid, random, tpe or null"),
        ("data.path", "text or null"),
        ("data.skip_steps", "list of whole numbers or text"),
        ("eval.groups", "mapping of names to groups"),
        ("eval.enabled", "true or false"),
        ("cluster.kubernetes.patch", "mapping of names to any values"),
    ],
)
def test_types_and_rules_are_in_words(name: str, accepts: str) -> None:
    assert key(name).accepts == accepts


def test_keys_of_a_lists_entries_show_their_place() -> None:
    assert key("data.sources[].weight").default == 1.0
    assert key("eval.groups.NAME.shots").accepts == "whole number at least 0 or null"


def test_a_pattern_is_a_part_of_the_name_or_a_shell_pattern_of_all_of_it() -> None:
    assert [key.name for key in keys("warmup")] == ["optimizer.warmup_steps", "optimizer.warmup_tokens"]
    assert [key.name for key in keys("optimizer.beta?")] == ["optimizer.beta1", "optimizer.beta2"]


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"optimiser\.lr: no key") as refused:
        keys("optimiser.lr")
    assert refused.value.hint == "did you mean optimizer.lr?"
