"""Configurations of other projects become ours, and what could not be carried over is listed. No code is executed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.other_projects import Imported, read
from hlatctl.cli.main import main
from hlatctl.run.errors import ConfigError

TOML = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
"""
PYTHON = """
raise SystemExit("this file is never run")
def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=steps_of(open("/etc/passwd"))),
        activation_checkpoint=SelectiveAC.Config(),
    )
"""
OLMO = {
    "_CLASS_": "ExperimentConfig",
    "model": {
        "d_model": 2048,
        "vocab_size": 100352,
        "n_layers": 16,
        "block": {
            "name": "reordered_norm",
            "sequence_mixer": {"n_heads": 16, "rope": {"theta": 500000}, "qk_norm": {"name": "rms"}},
            "feed_forward": {"hidden_size": 8192, "bias": False},
            "layer_norm": {"eps": 1e-6},
        },
    },
    "dataset": {"sequence_length": 4096},
    "data_loader": {"global_batch_size": 2097152, "num_workers": 4},
    "train_module": {"optim": {"lr": 4e-4, "betas": [0.9, 0.95]}},
    "trainer": {"max_duration": {"value": 1000, "unit": "epochs"}},
}


def imported(path: Path, text: str, name: str | None = None) -> Imported:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = read(path, name)
    assert isinstance(found, Imported)
    return found


def test_torchtitans_toml_is_read(tmp_path: Path) -> None:
    found = imported(tmp_path / "8b.toml", TOML)
    assert found.keys == {
        "model": "torchtitan",
        "backend": "torchtitan",
        "backend.device": "cuda",
        "optimizer.warmup_steps": 200,
        "optimizer.schedule": "linear",
        "optimizer.min_lr_fraction": 0.0,
        "model.module": "llama3",
        "model.flavor": "8B",
        "optimizer": "adamw",
        "optimizer.lr": 3e-4,
        "train.micro_batch_size": 1,
        "train.global_batch_size": 16,
        "train.seq_len": 8192,
        "train.max_steps": 1000,
        "train.tokens": 10**15,
        "parallel.data_parallel": "fsdp",
        "parallel.tensor_parallel_size": 2,
        "parallel.activation_checkpointing": "selective",
    }
    assert found.dropped == ["training.dataset=c4"]


def test_torchtitans_python_is_parsed_and_not_run(tmp_path: Path) -> None:
    found = imported(tmp_path / "llama3" / "config_registry.py", PYTHON, "llama3_8b")
    keys = found.keys
    assert (keys["model.module"], keys["model.flavor"], keys["optimizer.lr"]) == ("llama3", "8B", 3e-4)
    assert keys["parallel.activation_checkpointing"] == "selective"
    assert "train.max_steps" not in keys
    assert "training.steps=steps_of(open('/etc/passwd'))" in found.dropped
    with pytest.raises(ConfigError, match=r"has several configurations\nhint: --name can be llama3_8b"):
        read(tmp_path / "llama3" / "config_registry.py")


def test_olmo_cores_json_is_read(tmp_path: Path) -> None:
    found = imported(tmp_path / "config.json", json.dumps(OLMO))
    keys = found.keys
    assert (keys["model.qk_norm"], keys["model.norm_position"], keys["model.num_kv_heads"]) == ("all", "post", 16)
    assert (keys["train.seq_len"], keys["train.global_batch_size"], keys["optimizer.beta2"]) == (4096, 512, 0.95)
    assert found.dropped == ["data_loader.num_workers=4", "trainer.max_duration.value=1000"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "x = ", "a.toml: can't be read"),
        ("a.json", "[1]", "a.json: is no configuration of torchtitan, OLMo-core or Hugging Face"),
        ("a.json", "[" * 100_000, "a.json: can't be read"),
        ("a.json", " " * (1 << 20) + "{}", "a.json: can't be read (has 1,048,578 bytes, the limit is 1,048,576)"),
        ("a.py", "def f(:", "a.py: can't be read"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_the_result_is_an_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "olmo.json").write_text(json.dumps(OLMO))
    assert main(["config", "import", str(tmp_path / "olmo.json")]) == 0
    text = capsys.readouterr().out
    assert "#   data_loader.num_workers=4\n" in text
    (tmp_path / "olmo").mkdir()
    (tmp_path / "olmo" / "config.json").write_text(json.dumps(OLMO))
    assert main(["config", "import", str(tmp_path / "olmo")]) == 0, "the folder of a config.json"
    assert capsys.readouterr().out == text.replace("olmo.json", "config.json")
    own = tmp_path / "conf" / "experiment"
    own.mkdir(parents=True, mode=0o700)
    (tmp_path / "conf" / "hlatctl.yaml").write_text("")
    (own / "olmo.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "experiment=olmo", "eval.enabled=false", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["model"]["hidden_size"], config["train"]["global_batch_size"]) == (2048, 512)


def test_values_that_can_not_be_ours_are_listed_and_too_deep_files_refused(tmp_path: Path) -> None:
    found = imported(tmp_path / "date.toml", "[training]\nseed = 2026-01-01\n")
    assert (found.dropped[0], "seed" in found.keys) == ("training.seed=2026-01-01", False)
    strange = 'def f():\n    return T(optimizer=Adam(lr=b"x", eps={[]: 1}, beta1={1}, beta2=[1j]))\n'
    found = imported(tmp_path / "strange.py", strange, "f")
    assert not {"optimizer.lr", "optimizer.eps", "optimizer.beta1", "optimizer.beta2"} & found.keys.keys()
    assert main(["config", "import", str(tmp_path / "strange.py"), "--name", "f", "--json"]) == 0
    deep = {"deep.toml": f"a{'.a' * 3000} = 1", "deep.py": f"def f():\n    return {'-' * 100_000}1\n"}
    for name, text in deep.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="can't be read"):
            read(tmp_path / name, "f")
