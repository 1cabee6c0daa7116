"""Import of a Hugging Face LLaMA: the checkpoint, runs that start from it, and refused folders."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.load import dump, load
from conf.schema import Config, ModelConfig
from hlatctl.run import files
from hlatctl.run.checkpoint import why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError, StorageError
from hlatctl.run.paths import RunPaths
from tests.trainer.conftest import MakeConfig, MakeRun, Ranks
from tests.trainer.convert.test_hugging_face import their_model
from trainer.checkpoint.shards import read_tensors
from trainer.convert.import_model import main as import_model
from trainer.data.loader import Loader
from trainer.data.prepare import prepare
from trainer.model.decoder import Llama

MODEL = ModelConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)


class Local(NamedTuple):
    """What makes a run, trains an attempt in this process, and reads its events by kind."""

    make_run: MakeRun
    train: Callable[[RunPaths, int], int]
    events: Callable[..., list[dict[str, Any]]]


@pytest.fixture
def local(
    make_run: MakeRun, train_here: Callable[[RunPaths, int], int], events_of: Callable[..., list[dict[str, Any]]]
) -> Local:
    return Local(make_run, train_here, events_of)


def save(folder: Path, model: ModelConfig = MODEL, **options: Any) -> Path:
    """Save a random model with transformers and return its folder."""
    their_model(model).save_pretrained(folder, **options)
    return folder


def imported(source: Path, target: Path) -> Path:
    assert import_model(["--from", os.fspath(source), "--to", os.fspath(target)]) == 0
    return target


def change(path: Path, **values: Any) -> None:
    files.write_json(path, files.read_json(path) | values)


def model_keys(folder: Path) -> dict[str, Any]:
    keys: dict[str, Any] = files.read_json(folder / "model.json")
    return keys


def first_batch(run: RunPaths) -> tuple[Tensor, Tensor]:
    loader = Loader(load(run.config), files.read_json(run.dataset), rank=0, size=1)
    batch = loader.next()
    loader.close()
    return batch


def their_loss(folder: Path, batch: tuple[Tensor, Tensor]) -> float:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(batch[0]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_imported_weights_are_a_valid_checkpoint_of_the_same_values(
    tmp_path: Path, tied: bool, shard_size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(MODEL, tie_embeddings=tied)
    source = save(tmp_path / "hf", model, max_shard_size=shard_size)
    assert (source / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    target = imported(source, tmp_path / "ours")
    assert why_invalid(target, of_run=False) is None
    assert model_keys(target) == asdict(replace(model, name="hf", initializer_range=ModelConfig().initializer_range))
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    weights = read_tensors(target, lambda name: True)
    assert written["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert (written["dtypes"], written["tokenizer"]) == (["float32"], None)
    theirs = their_model(model).state_dict()
    assert torch.equal(weights["model.embedding.weight"], theirs["model.embed_tokens.weight"])
    assert ("model.head.weight" in weights) is not tied


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "llama3", "rope_scaling_factor": 32.0, "rope_original_seq_len": 32, "rope_theta": 5e5},
        {"qk_norm": "head", "head_dim": 12, "rms_norm_eps": 1e-6},
        {"qk_norm": "all", "norm_position": "post"},
    ],
    ids=["llama3", "qwen3", "olmo2"],
)
def test_a_folder_that_transformers_wrote_has_its_familys_keys_and_weights(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = replace(MODEL, **changes)
    target = imported(save(tmp_path / "hf", model), tmp_path / "ours")
    assert model_keys(target) == asdict(replace(model, name="hf", initializer_range=ModelConfig().initializer_range))
    names = [f"model.{name}" for name, _ in Llama(model, 2).named_parameters()]
    assert sorted(read_tensors(target, lambda name: True)) == sorted(names)


def test_run_starts_from_imported_weights_in_any_precision(tmp_path: Path, local: Local) -> None:
    source = save(tmp_path / "hf")
    target = imported(source, tmp_path / "ours")
    run = local.make_run(tmp_path / "fp32", train={"init_from": os.fspath(target), "max_steps": 10})
    assert local.train(run, 1) == 0
    losses = [event["loss"] for event in local.events(run, "step")]
    assert losses[0] == pytest.approx(their_loss(source, first_batch(run)), abs=1e-5)
    assert local.events(run, "initial_weights")[0]["path"] == os.fspath(target)
    assert local.events(run, "train_started")[0]["resumed_from_step"] == 0
    for precision, tolerance in (("bf16_sr", 2e-2), ("mixed", 2e-2)):
        rounded = local.make_run(
            tmp_path / precision, precision={"name": precision}, train={"init_from": os.fspath(target), "max_steps": 1}
        )
        assert local.train(rounded, 1) == 0
        assert local.events(rounded, "step")[0]["loss"] == pytest.approx(losses[0], abs=tolerance)


def test_bfloat16_weights_are_kept_and_trained_in_float32(tmp_path: Path, local: Local) -> None:
    their_model(MODEL).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    target = imported(tmp_path / "hf", tmp_path / "ours")
    assert {tensor.dtype for tensor in read_tensors(target, lambda name: True).values()} == {torch.bfloat16}
    run = local.make_run(tmp_path / "run", train={"init_from": os.fspath(target), "max_steps": 1})
    assert local.train(run, 1) == 0
    exact = tmp_path / "exact"
    their_model(MODEL).to(torch.bfloat16).float().save_pretrained(exact)
    assert local.events(run, "step")[0]["loss"] == pytest.approx(their_loss(exact, first_batch(run)), abs=1e-5)


def test_run_resumes_from_its_own_checkpoint_without_the_initial_weights(tmp_path: Path, local: Local) -> None:
    target = imported(save(tmp_path / "hf"), tmp_path / "ours")
    run = local.make_run(tmp_path / "run", train={"init_from": os.fspath(target), "max_steps": 8})
    assert local.train(run, 1) == 0
    shutil.rmtree(target)
    longer = load(run.config)
    files.write_text(run.config, dump(replace(longer, train=replace(longer.train, max_steps=9))))
    assert local.train(run, 2) == 0
    assert local.events(run, "train_started", 2)[0]["resumed_from_step"] == 8
    assert not local.events(run, "initial_weights", 2)


def test_run_takes_only_the_weights_of_another_run_s_checkpoint(tmp_path: Path, local: Local) -> None:
    first = local.make_run(tmp_path / "first", train={"max_steps": 8})
    assert local.train(first, 1) == 0
    second = local.make_run(tmp_path / "second", train={"init_from": os.fspath(first.checkpoint(8)), "max_steps": 2})
    assert local.train(second, 1) == 0
    start, began = local.events(first, "step")[-1]["loss"], local.events(second, "step")[0]
    assert began["step"] == 1
    assert began["loss"] < start
    assert began["lr"] == local.events(first, "step")[0]["lr"]


@pytest.mark.processes
def test_every_layout_starts_from_the_same_weights(tmp_path: Path, local: Local, ranks: Ranks) -> None:
    source = save(tmp_path / "hf")
    target = imported(source, tmp_path / "ours")
    layouts: dict[str, dict[str, Any]] = {
        "dp": {},
        "fsdp": {"data_parallel": "fsdp"},
        "tp": {"tensor_parallel_size": 2},
        "pp": {"pipeline_parallel_size": 2},
    }
    runs = [
        local.make_run(
            tmp_path / name,
            parallel=parallel,
            cluster={"processes_per_node": 2},
            train={"init_from": os.fspath(target), "max_steps": 1, "micro_batch_size": 1},
        )
        for name, parallel in layouts.items()
    ]
    ranks(2, [{"work": "train", "run": os.fspath(run.root), "attempt": 1} for run in runs])
    expected = their_loss(source, first_batch(runs[0]))
    for run in runs:
        assert local.events(run, "step")[0]["loss"] == pytest.approx(expected, abs=1e-5), run.root.name


def stories(path: Path) -> Path:
    """Write short stories like those of the pretrained model's training data, drawn from a small grammar."""
    draw = random.Random(0)
    rows = []
    for _ in range(400):
        name, friend = draw.sample(["Lily", "Tom", "Ben", "Mia", "Sue", "Max"], 2)
        thing, place = (
            draw.choice(["ball", "doll", "kite", "toy car", "book"]),
            draw.choice(["park", "garden", "house"]),
        )
        feeling, animal = draw.choice(["happy", "sad", "scared"]), draw.choice(["dog", "cat", "bird"])
        rows.append(
            f"Once upon a time, there was a little child named {name}. {name} loved to play with a {thing} in the "
            f"{place}. One day, {name} saw a big {animal}. The {animal} was very {feeling}. {name} and {friend} wanted "
            f'to help. "Do not be {feeling}," said {friend}. They gave the {thing} to the {animal}. '
            f"They all played together and {draw.choice(['smiled', 'laughed', 'ran home'])}. The end."
        )
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def test_pretrained_stories_model_continues_training_from_its_own_loss(
    tmp_path: Path, real_data: Path, make_config: MakeConfig, local: Local
) -> None:
    source = real_data / "weights" / "stories260K"
    target = imported(source, tmp_path / "stories")
    config: Config = make_config(
        model=model_keys(target),
        data={"path": os.fspath(stories(tmp_path / "stories.jsonl"))},
        tokenizer={"path": os.fspath(target / "tokenizer")},
        optimizer={"lr": 1e-3, "warmup_steps": 2},
        train={"init_from": os.fspath(target), "seq_len": 128, "max_steps": 30, "tokens": 10**6},
    )
    prepare(config, tmp_path / "data")
    run = RunPaths(tmp_path / "run")
    files.write_text(run.config, dump(config))
    files.write_text(run.dataset, (tmp_path / "data" / "dataset.json").read_text(encoding="utf-8"))
    assert local.train(run, 1) == 0
    losses = [event["loss"] for event in local.events(run, "step")]
    assert losses[0] == pytest.approx(their_loss(source, first_batch(run)), abs=1e-4)
    assert losses[0] < math.log(512) / 2
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3


