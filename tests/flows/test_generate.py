"""What a target means for generating, a checkpoint that is deleted meanwhile, and the conversation with the process."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.load import dump
from conf.sampling import Sampling
from conf.schema import BackendConfig, ClusterConfig, Config, TrainConfig
from flows import generate as flow
from flows.generate import Source, source_of
from flows.runtime.programs import conversation
from flows.targets import FolderTarget, RunTarget
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import (
    CheckpointError,
    ConfigError,
    EvaluationError,
    HlatctlError,
    LaunchError,
    RunNotFoundError,
)
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths

_CONFIG = Config(train=TrainConfig(seq_len=64), backend=BackendConfig(device="cuda"))


def _run(folder: Path, *steps: int, config: Config = _CONFIG) -> RunPaths:
    run = RunPaths(folder / "run")
    run.root.mkdir()
    run.config.write_text(dump(config), encoding="utf-8")
    for step in steps:
        _checkpoint(run, step)
    return run


def _checkpoint(run: RunPaths, step: int) -> None:
    run.checkpoint(step).mkdir(parents=True)
    write_manifest(run.checkpoint(step), step=step, tokens=step, world={})


def _refused(target: Any, **keys: Any) -> HlatctlError:
    with pytest.raises(HlatctlError) as caught:
        source_of(target, **{"step": None, "device": None, **keys})
    assert caught.value.hint
    return caught.value


def test_a_run_generates_on_its_own_device_and_on_the_cpu_at_low_priority_while_it_trains(tmp_path: Path) -> None:
    run = _run(tmp_path, 3, 7)
    source = source_of(RunTarget(run), step=None, device=None)
    assert source == Source(run=run, device="cuda", context_tokens=64)
    with hold_driver(run):
        training = source_of(RunTarget(run), step=3, device=None)
        assert (training.device, training.step, training.yields) == ("cpu", 3, True)
        assert source_of(RunTarget(run), step=None, device="cuda").device == "cuda"
    assert source_of(RunTarget(run, 7, 7), step=None, device=None).step == 7


def test_a_folder_s_own_configuration_limits_the_context(tmp_path: Path) -> None:
    assert source_of(FolderTarget(tmp_path), step=None, device=None) == Source(folder=tmp_path)


def test_what_can_t_generate_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    run = _run(tmp_path)
    error = _refused(RunTarget(run))
    assert isinstance(error, CheckpointError)
    assert error.message == "run run: has no checkpoint yet"
    _checkpoint(run, 3)
    error = _refused(RunTarget(run), step=4)
    assert (error.message, error.hint) == ("--step=4: run run has no such checkpoint", "steps with a checkpoint: 3")
    for target in (FolderTarget(tmp_path), RunTarget(run, 3, 3)):
        assert "--step=4: chooses a checkpoint of a run" in _refused(target, step=4).message
    run.config.write_text(dump(replace(_CONFIG, cluster=ClusterConfig(launcher="simulated"))), encoding="utf-8")
    error = _refused(RunTarget(run))
    assert isinstance(error, ConfigError)
    assert "is simulated" in error.message


class _Deleting:
    """An export during which training writes a checkpoint and deletes the oldest one."""

    def __init__(self, run: RunPaths, times: int) -> None:
        self.run, self.times, self.calls = run, times, 0

    def __call__(self, module: str, *argv: str, yields: bool) -> str:
        assert (module, yields) == ("trainer.convert.export", False)
        self.calls += 1
        if self.calls > self.times:
            return json.dumps({"step": self.calls})
        _checkpoint(self.run, 100 + self.calls)
        raise CheckpointError("was removed while it was read")


@pytest.mark.parametrize(
    ("step", "times", "calls"), [(None, 1, 2), (None, 9, 3), (3, 1, 1)], ids=["newest", "again and again", "chosen"]
)
def test_the_newest_checkpoint_may_be_deleted_during_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, times: int, calls: int
) -> None:
    run = _run(tmp_path, 3)
    deleting = _Deleting(run, times)
    monkeypatch.setattr(flow, "ask", deleting)
    if calls > times:
        assert flow._export(Source(run=run, step=step), run, tmp_path / "to") == {"step": calls}
    else:
        with pytest.raises(CheckpointError, match="was removed"):
            flow._export(Source(run=run, step=step), run, tmp_path / "to")
    assert deleting.calls == calls


def test_an_export_that_fails_again_would_fail_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def ask(*argv: str, yields: bool) -> str:
        calls.append(argv)
        raise CheckpointError("no valid checkpoint")

    monkeypatch.setattr(flow, "ask", ask)
    run = _run(tmp_path, 3)
    with pytest.raises(CheckpointError, match="no valid"):
        flow._export(Source(run=run), run, tmp_path / "to")
    assert len(calls) == 1


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 258 byte tokens and a context of 2,048 tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hf")
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(names),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.mark.processes
def test_a_process_continues_prompts_until_it_is_stopped_and_leaves_nothing(
    hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", os.fspath(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    said: list[str] = []
    with ExitStack() as block:
        model = block.enter_context(flow.opened(Source(folder=hugging_face), needs_device=True, say=said.append))
        assert model.facts["context_tokens"] == 2048
        pieces: list[str] = []
        end = model.generate("abc", Sampling(seed=1, max_new_tokens=30), pieces.append)
        assert ("".join(pieces), len(end["token_ids"])) == (end["text"], 30)
        with pytest.raises(EvaluationError, match=r"has 4,000 tokens; .* context, 2,048 tokens"):
            model.generate("x" * 4000, Sampling(), pieces.append)

        def stop(piece: str) -> None:
            model.stop()

        end = model.generate("abc", Sampling(seed=1, max_new_tokens=2000), stop)
        assert (end["stop"], len(end["token_ids"]) < 2000) == ("stopped", True)
        again: list[str] = []
        model.generate("abc", Sampling(seed=1, max_new_tokens=30), again.append)
        assert again == pieces, "a text that was stopped has no effect on the next"
        assert model.is_running
    assert not model.is_running
    assert list(tmp_path.iterdir()) == []
    assert said == [f"loading {hugging_face} on cpu"]


@pytest.mark.processes
def test_a_process_that_ends_without_an_answer_is_an_error(tmp_path: Path) -> None:
    with conversation("hlatctl.nothing", folder=tmp_path, yields=True) as talk:
        talk.say(hello=1)
        with pytest.raises(LaunchError, match=r"hlatctl\.nothing: ended \(.*No module named"):
            talk.hear()
    arguments = f"--run-dir {tmp_path} --milestone-tokens 1 --step 1 --model here".split()
    with (
        conversation("eval", *arguments, folder=tmp_path, yields=False) as talk,
        pytest.raises(RunNotFoundError, match="is not a run directory"),
    ):
        talk.hear()
