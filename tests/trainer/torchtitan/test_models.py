"""torchtitan's models by name: their counts and shapes, and modules that can't be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema import Config, EvalConfig, ModelConfig
from conf.sizes import flops_per_token, has_shape, parameters
from hlatctl.run.errors import ConfigError, DependencyError, HlatctlError

pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")

from trainer.convert.torchtitan import check_export, counts_of
from trainer.torchtitan.models import model_spec

#: torchtitan's imports use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

_DEEPSEEK_V3 = ModelConfig(
    vocab_size=129_280,
    hidden_size=7168,
    intermediate_size=18_432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    num_experts=256,
    expert_intermediate_size=2048,
    num_shared_experts=1,
    num_dense_layers=3,
)
#: Our shapes, by torchtitan's module and flavor.
_SHAPES: dict[tuple[str, str], str | ModelConfig] = {
    ("llama3", "8B"): "llama3_8b",
    ("qwen3", "1.7B"): "qwen3_1_7b",
    ("qwen3", "8B"): "qwen3_8b",
    ("qwen3", "30B-A3B"): "qwen3_30b_a3b",
    ("deepseek_v3", "16B"): "deepseek_v3_16b",
    ("deepseek_v3", "671B"): _DEEPSEEK_V3,
    ("gpt_oss", "20b"): "gpt_oss_20b",
}


def _named(module: str, flavor: str) -> Config:
    return Config(model=ModelConfig(module=module, flavor=flavor))


@pytest.mark.parametrize(("module", "flavor"), _SHAPES)
def test_torchtitan_gives_the_counts_and_the_shape_of_its_own_models(module: str, flavor: str) -> None:
    known = _SHAPES[module, flavor]
    ours = known if isinstance(known, ModelConfig) else compose([f"model={known}", "backend=torchtitan"]).model
    asked = counts_of(_named(module, flavor))
    theirs = replace(ModelConfig(module=module, flavor=flavor), **asked)
    assert has_shape(theirs)
    for model in (ours, replace(theirs, flops_per_token=None)):  # by the shape's own arithmetic
        assert parameters(model).total == asked["total_parameters"]
        assert parameters(model).active == asked["active_parameters"]
        assert flops_per_token(model, 4096) == flops_per_token(theirs, 4096)
    assert (theirs.head_width, theirs.num_kv_heads) == (ours.head_width, ours.num_kv_heads)


_COUNTED = """
from torchtitan.models.llama3 import model_registry as llama


class Model:
    vocab_size = 77
    enable_weight_tying = False

    def build(self):
        import types, torch
        return types.SimpleNamespace(tok_embeddings=torch.nn.Embedding(77, 10))

    def get_nparams_and_flops(self, model, seq_len):
        assert model.tok_embeddings.weight.is_meta
        return {counts}


def model_registry(flavor):
    import types
    if flavor == "tiny":
        return llama("debugmodel")
    return {{"own": types.SimpleNamespace(model=Model())}}[flavor]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a package whose source is the parameter."""
    name = f"lab{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "models.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}.models"


@pytest.mark.parametrize("package", [_COUNTED.format(counts="(5_000, 6 * 4_000 + 12 * seq_len)")], indirect=True)
def test_a_model_of_another_package_is_counted_by_its_own_code(package: str) -> None:
    assert counts_of(_named(package, "tiny"))["hidden_size"] == 256
    assert counts_of(_named(package, "own")) == {
        "total_parameters": 5_000,
        "active_parameters": 4_770,
        "flops_per_token": 24_000,
        "score_flops_per_token": 12,
        "vocab_size": 77,
    }
    with pytest.raises(ConfigError, match=r"model\.flavor=none: lab\d+\.models has no such model"):
        counts_of(_named(package, "none"))


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("1 / 0", r"model\.module=lab\d+\.models .*: importing it fails \(ZeroDivisionError: division by zero\)"),
        ("raise SystemExit(0)", r"importing it fails \(SystemExit: 0\)"),
        ("def f(:", r"importing it fails \(SyntaxError"),
        ("import a_package_that_nobody_has", r"it imports a_package_that_nobody_has, which is not installed"),
        ("", "it has no function model_registry"),
        ("def model_registry(flavor): return {}[0]", r"model_registry fails \(KeyError: 0\)"),
        ("def model_registry(): pass", r"model_registry fails \(TypeError"),
        ("def model_registry(flavor): return None", r"model_registry fails \(AttributeError"),
        ("import types\ndef model_registry(flavor): return types.SimpleNamespace(model=1)", "no language model"),
        (_COUNTED.format(counts="1 / 0"), r"its model can't be counted \(ZeroDivisionError"),
        (_COUNTED.format(counts="(0, 0)"), r"its model can't be counted \(ValueError: get_nparams_and_flops gives"),
        (_COUNTED.format(counts="7"), r"its model can't be counted \(TypeError"),
    ],
    indirect=["package"],
)
def test_a_module_that_can_not_be_used_is_an_error_with_the_reason(package: str, message: str) -> None:
    with pytest.raises(HlatctlError, match=message) as caught:
        counts_of(_named(package, "own"))
    assert isinstance(caught.value, ConfigError | DependencyError)
    assert caught.value.hint


def test_a_model_that_transformers_does_not_have_is_refused_if_milestones_are_evaluated() -> None:
    config = _named("deepseek_v3", "debugmodel")
    spec = model_spec(config)
    check_export(config, spec)
    for layer in spec.model.layers[1:]:
        layer.moe.router.route_norm = True
    with pytest.raises(
        ConfigError, match=r"eval\.enabled=true: no checkpoint .*: router\.route_norm=True: transformers has"
    ):
        check_export(config, spec)
    spec.name = "labs_own"
    with pytest.raises(ConfigError, match=r"labs_own: its config\.json is not known here") as caught:
        check_export(config, spec)
    assert "eval.enabled=false" in caught.value.hint
    check_export(replace(config, eval=EvalConfig(enabled=False)), spec)


@pytest.mark.parametrize(
    ("module", "flavor", "message", "hint"),
    [
        ("deepseek_v4", "16B", "model.module=deepseek_v4: there is no module torchtitan", "deepseek_v3"),
        ("deepseek_v3", "17B", "model.flavor=17B: deepseek_v3 has no such model", "debugmodel, 16B, 236B, 671B"),
        (".models", "16B", "importing it fails (TypeError", ""),
        ("nobody.has.this", "16B", "there is no module nobody.has.this", ""),
    ],
)
def test_a_wrong_name_is_an_error_that_names_others(module: str, flavor: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_spec(_named(module, flavor))
    assert message in caught.value.message
    assert hint in caught.value.hint