def without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def truncate(folder: Path, name: str = "model.safetensors") -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    without(folder, "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def drop_tensor(folder: Path, *, name: str = "model.layers.1.mlp.up_proj.weight", put: Tensor | None = None) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights = {key: tensor for key, tensor in weights.items() if key != name} | ({} if put is None else {name: put})
    save_file(weights, folder / "model.safetensors")


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: shutil.rmtree(folder), r"hf: no such folder"),
    (lambda folder: without(folder, "config.json"), r"hf/config\.json: no such file"),
    (lambda folder: truncate(folder, "config.json"), r"hf/config\.json: not readable as JSON"),
    (lambda folder: change(folder / "config.json", model_type="mixtral"), r"model_type='mixtral': not supported"),
    (lambda folder: without(folder, "model.safetensors"), r"hf: has neither model\.safetensors nor model\.safeten"),
    (pickled, r"has only pickled weights \(pytorch_model\.bin\); pickles can run code and are never loaded"),
    (truncate, r"hf/model\.safetensors: not readable as safetensors"),
    (drop_tensor, r"hf: 1 of 21 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"),
    (
        lambda folder: drop_tensor(folder, put=torch.zeros(3, 5)),
        r"up_proj\.weight has shape \(3, 5\), config\.json requires \(64, 32\)",
    ),
    (
        lambda folder: drop_tensor(folder, put=torch.zeros(64, 32, dtype=torch.int8)),
        r"up_proj\.weight is torch\.int8: not supported",
    ),
    (
        lambda folder: drop_tensor(folder, name="model.layers.0.self_attn.q_proj.bias", put=torch.zeros(32)),
        r"has weights that its config\.json doesn't describe: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    (
        lambda folder: files.write_json(
            folder / "model.safetensors.index.json", {"weight_map": {"a": "../secret.safetensors"}}
        ),
        r"weight_map must name files of the folder, not \.\./secret\.safetensors",
    ),
    (
        lambda folder: files.write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "gone"}}),
        r"index\.json: files are missing: gone",
    ),
]


