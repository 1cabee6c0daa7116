"""Composition: every experiment, unknown keys and options with the nearest match, token units, paths, secrets."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.compose import CONF_DIR, RUNS_DIR_ENV, compose, default_runs_dir, groups, local_processes, override_eval
from conf.environment import collisions
from conf.load import decode, dump, load, parse_yaml
from conf.schema import Config
from hlatctl.run import files
from hlatctl.run.errors import ConfigError

EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_validates(experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    assert config.experiment_name == experiment
    assert config.total_steps > 0


#: Options that only make sense on a cluster of their size, with the experiment that is made for it.
MADE_FOR = {
    "parallel=hlat_7b": "hlat_7b",
    "parallel=hlat_70b": "hlat_70b",
    "cluster=trn1_32xlarge": "hlat_7b",
    "cluster=slurm_trn1": "hlat_7b",
    "cluster=eks_trn1": "hlat_7b",
    "parallel=trn2": "qwen3_8b_trn2",
    "cluster=trn2_48xlarge": "qwen3_8b_trn2",
    "cluster=slurm_trn2": "hlat_7b_trn2",
    "cluster=eks_trn2": "hlat_7b_trn2",
    "cluster=hyperpod_eks_trn2": "hlat_7b_trn2",
    "cluster=hyperpod_slurm_trn2": "hlat_7b_trn2",
}
MIXTURES = ("deepseek_v3_16b", "deepseek_v3_tiny", "gpt_oss_20b", "qwen3_30b_a3b", "qwen3_moe_tiny")
#: What an option leaves to its user.
_VOLUME = ("cluster.kubernetes.image=image", "runs_dir=/fsx/runs")
LEFT_TO_USERS = {
    "cluster=kubernetes": (*_VOLUME, "+cluster.kubernetes.claims.fsx=/fsx"),
    "cluster=eks_trn1": _VOLUME,
    "cluster=eks_trn2": _VOLUME,
    "cluster=eks_p5": _VOLUME,
    "cluster=hyperpod_eks_p5": _VOLUME,
    "cluster=hyperpod_eks_trn2": _VOLUME,
    "precision=fp8": ("backend=torchtitan", "backend.device=cuda"),
    **dict.fromkeys((f"model={name}" for name in MIXTURES), ("backend=torchtitan",)),
    "model=torchtitan": (
        "backend=torchtitan",
        "model.module=deepseek_v3",
        "model.flavor=16B",
        "model.total_parameters=15706484224",
        "model.active_parameters=2661150208",
    ),
}


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group, names in groups().items() for option in names]
)
def test_every_option_of_every_group_composes(group: str, option: str) -> None:
    experiment = MADE_FOR.get(f"{group}={option}", "quickstart")
    overrides = [f"experiment={experiment}"] if group != "experiment" else []
    chosen = f"{group}={option}"
    assert isinstance(compose([*overrides, chosen, *LEFT_TO_USERS.get(chosen, ())]), Config)


def test_hlat_is_composed_as_its_authors_ran_it() -> None:
    small, large = compose(["experiment=hlat_7b"]), compose(["experiment=hlat_70b"])
    assert (small.data_parallel_size, small.grad_accum_steps, small.tokens_per_step) == (256, 4, 4_194_304)
    assert (large.data_parallel_size, large.grad_accum_steps, large.tokens_per_step) == (32, 32, 4_194_304)
    assert (small.precision.name, large.precision.name) == ("bf16_sr", "mixed")
    assert (small.optimizer.lr, large.optimizer.lr) == (3e-4, 1.5e-4)
    assert (small.cluster.nodes, large.cluster.nodes) == (64, 256)
    assert (small.checkpoint.every_steps, large.checkpoint.every_steps) == (1000, 300)
    for config in (small, large):
        assert config.total_steps == 429_154
        assert list(config.milestones) == sorted(config.milestones)
        assert list(config.milestones.values())[:-1] == [nth * 200_000_000_000 for nth in range(1, 9)]
        assert next(step for step in range(1, 30_000) if config.is_permanent(step)) == 23_842, "as in its scripts"
        assert (config.checkpoint.keep, config.eval.suite, config.backend.name) == (5, "hlat_core", "nxd")


def test_hlat_on_todays_stack_keeps_what_the_model_learns_from() -> None:
    paper, today = compose(["experiment=hlat_7b"]), compose(["experiment=hlat_7b_trn2"])
    kept = ("model", "data", "tokenizer", "optimizer", "train", "checkpoint", "eval", "total_steps", "milestones")
    for key in (*kept, "data_parallel_size", "micro_batch_size", "grad_accum_steps"):
        assert getattr(paper, key) == getattr(today, key), key
    assert (today.backend.name, today.backend.device, today.precision.name) == ("torchtitan", "neuron", "mixed")
    assert today.backend.torchtitan == {"compile": {"backend": "neuron"}}
    assert today.parallel.fsdp_size == today.cluster.processes_per_node // today.parallel.tensor_parallel_size


def test_qwen3_8b_has_the_layout_of_aws_s_tutorial() -> None:
    config = compose(["experiment=qwen3_8b_trn2"])
    assert (config.world_size, config.parallel.tensor_parallel_size, config.data_parallel_size) == (64, 4, 16)
    assert (config.parallel.data_parallel, config.parallel.activation_checkpointing) == ("fsdp", "operators")
    assert (config.total_steps, config.grad_accum_steps, config.backend.compile) == (3000, 4, False)


def test_hlat_runs_on_a_slurm_cluster_of_the_same_nodes() -> None:
    planned, real = (
        compose(["experiment=hlat_7b"]).cluster,
        compose(["experiment=hlat_7b", "cluster=slurm_trn1"]).cluster,
    )
    differences = {"name": "slurm_trn1", "launcher": "slurm", "worker_cache_dir": "/scratch/hlatctl"}
    differences["metadata_url"] = "http://169.254.169.254"
    assert dataclasses.replace(planned, **differences) == real  # type: ignore[arg-type]
    assert real.nodes == 64


def test_a_slurm_cluster_of_gpus_asks_for_them() -> None:
    cluster = compose(["cluster=slurm_h100", "backend.device=cuda", "cluster.nodes=1"]).cluster
    assert (cluster.launcher, cluster.slurm.gpus_per_node) == ("slurm", 8)
    assert cluster.hardware.bf16_flops_per_s == 989.5e12


@pytest.mark.parametrize("path", sorted((Path(CONF_DIR) / "cluster").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_cluster_of_a_scheduler_has_a_price_or_says_that_it_has_none(path: Path) -> None:
    values = parse_yaml(path.read_text()) or {}
    files = [path, *(path.with_name(f"{name}.yaml") for name in values.get("defaults", ()) if name != "_self_")]
    if values.get("launcher") not in ("local", "simulated"):
        assert any("price_usd_per_node_hour" in (parse_yaml(file.read_text()) or {}) for file in files)


def test_there_are_experiments_and_groups_to_test() -> None:
    assert "quickstart" in EXPERIMENTS
    assert {"model", "data", "optimizer", "precision", "parallel", "backend", "cluster", "eval", "tracking"} <= set(
        groups()
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.slurm.extra=[--gpus=8]",
            "no viable alternative at input '[--gpus=' See https://hydra.cc/docs/1.2/advanced/override_grammar/basic "
            "for details\nhint: quote text that has special characters, such as \"cluster.slurm.extra=['--mem",
        ),
        ("model.vocabsize=3", "model.vocabsize: unknown key\nhint: did you mean model.vocab_size?"),
        ("train.learning_rate=1", "train.learning_rate: unknown key\nhint: "),
        ("optimiser.lr=1", "optimiser.lr: unknown key\nhint: did you mean optimizer.lr?"),
        ("seq_len=128", "seq_len: unknown key\nhint: did you mean train.seq_len?"),
        ("cluster=locl", "cluster=locl: no such option\nhint: did you mean cluster=local?"),
        ("experiment=quikstart", "experiment=quikstart: no such option\nhint: did you mean experiment=quickstart?"),
    ],
)
def test_what_is_not_known_names_the_nearest_match(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "override",
    [
        "nonsense",
        "train.tokens=",
        "train.tokens=abc",
        "train.tokens=1.5",
        "train.tokens=[1]",
        "model=null",
        "=",
        "a b=c",
        "eval.enabled=maybe",
        "train.seq_len=${missing}",
        "train.seq_len='",
        "train=3",
        "+new.key=1",
    ],
)
def test_bad_overrides_are_configuration_errors(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert caught.value.message


@pytest.mark.parametrize(
    ("text", "tokens"), [("200B", 200_000_000_000), ("1.8T", 1_800_000_000_000), ("2.5M", 2_500_000), ("100K", 100_000)]
)
def test_token_counts_are_written_as_people_write_them(text: str, tokens: int) -> None:
    assert compose([f"train.tokens={text}", "eval.enabled=false"]).train.tokens == tokens


@pytest.mark.parametrize(
    "override", ["seed=18446744073709551616", "optimizer.lr=1" + "0" * 400, "train.tokens=1" + "0" * 5000]
)
def test_a_number_that_no_machine_holds_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"is out of range, must be below 2\^64|Exceeds the limit"):
        compose([override])


def test_every_seed_below_2_to_the_64_is_one() -> None:
    assert compose(["seed=18446744073709551615"]).seed == 2**64 - 1


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 100_000, "- " * 100_000, "a: !!timestamp x\n", "a: 2026-99-99\n", "1: 2\na: 3\n", "\xff"]
)
def test_what_is_no_configuration_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.yaml: "):
        load(tmp_path / "config.yaml")


def test_a_token_count_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.tokens='0\.0001K': is not a token count\nhint: write a whole number"
    ):
        compose(["train.tokens=0.0001K"])


def test_paths_become_absolute_and_the_environment_names_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUNS_DIR_ENV, raising=False)
    assert compose(["data.path=corpus"]).data.path == os.fspath(tmp_path / "corpus")
    assert compose().runs_dir == os.fspath(default_runs_dir()) == os.fspath(tmp_path / "runs")
    monkeypatch.setenv(RUNS_DIR_ENV, os.fspath(tmp_path / "elsewhere"))
    assert compose().runs_dir == os.fspath(default_runs_dir()) == os.fspath(tmp_path / "elsewhere")


def test_a_url_stays_as_it_was_written() -> None:
    assert compose(["data.path=s3://bucket/books"]).data.path == "s3://bucket/books"
    with pytest.raises(ConfigError, match=r"^tokenizer\.path=s3://bucket/llama: must be a path, not a URL"):
        compose(["tokenizer.path=s3://bucket/llama"])


def test_local_processes_is_a_power_of_two_that_the_machine_holds() -> None:
    count = local_processes()
    assert count & (count - 1) == 0
    assert 1 <= count <= (os.cpu_count() or 1)


def test_a_dumped_configuration_loads_as_itself(tmp_path: Path) -> None:
    config = compose(["experiment=quickstart", "train.tokens=2.5M", "eval.tasks=[smoke_mmlu]", "optimizer.eps=1e-9"])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {seq_len: 1.5}", "train.seq_len=1.5: must be a whole number"),
        ("train: {seq_len: true}", "train.seq_len=true: must be a whole number"),
        ("train: {seqlen: 1}", "train.seqlen: unknown key"),
        ("train: 3", "train=3: must be a group of keys"),
        ("eval: {tasks: a}", "eval.tasks='a': must be a list"),
        ("eval: {tasks: [1]}", "eval.tasks[0]=1: must be text"),
        ("eval: {groups: [a]}", "eval.groups=['a']: must be a group of keys"),
        ("eval: {groups: {math: {shots: x}}}", "eval.groups.math.shots='x': must be a whole number"),
        ("eval: {groups: {math: {shot: 1}}}", "eval.groups.math.shot: unknown key"),
        ("[]", "contains list, expected a mapping"),
        ("a: [", "not readable as YAML"),
        ("!!python/object/apply:os.system [true]", "not readable as YAML"),
    ],
)
def test_a_file_that_does_not_fit_the_schema_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in caught.value.message


def test_values_of_the_right_kind_decode_without_change() -> None:
    config = decode({"optimizer": {"lr": 1}, "train": {"max_steps": None}})
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.train.max_steps is None


def test_a_sealed_configuration_is_read_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    path, text = tmp_path / "config.yaml", dump(Config(seed=11))
    path.write_text(files.seal_lines(text), encoding="utf-8")
    assert load(path) == Config(seed=11)
    path.write_text(files.seal_lines(text).replace("seed: 11", "seed: 17"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: is not as it was written") as caught:
        load(path)
    assert caught.value.hint == "if you have edited it, delete its last line"
    path.write_text(text.replace("seed: 11", "seed: 17"), encoding="utf-8")
    assert load(path) == Config(seed=17)


def test_a_configuration_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "config.yaml", dump(Config())
    path.write_text(text.rstrip(), encoding="utf-8")
    with pytest.raises(ConfigError, match="its last line is cut off"):
        load(path)
    path.write_text(text[: text.rindex("\n", 0, -1) + 1], encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks 1 keys, the first: "):
        load(path)
    path.write_text(files.seal_lines("seed: 3\n"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks .* keys"):
        load(path)


def test_a_run_s_evaluation_is_changed_and_nothing_else_of_it() -> None:
    run = compose(["train.tokens=3M", "eval.data_dir=/data", "eval.limit=7", "eval.batch_size=3"])
    changed = override_eval(run, ["eval=hlat_core", "eval.code.workers=2", "eval.groups.math.shots=5"])
    assert dataclasses.replace(changed, eval=run.eval) == run
    assert (changed.eval.suite, changed.eval.groups["math"].shots, changed.eval.code.workers) == ("hlat_core", 5, 2)
    assert (changed.eval.data_dir, changed.eval.limit, changed.eval.batch_size) == ("/data", 7, 3)
    assert override_eval(changed, ["eval.limit=9"]).eval == dataclasses.replace(changed.eval, limit=9)
    assert override_eval(changed, ["eval=smoke"]).eval.groups == {}, "another suite replaces the run's own"
    again = override_eval(override_eval(run, ["eval=hlat"]), ["eval=hlat_core"])
    assert again.eval == override_eval(run, ["eval=hlat_core"]).eval


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.limit=3", "data.path=x"], "data.path: is fixed by the run; its evaluation can change eval.* only"),
        (["seed=3"], "seed: is fixed by the run; its evaluation can change eval.* only"),
        (["eval.limt=3"], "eval.limt: unknown key"),
        (["eval=hlat_cor"], "eval=hlat_cor: no such option"),
        (["eval.limit=0"], "eval.limit=0: must be a whole number greater than 0, or a fraction above 0 and below 1"),
    ],
)
def test_what_a_run_s_evaluation_can_t_be_is_told(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override_eval(compose([]), overrides)
    assert caught.value.message == message


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
