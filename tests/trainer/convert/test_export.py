"""Export to Hugging Face: equal logits, atomic, and existing folders are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conf.load import load
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, DataError, StorageError
from hlatctl.run.model_folder import read_link
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import TrainRun
from trainer.checkpoint.shards import read_tensors
from trainer.convert import export as module
from trainer.convert.export import main as export
from trainer.convert.export import read_weights
from trainer.convert.hugging_face import Parts
from trainer.convert.serve import open_weights, take
from trainer.model.decoder import Llama


def arguments(run: RunPaths, target: Path, *more: str) -> list[str]:
    return ["--run-dir", os.fspath(run.root), "--to", os.fspath(target), *more]


def test_exported_model_gives_the_same_logits_in_transformers(
    trained: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "hf"
    assert export(arguments(trained, target)) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {
        "step": 24,
        "tokens": 24 * 4 * 32,
        "to": os.fspath(target),
        "parameters": 51_360,
        "dtype": "float32",
        "bytes": 4 * 51_360,
        "left_out": [],
    }

    ours = Llama(load(trained.config).model, 32)
    ours.load_state_dict(read_weights(trained, 24))
    theirs = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokens = torch.tensor([tokenizer("def heappush(heap, item):\n    heap.append(item)")["input_ids"]])
    assert theirs.config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        torch.testing.assert_close(F.linear(ours(tokens), ours.output_weight), theirs(tokens).logits, atol=1e-5, rtol=0)


def test_the_average_of_the_weights_is_exported_like_the_weights(
    trained: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    assert export(arguments(trained, tmp_path / "hf", "--weights", "ema", "--link", "also")) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 51_360
    stored = read_tensors(trained.checkpoint(24), lambda name: name.endswith("embedding.weight"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(exported, stored["ema.embedding.weight"])
    assert not torch.equal(exported, stored["model.embedding.weight"])
    link = read_link(tmp_path / "hf")
    assert link is not None
    assert link.weights == "ema"
    served = take(Parts.of(open_weights(trained, 24, link.manifest_sha256, "ema")), "model.embed_tokens.weight", [])
    assert torch.equal(served, exported)


def test_a_run_without_an_average_exports_none(train_run: TrainRun, tmp_path: Path) -> None:
    run = train_run(train={"max_steps": 1})
    with pytest.raises(CheckpointError, match="has no average of its weights"):
        export(arguments(run, tmp_path / "hf", "--weights", "ema"))
    assert not (tmp_path / "hf").exists()


def test_large_model_is_written_in_several_files_that_transformers_reads(
    trained: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    export(arguments(trained, tmp_path / "one"))
    monkeypatch.setattr(module, "_SHARD_BYTES", 80_000)
    export(arguments(trained, tmp_path / "several"))
    shards = sorted((tmp_path / "several").glob("model-*.safetensors"))
    assert len(shards) == 3
    assert shards[0].name == "model-00001-of-00003.safetensors"
    assert max(shard.stat().st_size for shard in shards) < 84_000
    one, several = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "several"))
    assert all(torch.equal(tensor, several[name]) for name, tensor in one.items())


def test_weights_can_be_exported_in_another_number_format(trained: RunPaths, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export(arguments(trained, tmp_path / "hf", "--step", "16", "--dtype", "bfloat16"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    expected = read_weights(trained, 16)["embedding.weight"].to(torch.bfloat16)
    assert torch.equal(theirs.state_dict()["model.embed_tokens.weight"], expected)


def test_bfloat16_checkpoint_is_exported_as_it_is_or_as_float32(train_run: TrainRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = train_run(precision={"name": "bf16_sr"}, train={"max_steps": 2})
    export(arguments(run, tmp_path / "as-is"))
    export(arguments(run, tmp_path / "exact", "--dtype", "float32"))
    as_is, exact = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("as-is", "exact"))
    assert (as_is.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    pairs = zip(as_is.parameters(), exact.parameters(), strict=True)
    assert all(torch.equal(rounded.float(), same) for rounded, same in pairs)


def test_damaged_checkpoint_is_skipped_unless_its_step_is_given(
    copied: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = next(copied.checkpoint(24).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    export(arguments(copied, tmp_path / "hf"))
    assert json.loads(capsys.readouterr().out)["step"] == 16
    with pytest.raises(CheckpointError, match=rf"no valid checkpoint \(step 24: {shard.name}: checksum differs\)"):
        export(arguments(copied, tmp_path / "other", "--step", "24"))
    assert not (tmp_path / "other").exists()


def test_step_without_a_checkpoint_is_refused_with_the_steps_that_have_one(trained: RunPaths, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-00000007: no such checkpoint") as caught:
        export(arguments(trained, tmp_path / "hf", "--step", "7"))
    assert caught.value.hint == "steps with a checkpoint: 8, 16, 24"
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_not_changed(trained: RunPaths, tmp_path: Path) -> None:
    mine = tmp_path / "hf" / "mine.txt"
    mine.parent.mkdir()
    export(arguments(trained, mine.parent))  # an empty one is filled
    shutil.rmtree(mine.parent)
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(StorageError, match=r"--to=.*hf: exists and is not an empty folder"):
        export(arguments(trained, mine.parent))
    assert [path.name for path in tmp_path.rglob("*")] == ["hf", "mine.txt"]


def test_missing_tokenizer_and_simulated_checkpoint_are_named(copied: RunPaths, tmp_path: Path) -> None:
    simulated = copied.checkpoint(32)
    simulated.mkdir()
    (simulated / "simulated.json").write_text("{}")
    write_manifest(simulated, step=32, tokens=1, world={})
    with pytest.raises(CheckpointError, match="step-00000032: has no weights") as caught:
        export(arguments(copied, tmp_path / "hf"))
    assert "--dry-run" in caught.value.hint
    dataset = files.read_sealed_json(copied.dataset)
    dataset["tokenizer"]["path"] = "/nowhere"
    files.write_sealed_json(copied.dataset, dataset)
    with pytest.raises(DataError, match="/nowhere: the run's tokenizer is missing"):
        export(arguments(copied, tmp_path / "hf"))
    copied.dataset.unlink()
    with pytest.raises(DataError, match=r"dataset\.json: names no tokenizer"):
        export(arguments(copied, tmp_path / "hf"))
    assert not (tmp_path / "hf").exists()
