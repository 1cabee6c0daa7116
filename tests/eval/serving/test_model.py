from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.load import dump
from conf.of_run import of_run
from conf.schema import BackendConfig, ClusterConfig, Config, EvalConfig
from eval import milestone, validation
from eval.serving import model
from eval.serving.model import opened_link
from eval.serving.pool import Pool, Settings
from eval.task_runner import Subject
from hlatctl.run import files, processes
from hlatctl.run.errors import CheckpointError, DependencyError, EvaluationError, install
from hlatctl.run.model_folder import LINK, Link, read_link, write_link
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import NODE_NAME_ENV
from tests.sharded_checkpoint import STEP, write_run
from trainer.convert.export import main as export


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


def test_a_package_that_does_not_fit_is_named_by_the_reason_that_transformers_hides(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'. …") from error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(DependencyError, match=r"model's class \(operator torchvision::nms does not exist\)") as caught:
        model.load(model_folder, seq_len=8, device="cpu")
    assert "pip uninstall torchvision torchaudio torchcodec" in str(caught.value.hint)


def test_the_context_is_the_shorter_of_the_models_and_the_trainings(model_folder: Path) -> None:
    assert model.load(model_folder, seq_len=64, device="cpu").max_length == 64
    assert model.load(model_folder, seq_len=9999, device="cpu").max_length == 256


def test_a_missing_package_names_the_extra(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DependencyError) as caught:
        model.load(model_folder, seq_len=8, device="cpu")
    assert str(caught.value) == f"the package transformers is not installed\nhint: {install('eval')}"


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


_SUBJECT: dict[str, Any] = {"milestone_tokens": 1000, "step": STEP, "weights": "of the manifest"}


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    shutil.copytree(model_folder, tokenizer, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (tokenizer / "generation_config.json").write_text('{"repetition_penalty": 1.5, "eos_token_id": 1}')
    return write_run(tmp_path_factory.mktemp("linked") / "run", tokenizer, bfloat16=True)


@pytest.fixture(scope="module")
def exported(run: RunPaths) -> Path:
    return _written(run, "exported")


@pytest.fixture(scope="module")
def linked(run: RunPaths) -> Path:
    return _written(run, "linked", "--link", "only")


def _written(run: RunPaths, name: str, *flags: str) -> Path:
    folder = run.root / name
    assert export(["--run-dir", os.fspath(run.root), "--step", str(STEP), "--to", os.fspath(folder), *flags]) == 0
    return folder


def _load(folder: Path, **keys: Any) -> model.Loaded:
    return model.load(folder, seq_len=64, device="cpu", **keys)


@pytest.mark.processes
def test_a_linked_folder_has_every_file_but_the_weights(exported: Path, linked: Path) -> None:
    files = {path.name for path in exported.iterdir()} - {"model.safetensors"}
    assert {path.name for path in linked.iterdir()} == files | {LINK}
    assert all((linked / name).read_bytes() == (exported / name).read_bytes() for name in files)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.processes
def test_a_linked_model_is_the_exported_one_bit_for_bit(exported: Path, linked: Path, dtype: str) -> None:
    ours, theirs = (_load(folder, dtype=dtype) for folder in (linked, exported))
    expected = {**dict(theirs.model.named_parameters()), **dict(theirs.model.named_buffers())}
    found = {**dict(ours.model.named_parameters()), **dict(ours.model.named_buffers())}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in ours.model.parameters()} == {getattr(torch, dtype)}
    assert ours.model.generation_config.to_dict() == theirs.model.generation_config.to_dict()
    described, same = (loaded.model.config.to_dict() for loaded in (ours, theirs))
    assert described | {"_name_or_path": ""} == same | {"_name_or_path": ""}
    assert ours.max_length == theirs.max_length
    ids = torch.arange(48).view(2, 24)
    with torch.no_grad():
        assert torch.equal(ours.model(ids).logits, theirs.model(ids).logits)


@pytest.mark.processes
def test_scores_answers_and_contracts_are_equal_and_nothing_is_measured_twice(
    run: RunPaths, exported: Path, linked: Path, held_out: Path, tmp_path: Path
) -> None:
    stored: list[dict[str, bytes]] = []
    for folder in (exported, linked):
        subject = Subject(run=_run_to_evaluate(run, held_out, tmp_path / folder.name), model_folder=folder, **_SUBJECT)
        milestone.evaluate(subject)
        stored.append(_stored(subject.run))
    assert stored[0] == stored[1]
    assert {"eval/items-smoke_mmlu.parquet", "eval/items-smoke_gsm8k.parquet"} <= stored[0].keys()

    unreadable = tmp_path / "unreadable"
    shutil.copytree(linked, unreadable)
    write_link(unreadable, run_dir=tmp_path / "nowhere", step=STEP, manifest_sha256="")
    milestone.evaluate(replace(subject, run=RunPaths(tmp_path / "exported"), model_folder=unreadable))
    assert _stored(RunPaths(tmp_path / "exported")) == stored[0]

    unbalanced = tmp_path / "unbalanced"
    shutil.copytree(linked, unbalanced)
    of = _link(linked)
    named = ["layers.0.bias"]
    write_link(unbalanced, run_dir=run.root, step=of.step, manifest_sha256=of.manifest_sha256, left_out=named)
    again = replace(subject, run=_run_to_evaluate(run, held_out, tmp_path / "again"), model_folder=unbalanced)
    noted = [files.read_json(path)["notes"] for path in milestone.evaluate(again)]
    assert noted
    assert all("layers.0.bias" in notes[-1] for notes in noted)


def _run_to_evaluate(run: RunPaths, held_out: Path, root: Path) -> RunPaths:
    root.mkdir()
    keys = EvalConfig(limit=2, validation_tokens=200, tasks=["validation", "smoke_mmlu", "smoke_gsm8k"])
    config = replace(of_run(run), eval=keys)
    (root / "config.yaml").write_text(files.seal_lines(dump(config)))
    files.write_sealed_json(root / "dataset.json", {"validation": {"path": os.fspath(held_out)}})
    return RunPaths(root)


def _stored(run: RunPaths) -> dict[str, bytes]:
    """Return scores and continuations without times, and the content of the items' and the contracts' files."""
    folder = run.eval(1000)
    records = [(path.name, files.read_json(path)) for path in sorted(folder.rglob("*.json"))]
    scores = [[name, record.get("scores"), record.get("continuations")] for name, record in records]
    assert any(texts for *_, texts in scores)
    kept = {f"eval/{path.name}": path.read_bytes() for path in folder.rglob("*.parquet")}
    contracts = {path.name: path.read_bytes() for path in run.root.rglob("contract*.json")}
    assert contracts
    return {"scores": json.dumps(scores).encode(), **kept, **contracts}


@pytest.mark.processes
def test_errors_of_the_reader_are_raised_even_if_transformers_only_logs_them(
    run: RunPaths, linked: Path, tmp_path: Path
) -> None:
    copy = RunPaths(Path(shutil.copytree(run.root, tmp_path / "run")))
    link = replace(_link(linked), run_dir=os.fspath(copy.root))

    def lose() -> None:
        with opened_link(link) as source:
            tensors = source.tensors()
            shutil.rmtree(copy.checkpoint(STEP))
            with suppress(CheckpointError):
                tensors["model.norm.weight"][...]

    with pytest.raises(CheckpointError, match=f"{copy.checkpoint(STEP)}: was removed while it was read"):
        lose()


@pytest.mark.processes
def test_a_lost_reader_is_an_error_with_the_next_step(linked: Path) -> None:
    link = _link(linked)

    def lose() -> None:
        with opened_link(link) as source:
            tensors = source.tensors()
            (reader,) = processes.with_words("trainer.convert.serve", "--run-dir", link.run_dir)
            processes.send(reader, signal.SIGKILL)
            tensors["model.norm.weight"][...]

    with pytest.raises(EvaluationError, match="which reads the checkpoint, has ended") as caught:
        lose()
    assert caught.value.hint == "the same command continues"


@pytest.mark.processes
def test_a_shared_copy_reads_its_part_of_the_checkpoint(exported: Path, linked: Path, tmp_path: Path) -> None:
    windows = [list(range(number, number + 24)) for number in range(4)]
    alone = validation.window_losses(_load(exported).model, windows)
    settings = Settings(folder=str(linked), max_length=64, device="cpu", dtype="float32", batch_size=2, processes=2)
    pool = Pool(settings, replicas=1, tensor_parallel_size=2, scratch=tmp_path)
    try:
        assert pool.ask("losses", windows=windows) == pytest.approx(alone, rel=1e-5)
    finally:
        pool.close()


def _link(folder: Path) -> Link:
    link = read_link(folder)
    assert link
    return link
