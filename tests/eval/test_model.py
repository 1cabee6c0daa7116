from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from conf.schema import BackendConfig, ClusterConfig, Config, EvalConfig
from eval import model
from hlatctl.run.errors import DependencyError, EvaluationError
from hlatctl.run.processes import NODE_NAME_ENV


def test_a_missing_folder_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError) as caught:
        model.load(tmp_path / "none", seq_len=8, device="cpu")
    assert str(caught.value) == (
        f"--model={tmp_path / 'none'}: no such folder\n"
        "hint: python -m trainer.convert.export --run-dir RUN --step N --to DIR creates such a folder"
    )


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("config.json", "config.json"),
        ("*.safetensors", "safetensors weights"),
        ("tokenizer_config.json", "tokenizer_config.json"),
    ],
)
def test_an_incomplete_folder_is_refused_by_what_it_lacks(
    tmp_path: Path, model_folder: Path, pattern: str, what: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    for path in folder.glob(pattern):
        path.unlink()
    with pytest.raises(EvaluationError, match=f"is not a Hugging Face model: it has no {what}"):
        model.load(folder, seq_len=8, device="cpu")


def test_pickled_weights_are_never_loaded(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EvaluationError, match="it has no safetensors weights"):
        model.load(folder, seq_len=8, device="cpu")


def test_damaged_weights_are_refused(tmp_path: Path, model_folder: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(EvaluationError, match="can't be loaded"):
        model.load(folder, seq_len=8, device="cpu")


def test_the_context_is_the_shorter_of_the_models_and_the_trainings(model_folder: Path) -> None:
    assert model.load(model_folder, seq_len=64, device="cpu").max_length == 64
    assert model.load(model_folder, seq_len=9999, device="cpu").max_length == 256


def test_a_missing_package_names_the_extra(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DependencyError) as caught:
        model.load(model_folder, seq_len=8, device="cpu")
    assert str(caught.value) == "the package transformers is not installed\nhint: pip install 'hlatctl[eval]'"


def test_the_device_is_the_one_that_is_used_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [model.device_name("cpu"), model.device_name("cuda")] == ["cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert model.device_name("cuda") == "cuda: NVIDIA H200"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_is_loaded_in_the_wanted_number_format(model_folder: Path, dtype: str) -> None:
    loaded = model.load(model_folder, seq_len=8, device="cpu", dtype=dtype)
    assert {str(weight.dtype) for weight in loaded.model.parameters()} == {f"torch.{dtype}"}


def test_the_devices_of_an_evaluation_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    on_node = "PyTorch finds no such device on n7, where the evaluation runs"
    monkeypatch.setenv(NODE_NAME_ENV, "n7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EvaluationError) as caught:
        model.check_devices(Config(eval=EvalConfig(device="cuda")), "cuda")
    assert str(caught.value) == f"eval.device=cuda: {on_node}\nhint: eval.device=cpu evaluates on the CPU"
    training = Config(backend=BackendConfig(device="cuda"), cluster=ClusterConfig(launcher="slurm"))
    with pytest.raises(EvaluationError) as caught:
        model.check_devices(training, training.eval_device)
    assert str(caught.value) == (
        f"backend.device=cuda: {on_node}\nhint: if its job has no device, ask for one with "
        "eval.cluster.extra=['--gpus-per-node=1']; eval.device=cpu evaluates on the CPU"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EvaluationError, match=r"eval\.tensor_parallel_size = 2: there are only 1 dev"):
        model.check_devices(Config(eval=EvalConfig(device="cuda", replicas=2)), "cuda")
    model.check_devices(Config(eval=EvalConfig(replicas=8)), "cpu")


def test_a_described_model_has_a_tokenizer_and_no_weights(model_folder: Path) -> None:
    described = model.describe(model_folder, seq_len=64)
    assert {weight.device.type for weight in described.model.parameters()} == {"meta"}
    assert described.max_length == 64
    assert described.tokenizer.encode("fox") == model.load(model_folder, seq_len=8, device="cpu").tokenizer.encode(
        "fox"
    )


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "vocab.txt"])
def test_a_description_that_would_fill_the_memory_is_refused(tmp_path: Path, model_folder: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    with (folder / name).open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(EvaluationError, match=f"{name}: can't be loaded .has 8,589,934,592 bytes, the limit is"):
        model.load(folder, seq_len=8, device="cpu")
