"""Rules across fields: each error names the field, its value, the rule and the other value, with a hint that works.

Also rules of evaluations, and warnings for keys that have no effect with the value of another key.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose, override_eval
from conf.load import decode, flatten
from conf.reference import keys
from conf.schema import Config, EvalConfig, TrainConfig
from conf.validate import _DEPENDENCES, code_tasks, validate, without_effect
from hlatctl.run.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "key", "needs"),
    [
        ([], "parallel.pipeline_chunks", "parallel.pipeline_schedule=interleaved_1f1b"),
        ([], "parallel.activation_memory_budget", "parallel.activation_checkpointing=budget"),
        ([], "optimizer.momentum", "optimizer=muon"),
        ([], "optimizer.wsd_decay_fraction", "optimizer.schedule=wsd"),
        ([], "train.max_nonfinite_steps", "train.on_nonfinite=skip"),
        ([], "checkpoint.remote_keep", "checkpoint.remote_url=URL"),
        ([], "model.router_scale", "model.num_experts=8 or more"),
        ([], "model.v_head_dim", "model.kv_lora_rank=NUMBER"),
        ([], "model.total_parameters", "model.module=NAME"),
        ([], "backend.torchtitan", "backend=torchtitan"),
        ([], "cluster.slurm.partition", "cluster.launcher=slurm"),
    ],
)
def test_a_key_without_effect_is_named_with_what_it_needs(overrides: list[str], key: str, needs: str) -> None:
    assert without_effect(compose(overrides), [key, key]) == [f"{key}: has no effect without {needs}"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer=muon"], "optimizer.momentum"),
        (
            ["backend=torchtitan", "backend.compile=true", "parallel.activation_checkpointing=budget"],
            "parallel.activation_memory_budget",
        ),
        (["optimizer.schedule=wsd"], "optimizer.wsd_decay_fraction"),
        (["train.on_nonfinite=skip"], "train.max_nonfinite_steps"),
        (["cluster=simulated"], "cluster.slurm.partition"),
        ([], "optimizer.lr"),
    ],
)
def test_a_key_with_an_effect_is_not_named(overrides: list[str], key: str) -> None:
    assert without_effect(compose(overrides), [key]) == []


def test_the_table_names_keys_that_exist() -> None:
    known = {key.name for key in keys()}
    for name in (name for dependence in _DEPENDENCES for name in dependence.keys):
        assert name in known or (name.endswith(".") and any(key.startswith(name) for key in known)), name


def test_each_new_key_reaches_the_configuration() -> None:
    overrides = [
        "eval=hlat_core",
        "eval.limit=0.1",
        "eval.items={gsm8k:[5,1]}",
        "eval.chat_template=tool_use",
        "eval.system_prompt=Answer briefly.",
        "eval.groups.math.generation={do_sample:true,temperature:0.8,top_k:5,until:[END]}",
        "eval.groups.reading={tasks:[boolq]}",
    ]
    wanted = compose(overrides).eval
    assert (wanted.limit, wanted.items, wanted.chat_template) == (0.1, {"gsm8k": [5, 1]}, "tool_use")
    assert wanted.groups["math"].generation == {"do_sample": True, "temperature": 0.8, "top_k": 5, "until": ["END"]}
    assert wanted.groups["math"].tasks == ["gsm8k"]
    assert wanted.groups["reading"].tasks == ["boolq"]
    assert wanted.system_prompt == "Answer briefly."


@pytest.mark.parametrize("limit", ["3", "0.5", "null"])
def test_a_limit_is_a_number_of_items_or_a_fraction_of_them(limit: str) -> None:
    assert compose([f"eval.limit={limit}"]).eval.limit == {"3": 3, "0.5": 0.5, "null": None}[limit]


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("eval.limit=1.0", "eval.limit=1.0: must be a whole number", "eval.limit=null evaluates all items"),
        ("eval.weights=ema", "eval.weights=ema: the run keeps no average", "optimizer.ema_decay=0.999"),
        ("eval.limit=7.5", "eval.limit=7.5: must be a whole number", "eval.limit=7 evaluates 7 items of each task"),
        ("eval.limit=-1", "eval.limit=-1: must be a whole number", "eval.limit=null evaluates all items"),
        ("eval.items={boolq:[]}", "eval.items.boolq=[]: must name an item", "~eval.items.boolq"),
        ("eval.items={boolq:[1,2,1]}", "eval.items.boolq: names item 1 more than once", "list 1 once"),
        ("eval.items={boolq:[-1]}", "eval.items.boolq[0]=-1: must be at least 0", ""),
        ("eval.chat_template=''", "eval.chat_template='': must be true, false or the name", "eval.chat_template=true"),
        ("eval.system_prompt=' '", "eval.system_prompt: is empty", "eval.system_prompt=null"),
        ("eval.include_path=['s3://b/t']", "eval.include_path[0]=s3://b/t: must be a folder", "[FOLDER]"),
        (
            "eval.groups.math.generation={temperature:0.8}",
            "eval.groups.math.generation.temperature=0.8: has no effect without",
            "eval.groups.math.generation.do_sample=true",
        ),
        ("eval.groups.math.generation={temp:1}", "eval.groups.math.generation.temp: unknown key", "temperature"),
        ("eval.groups.math.generation={max_gen_toks:0}", "max_gen_toks=0: must be greater than 0", "~eval.groups"),
        ("eval.groups.math.generation={until:END}", "until=END: must be a list of texts", "~eval.groups"),
        ("eval.groups.math.generation={top_p:1.5,do_sample:true}", "top_p=1.5: must be greater than 0", ""),
        ("eval.groups.math.generation={do_sample:1}", "do_sample=1: must be true or false", ""),
    ],
)
def test_a_wrong_value_is_refused(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["eval=hlat_core", override])
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("wrong", "hinted", "name"),
    [
        ("eval.groups.maht.shots=5", "eval.groups.math", "eval.groups.math.shots=5"),
        ("eval.groups.maht.shots=5", "eval.groups.maht.tasks=[TASK]", "eval.groups.maht.tasks=[piqa]"),
        ("eval.groups.math.tasks=[]", "~eval.groups.math", "~eval.groups.math"),
        ("~eval.groups.maht", "~eval.groups.math", "~eval.groups.math"),
        ("eval.items.boolq=[]", "leave it out", "eval.limit=null"),
        ("~eval.items.boolq", "leave out ~eval.items.boolq", "eval.limit=null"),
        ("eval.groups.math.generation.max_gen_toks=0", "leave it out", "eval.limit=null"),
    ],
)
def test_the_hint_of_a_wrong_name_or_entry_works(wrong: str, hinted: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["eval=hlat_core", wrong])
    assert hinted in caught.value.hint
    compose(["eval=hlat_core", name])


def test_an_entry_that_a_file_sets_is_removed_as_the_hint_says() -> None:
    run = compose(["eval=hlat_core", "eval.items.boolq=[1]"])
    with pytest.raises(ConfigError) as caught:
        override_eval(run, ["eval.items.boolq=[]"])
    assert caught.value.hint == "all items: leave it out, or use ~eval.items.boolq if a file sets it"
    assert override_eval(run, ["~eval.items.boolq"]).eval.items == {}
    with pytest.raises(ConfigError, match=r"~eval.items.bolq: nothing sets it\nhint: did you mean ~eval.items.boolq"):
        override_eval(run, ["~eval.items.bolq"])


def test_the_defaults_ask_as_before() -> None:
    wanted = EvalConfig()
    assert not any((wanted.include_path, wanted.chat_template, wanted.system_prompt, wanted.items))
    assert (wanted.limit, wanted.fewshot_seed) == (None, None)


@pytest.mark.parametrize(
    ("overrides", "tasks"),
    [
        (["eval=smoke"], ["smoke_humaneval"]),
        (["eval=smoke", "eval.tasks=[validation]"], []),
        (["eval=hlat"], ["humaneval"]),
        (["eval=hlat", "eval.tasks=[commonsense]"], []),
        (["eval=hlat", "eval.tasks=[commonsense,mbpp]"], ["mbpp"]),
        (["eval=olmes_tasks"], []),
    ],
)
def test_the_tasks_that_need_a_sandbox_are_known(overrides: list[str], tasks: list[str]) -> None:
    assert code_tasks(compose(overrides).eval) == tasks


def config_with(**dotted: Any) -> Config:
    """The default configuration, changed; keys have ``__`` for the dot."""
    value = dataclasses.asdict(Config())
    for key, item in dotted.items():
        *groups, name = key.split("__")
        place = value
        for group in groups:
            place = place[group]
        place[name] = item
    return decode(value)


def test_the_defaults_are_valid() -> None:
    validate(Config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__global_batch_size": 9, "cluster__processes_per_node": 2},
            "train.global_batch_size=9: not divisible by the data-parallel size=2\n"
            "hint: use a multiple of 2, or change cluster.processes_per_node",
        ),
        (
            {"train__global_batch_size": 8, "train__micro_batch_size": 3},
            "train.global_batch_size=8: not divisible by train.micro_batch_size=3 x data-parallel size 1 = 3\n"
            "hint: use a train.micro_batch_size that divides 8",
        ),
        (
            {"model__hidden_size": 130},
            "model.hidden_size=130: not divisible by model.num_heads=4\nhint: use a multiple of 4",
        ),
        (
            {"model__num_kv_heads": 3},
            "model.num_heads=4: not divisible by model.num_kv_heads=3\nhint: use a multiple of 3",
        ),
        (
            {"model__head_dim": 15},
            "model.head_dim=15: gives heads of width 15 with model.num_heads=4; rotary embeddings need an even width\n"
            "hint: set model.head_dim=16",
        ),
        (
            {"model__qk_norm": "all"},
            "model.qk_norm=all: with model.norm_position=pre no format for exports describes the model\n"
            "hint: set model.norm_position=pre with model.qk_norm=none (LLaMA) or model.qk_norm=head (Qwen 3), or "
            "model.norm_position=post with model.qk_norm=all (OLMo 2)",
        ),
        (
            {"backend__name": "nxd", "backend__device": "cpu", "model__qk_norm": "head"},
            "backend.name=nxd and model.qk_norm=head: can't be combined; its tensor-parallel processes don't exchange "
            "these norms\nhint: change one of them",
        ),
        (
            {"model__rope_scaling": "llama3", "model__rope_low_freq_factor": 4.0},
            "model.rope_low_freq_factor=4: must be below model.rope_high_freq_factor=4\n"
            "hint: Llama 3.1 has model.rope_low_freq_factor=1 model.rope_high_freq_factor=4",
        ),
        (
            {"model__rope_scaling": "yarn", "model__rope_beta_slow": 40.0},
            "model.rope_beta_slow=40: must be below model.rope_beta_fast=32\n"
            "hint: the paper has model.rope_beta_slow=1 model.rope_beta_fast=32",
        ),
        (
            {"model__rope_scaling": "yarn", "model__rope_theta": 1.0},
            "model.rope_theta=1: model.rope_scaling=yarn needs more than 1, so that frequencies differ\n"
            "hint: set model.rope_theta=10000, or that of the checkpoint",
        ),
        (
            {"model__rope_scaling": "yarn", "backend__name": "torchtitan"},
            "backend.name=torchtitan and model.rope_scaling=yarn: can't be combined; torchtitan has llama3 for LLaMA "
            "and latent attention, and yarn for latent attention (DeepSeek-V3) only\n"
            "hint: set backend=torch_native, or extend the context with model.rope_theta",
        ),
        (
            {"experiment_name": "x" * 80},
            f"experiment_name={'x' * 20}…: has 80 characters, must have at most 79, because folders are named after it",
        ),
        (
            {"eval__runner": "vllm", "eval__replicas": 2},
            "eval.replicas=2 and eval.runner=vllm: can't be combined; only hf has this setting\n"
            "hint: change one of them",
        ),
        (
            {"eval__runner": "neuron", "eval__share_prefixes": True},
            "eval.share_prefixes=True and eval.runner=neuron: can't be combined; only hf has this setting\n"
            "hint: change one of them",
        ),
        (
            {"eval__suite": "mine"},
            "eval.suite=mine: is not built in and lists no eval.groups\n"
            "hint: use eval=smoke, eval=early, eval=hlat_core or eval=hlat, or list eval.groups",
        ),
        (
            {"eval__groups": {"math": {"tasks": []}}},
            "eval.groups.math.tasks=[]: must name a task\n"
            "hint: eval.groups.math.tasks=[TASK] names its tasks; ~eval.groups.math removes a group that the suite "
            "has",
        ),
        (
            {"tokenizer__train_vocab_size": 9000},
            "tokenizer.train_vocab_size=9000: does not fit model.vocab_size=8192\n"
            "hint: set model.vocab_size=9000 or more",
        ),
        (
            {"eval__every_tokens": 4095},
            "eval.every_tokens=4095: below the 4096 tokens of one step (train.global_batch_size x train.seq_len)\n"
            "hint: use at least 4096, or eval.enabled=false",
        ),
        (
            {"train__tokens": 4096 * 2000, "eval__every_tokens": 4096},
            "eval.every_tokens=4096: gives 2000 milestones in 8192000 tokens; at most 1000 are allowed",
        ),
        (
            {"checkpoint__keep_every_tokens": 4095},
            "checkpoint.keep_every_tokens=4095: below the 4096 tokens of one step (train.global_batch_size x "
            "train.seq_len)\nhint: use at least 4096",
        ),
        ({"checkpoint__remote_url": "bucket/runs"}, "checkpoint.remote_url=bucket/runs: must be the URL of a folder"),
        ({"checkpoint__fast_dir": "nvme"}, "checkpoint.fast_dir=nvme: must be an absolute path"),
        (
            {"checkpoint__fast_dir": "/nvme", "cluster__nodes": 2},
            "checkpoint.fast_dir=/nvme: with cluster.nodes=2 no node would have all files",
        ),
        (
            {"checkpoint__memory_every_steps": 100},
            "checkpoint.memory_every_steps=100: must be less than checkpoint.every_steps=100",
        ),
        (
            {"checkpoint__memory_every_steps": 10, "cluster__launcher": "kubernetes"},
            "checkpoint.memory_every_steps=10: cluster.launcher=kubernetes keeps nothing in a node's memory between "
            "attempts; these do: local, slurm, simulated\nhint: set checkpoint.memory_every_steps=null",
        ),
        (
            {"checkpoint__memory_every_steps": 10, "backend__name": "nxd"},
            "checkpoint.memory_every_steps=10: backend.name=nxd doesn't read this key",
        ),
        (
            {"checkpoint__memory_every_steps": 10, "cluster__hardware__node_memory_bytes": 1 << 20},
            "checkpoint.memory_every_steps=10: the copies need 69757952 bytes of each node, more than half of "
            "cluster.hardware.node_memory_bytes=1048576",
        ),
        (
            {"tokenizer__path": "hf://org/model"},
            "tokenizer.path=hf://org/model: must be a path, not a URL\n"
            "hint: copy or mount it where every node can read it, and set tokenizer.path to that path",
        ),
        ({"eval__data_dir": "file:///eval"}, "eval.data_dir=file:///eval: must be a path, not a URL"),
        ({"train__init_from": "s3://bucket/step"}, "train.init_from=s3://bucket/step: must be a path, not a URL"),
        (
            {"runs_dir": "s3://bucket/runs"},
            "runs_dir=s3://bucket/runs: must be a path, not a URL\nhint: set runs_dir to a folder",
        ),
        (
            {"cluster__worker_cache_dir": "s3://bucket/cache"},
            "cluster.worker_cache_dir=s3://bucket/cache: must be a path, not a URL",
        ),
        ({"experiment_name": "../x"}, "experiment_name='../x': must be letters"),
        ({"cluster__nodes": 2}, "cluster.nodes=2: cluster.launcher=local runs on this machine only"),
    ],
)
def test_a_broken_rule_names_both_sides(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(**changes))
    assert str(caught.value).startswith(message)


_NXD = {"backend__name": "nxd", "backend__device": "neuron"}
_TITAN = {"backend__name": "torchtitan"}
_MODULE = {"model__module": "gpt_oss", "model__flavor": "20b"}
_MIXTURE = {**_TITAN, "model__num_experts": 8, "model__experts_per_token": 2, "model__qk_norm": "head"}
_LATENT = {"model__kv_lora_rank": 64, "model__qk_norm": "none"}
_FSDP_2 = {"parallel__data_parallel": "fsdp", "parallel__fsdp_size": 2}
_TWO = {"cluster__processes_per_node": 2}
_TP2 = {**_TWO, "parallel__tensor_parallel_size": 2}
_TITAN = {"backend__name": "torchtitan"}
_CP2 = {**_TWO, "parallel__context_parallel_size": 2}
_TP3_SP = {
    "cluster__processes_per_node": 6,
    "parallel__tensor_parallel_size": 3,
    "parallel__sequence_parallel": True,
    "model__num_heads": 6,
    "model__num_kv_heads": 3,
    "model__hidden_size": 96,
    "model__intermediate_size": 96,
    "model__vocab_size": 8193,
}
_PP2 = {**_TWO, "parallel__pipeline_parallel_size": 2, "train__micro_batch_size": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallel__tensor_parallel_size": 2},
            "parallel.tensor_parallel_size=2 x parallel.pipeline_parallel_size=1 = 2: does not divide the 1 processes",
        ),
        (
            {**_TP2, "model__num_heads": 4, "model__num_kv_heads": 1},
            "model.num_kv_heads=1: not divisible by parallel.tensor_parallel_size=2",
        ),
        (
            {**_TP2, "model__vocab_size": 8193},
            "model.vocab_size=8193: not divisible by parallel.tensor_parallel_size=2",
        ),
        ({**_TWO, "parallel__sequence_parallel": True}, "parallel.sequence_parallel=true: splits the sequence over"),
        (
            {**_TP2, "parallel__sequence_parallel": True, "train__seq_len": 513},
            "train.seq_len=513: not divisible by parallel.tensor_parallel_size=2",
        ),
        (
            {**_PP2, "train__micro_batch_size": 8},
            "parallel.pipeline_parallel_size=2: needs at least 2 micro-batches per step, but there are 1",
        ),
        (
            {**_PP2, **_TITAN, "parallel__pipeline_schedule": "interleaved_1f1b", "parallel__pipeline_chunks": 9},
            "parallel.pipeline_chunks=9 are more stages than model.num_layers=",
        ),
        (
            {**_TITAN, "parallel__pipeline_schedule": "interleaved_1f1b"},
            "parallel.pipeline_schedule=interleaved_1f1b: needs several pipeline-parallel processes, but "
            "parallel.pipeline_parallel_size=1\nhint: set parallel.pipeline_schedule=1f1b",
        ),
        (
            {**_PP2, "parallel__pipeline_schedule": "interleaved_1f1b"},
            "parallel.pipeline_schedule=interleaved_1f1b: backend.name=torch_native doesn't support it\n"
            "hint: set parallel.pipeline_schedule=1f1b, or backend=torchtitan",
        ),
        (
            {
                **_PP2,
                **_TITAN,
                "parallel__pipeline_schedule": "interleaved_1f1b",
                "train__global_batch_size": 5,
                "train__micro_batch_size": 1,
            },
            "the 5 micro-batches of a step can't be divided into 2 equal rounds",
        ),
        ({**_PP2, "model__num_layers": 1}, "parallel.pipeline_parallel_size=2: more stages than model.num_layers=1"),
        (
            {**_PP2, "parallel__data_parallel": "fsdp"},
            "parallel.pipeline_parallel_size=2 and parallel.data_parallel=fsdp: can't be combined; "
            "backend.name=torch_native would gather the weights again",
        ),
        ({**_PP2, **_NXD, "data__mask_across_documents": True}, "can't be combined; later stages don't see the tokens"),
        ({**_PP2, "model__tie_embeddings": True}, "can't be combined; the first and last stage would share"),
        (
            {**_TP2, "parallel__context_parallel_size": 4},
            "parallel.tensor_parallel_size=2 x parallel.pipeline_parallel_size=1 x parallel.context_parallel_size=4 = "
            "8: does not divide the 2 processes",
        ),
        (
            {**_CP2, **_TITAN, "train__seq_len": 514},
            "train.seq_len=514: must be divisible by twice parallel.context_parallel_size=2\nhint: use a multiple of 4",
        ),
        (
            {**_CP2, **_TP3_SP, **_TITAN, "train__seq_len": 512},
            "train.seq_len=512: must be divisible by twice parallel.context_parallel_size=2 x "
            "parallel.tensor_parallel_size=3\nhint: use a multiple of 12",
        ),
        (
            _CP2,
            "parallel.context_parallel_size=2: backend.name=torch_native doesn't support it\n"
            "hint: set parallel.context_parallel_size=1, or backend=torchtitan",
        ),
        (
            {**_TWO, "parallel__data_parallel": "fsdp", "parallel__fsdp_size": 3},
            "parallel.fsdp_size=3: data-parallel x context-parallel size 2 is not divisible by it\n"
            "hint: use a divisor of 2",
        ),
        (
            {**_TWO, "parallel__fsdp_size": 2},
            "parallel.fsdp_size=2: only for backend.name=torch_native or torchtitan with parallel.data_parallel=fsdp "
            "or zero1, but here they are torch_native and replicate\nhint: set parallel.fsdp_size=null",
        ),
        (
            {**_TWO, "parallel__reshard_after_forward": "never"},
            "parallel.reshard_after_forward=never: parallel.data_parallel=replicate gathers weights only once",
        ),
        (
            {**_NXD, "parallel__data_parallel": "fsdp"},
            "parallel.data_parallel=fsdp: backend.name=nxd doesn't support it\nhint: set parallel.data_parallel=zero1",
        ),
        (
            {"backend__name": "nxd", "backend__device": "cuda"},
            "backend.device=cuda: backend.name=nxd trains on neuron or cpu\nhint: set backend.device=neuron",
        ),
        (
            {"precision__name": "fp8", "backend__device": "cuda"},
            "precision.name=fp8: backend.name=torch_native doesn't support it\n"
            "hint: set precision=mixed, or backend=torchtitan",
        ),
        (
            {"precision__fp8_scaling": "tensorwise"},
            "precision.fp8_scaling=tensorwise: precision.name=fp32 has no FP8 products\n"
            "hint: set precision=fp8, or precision.fp8_scaling=rowwise",
        ),
        (
            {**_TITAN, "precision__name": "fp8"},
            "precision.name=fp8: backend.device=cpu has no FP8 products\n"
            "hint: set precision=mixed, or backend.device=cuda",
        ),
        (
            {**_TITAN, "precision__name": "fp8", "backend__device": "cuda", "model__intermediate_size": 360},
            "model.intermediate_size=360: gives products of size 360 with parallel.tensor_parallel_size=1; "
            "precision.name=fp8 needs multiples of 16\nhint: set precision=mixed",
        ),
        (
            {"parallel__activation_checkpointing": "operators"},
            "parallel.activation_checkpointing=operators: backend.name=torch_native doesn't support it\n"
            "hint: set parallel.activation_checkpointing=selective, or backend=torchtitan",
        ),
        (
            {**_TITAN, "backend__compile": False, "parallel__activation_checkpointing": "budget"},
            "parallel.activation_checkpointing=budget: Inductor chooses what to recompute, but here "
            "backend.device=cpu and backend.compile=false\nhint: set parallel.activation_checkpointing=operators",
        ),
        (
            {**_NXD, "precision__name": "mixed"},
            "precision.name=mixed: with backend.name=nxd, FP32 master weights need parallel.data_parallel="
            "zero1, but parallel.data_parallel=replicate\nhint: set parallel.data_parallel=zero1",
        ),
        ({**_NXD, "model__tie_embeddings": True}, "can't be combined; embedding and head are separate layers"),
        (
            {**_NXD, "optimizer__name": "muon"},
            "optimizer.name=muon: backend.name=nxd doesn't support it, torch_native does\nhint: set optimizer.",
        ),
        (
            {"backend__name": "torchtitan", "optimizer__name": "muon"},
            "optimizer.name=muon: backend.name=torchtitan doesn't support it, torch_native does\nhint: set optimizer.",
        ),
        (
            {"backend__name": "torchtitan", "parallel__activation_checkpointing": "selective"},
            "parallel.activation_checkpointing=selective: backend.name=torchtitan can't recompute only the core of "
            "attention\nhint: set parallel.activation_checkpointing=operators",
        ),
        ({**_NXD, "train__z_loss": 0.01}, "can't be combined; its cross-entropy has no such term"),
        (
            {**_NXD, "train__on_nonfinite": "skip"},
            "train.on_nonfinite=skip: with backend.name=nxd, the update happens before the loss is known\n"
            "hint: set train.on_nonfinite=rollback",
        ),
        (
            {**_NXD, "backend__env": {"XLA_USE_BF16": 1}},
            "backend.env.XLA_USE_BF16=1: must be unset; any value, also 0, changes number formats independently of "
            "precision.name=fp32\nhint: backend.env.XLA_USE_BF16=null selects number formats by precision.name alone",
        ),
        ({**_NXD, "backend__env": {"XLA_DOWNCAST_BF16": "0"}}, "backend.env.XLA_DOWNCAST_BF16=0: must be unset"),
        (
            {"model__num_experts": 8},
            "model.num_experts=8: backend.name=torch_native trains dense models of this project's shapes only\n"
            "hint: set backend=torchtitan, or a dense model such as model=qwen3_8b",
        ),
        (
            {**_NXD, "model__kv_lora_rank": 64},
            "model.kv_lora_rank=64: backend.name=nxd trains dense models of this project's shapes only",
        ),
        (
            {"parallel__expert_parallel_size": 2},
            "parallel.expert_parallel_size=2: needs a mixture of experts, but model.num_experts=0",
        ),
        (
            {"backend__torchtitan": {"metrics.log_freq": 10}},
            "backend.torchtitan={'metrics.log_freq': 10}: backend.name=torch_native doesn't read this key\n"
            "hint: set backend.torchtitan={}",
        ),
        ({**_TITAN, "optimizer__name": "muon"}, "optimizer.name=muon: backend.name=torchtitan doesn't support it"),
        (
            {**_TITAN, "precision__name": "bf16_sr"},
            "precision.name=bf16_sr: backend.name=torchtitan doesn't support it",
        ),
        ({**_TITAN, "train__z_loss": 0.01}, "can't be combined; its cross-entropy has no such term"),
        (
            {**_TITAN, "train__on_nonfinite": "skip"},
            "train.on_nonfinite=skip: with backend.name=torchtitan, the update happens before the loss is known\n"
            "hint: set train.on_nonfinite=rollback",
        ),
        (
            {**_TITAN, **_TWO, "parallel__data_parallel": "zero1"},
            "parallel.data_parallel=zero1: backend.name=torchtitan doesn't support it\n"
            "hint: set parallel.data_parallel=fsdp",
        ),
        (
            {**_TITAN, "parallel__activation_checkpointing": "selective"},
            "parallel.activation_checkpointing=selective: backend.name=torchtitan can't recompute only the core",
        ),
        (
            {**_TITAN, "model__norm_position": "post", "model__qk_norm": "all"},
            "backend.name=torchtitan and model.norm_position=post: can't be combined; it has no such family",
        ),
        ({**_MIXTURE, "model__experts_per_token": 9}, "model.experts_per_token=9: more than model.num_experts=8"),
        (
            {**_MIXTURE, "model__num_shared_experts": 1},
            "model.num_shared_experts=1: with model.num_experts=8 and no latent attention, no format for exports",
        ),
        (
            {**_MIXTURE, **_LATENT, "model__num_dense_layers": 4},
            "model.num_dense_layers=4: leaves no layer of model.num_layers=4 for experts",
        ),
        (
            {**_MIXTURE, **_LATENT, "model__qk_norm": "head"},
            "model.kv_lora_rank=64 and model.qk_norm=head: can't be combined; latent attention has norms of its own",
        ),
        (
            {**_MIXTURE, **_LATENT, "model__router_groups": 3},
            "model.router_groups=3: must divide model.num_experts=8 into groups of at least 2",
        ),
        (
            {**_MIXTURE, **_LATENT, "model__router_groups": 4},
            "model.router_limited_groups=None: must be from 1 to model.router_groups=4\n"
            "hint: set model.router_limited_groups=2",
        ),
        (
            {
                **_MIXTURE,
                **_LATENT,
                "model__experts_per_token": 4,
                "model__router_groups": 4,
                "model__router_limited_groups": 1,
            },
            "model.experts_per_token=4: model.router_limited_groups=1 groups have only 2 experts",
        ),
        (
            {**_MIXTURE, **_TWO, "model__num_experts": 9, "parallel__expert_parallel_size": 2},
            "model.num_experts=9: not divisible by parallel.expert_parallel_size=2",
        ),
        (
            {**_MIXTURE, **_TWO, "parallel__expert_parallel_size": 2},
            "parallel.expert_parallel_size=2: must divide the 1 processes that share the weights x "
            "parallel.tensor_parallel_size=1\nhint: use a divisor of 1, or set parallel.data_parallel=fsdp",
        ),
        (
            {**_MIXTURE, "cluster__processes_per_node": 4, "parallel__expert_parallel_size": 4, **_FSDP_2},
            "parallel.expert_parallel_size=4: must divide the 2 processes that share the weights",
        ),
        (
            {**_TITAN, "model__module": "gpt_oss"},
            "model.flavor=: a model of a module needs both names\nhint: model.module=deepseek_v3 model.flavor=16B",
        ),
        ({**_TITAN, **_MODULE}, "model.total_parameters=null: unknown for model.module=gpt_oss"),
        (
            {**_TITAN, **_MODULE, "model__total_parameters": 10**9, "model__vocab_size": 2048},
            "tokenizer.train_vocab_size=8192: does not fit model.vocab_size=2048\n"
            "hint: set tokenizer.train_vocab_size=2048 or less",
        ),
        (
            {**_TITAN, **_MODULE, "model__total_parameters": 5, "model__active_parameters": 6},
            "model.active_parameters=6: more than model.total_parameters=5",
        ),
        (
            {**_TITAN, **_MODULE, "model__total_parameters": 10**9, "model__num_layers": 8},
            "model.total_parameters=1000000000: differs from what the other keys of the shape describe",
        ),
        (
            {
                **_NXD,
                "cluster__processes_per_node": 4,
                "parallel__tensor_parallel_size": 4,
                "model__num_kv_heads": 1,
                "model__num_heads": 2,
            },
            "model.num_heads=2: not divisible by parallel.tensor_parallel_size=4",
        ),
    ],
)
def test_layouts_that_can_not_be_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        _TP2,
        _PP2,
        {**_TWO, "parallel__data_parallel": "fsdp"},
        {**_TWO, "parallel__data_parallel": "zero1", "parallel__fsdp_size": 1},
        {**_NXD, **_TWO, "parallel__data_parallel": "zero1"},
        {**_MIXTURE, **_TP2, "parallel__expert_parallel_size": 2},
        {**_MIXTURE, **_LATENT, "cluster__processes_per_node": 4, "parallel__expert_parallel_size": 2, **_FSDP_2},
        {**_TITAN, **_MODULE, "model__total_parameters": 10**9},
        {**_TITAN, **_PP2, "parallel__data_parallel": "fsdp", "cluster__processes_per_node": 4},
        # NxD copies key/value heads where there are fewer than processes.
        {**_NXD, "cluster__processes_per_node": 4, "parallel__tensor_parallel_size": 4, "model__num_kv_heads": 2},
    ],
)
def test_layouts_that_can_be_are_valid(changes: dict[str, Any]) -> None:
    validate(config_with(**changes))


@pytest.mark.parametrize("mode", ["0777", "0702", "0600", "700x", "", "u=rwx", "17700"])
def test_a_mode_that_shares_runs_with_everyone_or_is_none_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"runs_mode=.*\nhint: runs_mode=0700 is private"):
        validate(config_with(runs_mode=mode))


@pytest.mark.parametrize("mode", ["0700", "0750", "0770", "750", "0755"])
def test_modes_for_oneself_and_for_a_group_are_accepted(mode: str) -> None:
    validate(config_with(runs_mode=mode))


NUMBERS = {key: value for key, value in flatten(Config()).items() if isinstance(value, int | float)}


@given(st.sampled_from(sorted(NUMBERS)), st.one_of(st.integers(-(10**18), 10**18), st.floats()))
def test_any_number_anywhere_is_usable_or_a_configuration_error(key: str, number: float) -> None:
    try:
        config = config_with(**{key.replace(".", "__"): number})
        validate(config)
    except ConfigError:
        return
    assert config.grad_accum_steps >= 1
    assert config.total_steps >= 1


@given(
    tokens=st.integers(1, 10**7),
    batch=st.integers(1, 64),
    seq_len=st.integers(1, 4096),
    every=st.integers(1, 10**7),
    max_steps=st.one_of(st.none(), st.integers(1, 2000)),
)
def test_milestones_ascend_and_end_with_the_run(
    tokens: int, batch: int, seq_len: int, every: int, max_steps: int | None
) -> None:
    config = Config(
        train=TrainConfig(tokens=tokens, global_batch_size=batch, seq_len=seq_len, max_steps=max_steps),
        eval=EvalConfig(every_tokens=max(every, batch * seq_len, tokens // 500)),
    )
    steps, counts = list(config.milestones), list(config.milestones.values())
    assert steps == sorted(set(steps))
    assert counts == sorted(set(counts))
    assert (steps[-1], counts[-1]) == (config.total_steps, config.total_tokens)
    for step, milestone_tokens in config.milestones.items():
        # The first step that has consumed the milestone's tokens, and no later one.
        assert step * config.tokens_per_step >= milestone_tokens > (step - 1) * config.tokens_per_step
    for milestone_tokens in counts[:-1]:
        assert milestone_tokens % config.eval.every_tokens == 0


def test_without_evaluation_there_are_no_milestones() -> None:
    assert Config(eval=EvalConfig(enabled=False)).milestones == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"train__global_batch_size": 4, "train__micro_batch_size": 4},
        {"train__global_batch_size": 1, "train__micro_batch_size": 1},
        {**_TITAN, "parallel__pipeline_schedule": "interleaved_1f1b", "train__global_batch_size": 5},
        {
            **_TITAN,
            "parallel__pipeline_schedule": "interleaved_1f1b",
            "train__global_batch_size": 10,
            "train__micro_batch_size": 2,
        },
        {"parallel__data_parallel": "zero1"},
        {"model__tie_embeddings": True},
    ],
    ids=str,
)
def test_the_hint_about_a_pipeline_makes_its_configuration_valid(changes: dict[str, Any]) -> None:
    refused = {**_PP2, **changes}
    with pytest.raises(ConfigError) as caught:
        validate(config_with(**refused))
    first = caught.value.hint.removeprefix("set ").partition(", or")[0]
    for word in first.split():
        key, _, value = word.partition("=")
        refused[key.replace(".", "__")] = json.loads(value) if value[0].isdigit() or value == "false" else value
    validate(config_with(**refused))


@pytest.mark.parametrize("name", ["", " ", "a/b", "models:/a", ".", "../a"])
def test_a_name_that_mlflows_registry_refuses_is_refused_before_the_run(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.register_model=.*: must be a name without"):
        validate(config_with(tracking__register_model=name))
    validate(config_with(tracking__register_model="hlat-7b.v1 base"))