#: Values of config.json that no model has, and what is said of them.
ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, r"config\.json: describes \d+ parameters, which need at least .* TiB, but"),
    ({"vocab_size": 2**63 - 1}, r"describes \d+ parameters"),
    ({"head_dim": 2**40}, r"describes \d+ parameters"),
    ({"hidden_size": 2**63}, r"config\.json: hidden_size=9223372036854775808: must be at most"),
    ({"hidden_size": "32"}, r"config\.json: hidden_size='32': must be a whole number"),
    ({"num_attention_heads": 0}, r"config\.json: num_attention_heads=0: must be greater than 0"),
    ({"head_dim": 0}, r"config\.json: head_dim=0: must be greater than 0"),
    ({"num_key_value_heads": []}, r"config\.json: num_key_value_heads=\[\]: must be a whole number"),
    ({"rms_norm_eps": math.nan}, r"config\.json: rms_norm_eps=nan: must be a finite number"),
    ({"rms_norm_eps": -1}, r"config\.json: rms_norm_eps=-1(\.0)?: must be greater than 0"),
    ({"rope_scaling": 8}, r"config\.json: rope_scaling=8: is int, must be an object"),
    ({"rope_parameters": ["llama3"]}, r"config\.json: rope_parameters=\['llama3'\]: is list, must be an object"),
    ({"rope_parameters": {"rope_theta": -5}}, r"config\.json: rope_theta=-5(\.0)?: must be greater than 0"),
    ({"layer_types": 3}, r"config\.json: layer_types=3: is int, must be a list"),
    ({"tie_word_embeddings": "yes"}, r"config\.json: tie_word_embeddings='yes': must be true or false"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "hf")


