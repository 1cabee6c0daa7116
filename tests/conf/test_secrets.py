"""Secrets in a configuration are refused before anything is written, and are not repeated."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from conf.compose import compose, override_eval
from conf.environment import collisions
from conf.schema import Config
from hlatctl.run.errors import ConfigError

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"+backend.env.HTTPS_PROXY=http://u:{SECRET}@h", "backend.env.HTTPS_PROXY: contains an address with a user"),
        (f"+backend.env.MY_PAT={SECRET}", "backend.env.MY_PAT: has the name of a secret"),
        (f"+backend.env.githubToken={SECRET}", "backend.env.githubToken: has the name of a secret"),
        (f"+backend.env={{MY_PAT: {SECRET}}}", "backend.env.MY_PAT: has the name of a secret"),
        (f"+backend.env.A=hf_{SECRET * 3}", "backend.env.A: contains an access token or private key"),
        (
            f"'tracking.mlflow_uri=postgresql://h/db?password={SECRET}'",
            "tracking.mlflow_uri: contains an address with a",
        ),
        (f"tracking.mlflow_uri=https://me:{SECRET}@host/x", "tracking.mlflow_uri: contains an address with a user"),
        (f"tracking.mlflow_uri=http://{SECRET}@h", "tracking.mlflow_uri: contains an address with a user"),
        (f"data.sources=[{{path:/a}},{{path:'http://{SECRET}@h'}}]", "data.sources: contains an address"),
        (f"backend.compiler_flags=[--log=http://x:{SECRET}@h]", "backend.compiler_flags: contains an address"),
        ("tracking.mlflow_uri=${oc.env:A_SECRET}", "tracking.mlflow_uri: reads the environment variable A_SECRET"),
        ("experiment_name=a${oc.env:A_SECRET,none}", "experiment_name: reads the environment variable A_SECRET"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(override: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)
    with pytest.raises(ConfigError) as caught:
        compose([override.strip("'") if override.startswith("'") else override])
    assert str(caught.value).startswith(message)
    assert "hint: " in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_secret_that_a_later_override_replaces_is_refused_too_as_the_command_line_is_kept() -> None:
    with pytest.raises(ConfigError, match=r"tracking\.mlflow_uri: contains an address with a user name or password"):
        compose([f"tracking.mlflow_uri=http://me:{SECRET}@h", "tracking.mlflow_uri=null"])


def test_a_secret_for_a_runs_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.data_dir: contains an address"):
        override_eval(Config(), [f"eval.data_dir=http://{SECRET}@h"])


@pytest.mark.parametrize(
    "override",
    [
        "+backend.env.TOKENIZERS_PARALLELISM='false'",
        "+backend.env.MAX_TOKENS='5'",
        "+backend.env.HF_TOKEN_PATH=/a/b",
        "+backend.env.HTTPS_PROXY=http://proxy:3128",
        "+backend.env.HF_TOKEN=null",
        "tracking.mlflow_uri=sqlite:////a/b.db",
        "tracking.mlflow_uri=http://h:5000",
        "data.path=/data/me@work",
    ],
)
def test_what_only_resembles_a_secret_is_accepted(override: str) -> None:
    compose([override])


def test_the_runs_folder_still_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", "/from/the/environment")
    assert compose([]).runs_dir == "/from/the/environment"


def test_a_variable_that_a_run_unsets_is_reported_without_its_secret() -> None:
    config = compose(["+backend.env.HF_TOKEN=null", "+backend.env.HTTPS_PROXY=http://proxy:3128"])
    around = {"HF_TOKEN": SECRET, "HTTPS_PROXY": f"http://u:{SECRET}@other"}
    assert [collision.present for collision in collisions(config, around)] == ["***", "http://***@other"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment_name=env", "tokenizer.path='${oc.${experiment_name}:MY_VALUE}'"],
        ["experiment_name=oc.env", "tokenizer.path='${${experiment_name}:MY_VALUE}'"],
        [
            "data.text_column=data_dir",
            "eval.data_dir=oc.env",
            "tokenizer.path='${${eval.${data.text_column}}:MY_VALUE}'",
        ],
        ["tokenizer.path='${oc.decode:${oc.env:MY_VALUE}}'"],
        ["tokenizer.path='${oc.decode:\"\\${oc.env:MY_VALUE}\"}'"],
        ["tokenizer.path='${ oc.env : MY_VALUE }'"],
        ["tokenizer.path='${oc.select:nothing,${oc.env:MY_VALUE}}'"],
        ["tokenizer.path='${oc.create:{a: 1}}'"],
        ["tokenizer.path='${hydra:runtime.cwd}'"],
    ],
)
def test_a_configuration_calls_only_the_functions_of_a_short_list(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_VALUE", "leaked")
    refused = r"tokenizer\.path: (reads the environment variable|\$\{[a-z.]+:\.\.\.\} is not available)"
    with pytest.raises(ConfigError, match=refused) as error:
        compose(overrides)
    assert "leaked" not in str(error.value)


def test_an_escaped_reference_stays_text_also_when_a_run_s_configuration_is_composed_again() -> None:
    composed = compose(["tokenizer.path='\\${oc.env:HOME}'"])
    assert str(composed.tokenizer.path).endswith("/${oc.env:HOME}")
    with pytest.raises(ConfigError, match="reads the environment variable HOME"):
        override_eval(composed, ["eval.limit=1"])


def test_the_functions_of_omegaconf_are_there_again_after_a_composition() -> None:
    compose([])
    assert OmegaConf.has_resolver("oc.env")
    assert not OmegaConf.has_resolver("local_processes")