@pytest.mark.parametrize(("damage", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_unusable_folder_is_refused_and_nothing_is_created(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(saved, source)
    damage(source)
    with pytest.raises(CheckpointError, match=says):
        imported(source, tmp_path / "ours")
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}


@pytest.mark.parametrize(("values", "says"), ABSURD, ids=[str(values) for values, _ in ABSURD])
def test_a_config_that_describes_no_model_is_refused_with_a_hint_before_anything_of_its_size_is_made(
    saved: Path, tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    source = tmp_path / "hf"
    shutil.copytree(saved, source)
    change(source / "config.json", **values)
    with pytest.raises(CheckpointError, match=says) as refused:
        imported(source, tmp_path / "ours")
    assert refused.value.hint
    assert not (tmp_path / "ours").exists()


def test_an_index_that_names_no_files_is_refused(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(saved, source)
    for weight_map in ({}, {"a": ["model.safetensors"]}, {"a": 7}, 3):
        files.write_json(source / "model.safetensors.index.json", {"weight_map": weight_map})
        with pytest.raises(CheckpointError, match=r"index\.json: (weight_map must name files|files are missing)"):
            imported(source, tmp_path / "ours")


def test_existing_folder_is_not_changed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(StorageError, match=r"--to=.*: exists and is not an empty folder"):
        imported(saved, tmp_path)


def test_weights_of_another_model_are_refused(saved: Path, tmp_path: Path, local: Local) -> None:
    target = imported(saved, tmp_path / "ours")
    run = local.make_run(tmp_path / "run", train={"init_from": os.fspath(target)}, model={"rope_theta": 5e5})
    with pytest.raises(ConfigError, match=r"model\.rope_theta=500000\.0 \(the weights: 10000\.0\)"):
        local.train(run, 1)
    shard = next(target.glob("*.safetensors"))
    shard.write_bytes(bytes([*shard.read_bytes()[:-1], 77]))
    run = local.make_run(tmp_path / "other", train={"init_from": os.fspath(target)})
    with pytest.raises(CheckpointError, match=rf"train\.init_from=.*ours: {shard.name}: checksum differs"):
        local.train(run, 1)
