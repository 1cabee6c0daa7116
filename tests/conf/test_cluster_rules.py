"""The rules of a Slurm cluster's configuration: each names the field, its value and the rule."""

from __future__ import annotations

from typing import Any

import pytest

from conf.validate import validate
from hlatctl.run.errors import ConfigError
from tests.conf.test_validate import config_with

EXTRA = "cluster.slurm.extra[0]="

_AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"


def slurm_config(**changes: Any) -> Any:
    return config_with(**{"cluster__launcher": "slurm", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slurm__partition": "a b"}, "cluster.slurm.partition='a b': must be a name without spaces"),
        ({"slurm__account": "-x"}, "cluster.slurm.account='-x': must be a name without spaces"),
        ({"slurm__qos": ""}, "cluster.slurm.qos='': must be a name without spaces"),
        ({"slurm__modules": ["a b"]}, "cluster.slurm.modules[0]='a b': must be a name without spaces"),
        ({"slurm__setup_script": "env.sh"}, "cluster.slurm.setup_script='env.sh': must be an absolute path"),
        (
            {"slurm__extra": ["-N4"]},
            EXTRA + "'-N4': must be one long option of sbatch, on one line\nhint: write --name",
        ),
        ({"slurm__extra": ["--x=1\n#SBATCH -N9"]}, EXTRA + r"'--x=1\n#SBATCH -N9': must be one long option"),
        ({"slurm__extra": ["--nodes=4"]}, EXTRA + "'--nodes=4': --nodes is set by cluster.nodes\nhint: remove --nodes"),
        ({"slurm__extra": ["--job-n=x"]}, EXTRA + "'--job-n=x': --job-n is set by hlatctl, which finds its jobs by it"),
        ({"slurm__extra": ["--requeue"]}, EXTRA + "'--requeue': --requeue is set by hlatctl"),
        ({"interface": "eth 0"}, "cluster.interface='eth 0': must be the name of a network interface"),
        (
            {"launcher": "local", "stage_environment": True},
            "cluster.stage_environment=true: cluster.launcher=local runs jobs in the environment of this machine",
        ),
        (
            {"container__image": "a.sif", "stage_environment": True, "worker_cache_dir": "/scratch"},
            "cluster.stage_environment=true: with cluster.container.image=a.sif, the environment is in the image",
        ),
        (
            {"worker_cache_dir": "~/cache", "stage_environment": True},
            "cluster.worker_cache_dir=~/cache: with cluster.stage_environment=true, must be on each node's own disk",
        ),
        ({"interface": ""}, "cluster.interface='': must be the name of a network interface"),
        (
            {"slurm__time_limit_s": 360},
            "cluster.slurm.time_limit_s=360: must be more than 360, because training stops "
            "cluster.slurm.stop_before_limit_s=300 before it",
        ),
        ({"container__mounts": ["data:/data"]}, "cluster.container.mounts[0]='data:/data': must be FROM:TO"),
        ({"container__mounts": ["/a:/a,/b:/b"]}, "cluster.container.mounts[0]='/a:/a,/b:/b': must be FROM:TO"),
        ({"container__image": "a\nb"}, r"cluster.container.image='a\nb': must be one line"),
        ({"container__python": ""}, "cluster.container.python='': must be one line, and not empty"),
        (
            {"container__image": "h.sif", "launcher": "local"},
            "cluster.container.image=h.sif: cluster.launcher=local runs jobs without a container",
        ),
        (
            {"spare_nodes": 1, "launcher": "local"},
            "cluster.spare_nodes=1: cluster.launcher=local has this machine only",
        ),
    ],
)
def test_a_broken_rule_names_the_field_and_its_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(slurm_config(**{f"cluster__{key}": value for key, value in changes.items()}))
    assert str(caught.value).startswith(message)


def test_each_process_on_a_gpu_needs_one_of_its_own() -> None:
    where = {"cluster__processes_per_node": 8, "cluster__slurm__gpus_per_node": 4}
    validate(slurm_config(**where))
    with pytest.raises(ConfigError, match=r"cluster\.processes_per_node=8: with cluster\.slurm\.gpus_per_node=4"):
        validate(slurm_config(**where, backend__device="cuda"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nodes=9", ": --nodes is set by cluster.nodes\nhint: remove --nodes from eval.cluster.extra"),
        ("--partition=gpu", ": --partition is set by eval.cluster.partition"),
        ("-p gpu", ": must be one long option of sbatch, on one line"),
    ],
)
def test_options_of_evaluations_have_the_same_rules(option: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(cluster__launcher="slurm", eval__cluster__extra=[option]))
    assert str(caught.value).startswith(f"eval.cluster.extra[0]={option!r}{message}")


def test_evaluations_on_the_nodes_of_training_have_no_partition_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"eval\.cluster\.partition=gpu: is for jobs of their own"):
        validate(config_with(eval__placement="between", eval__cluster__partition="gpu"))


def test_evaluations_have_a_time_limit_of_their_own_and_several_interfaces_may_be_named() -> None:
    own = ["--time=4:00:00", "--gpus=1", "--exclusive"]
    validate(config_with(cluster__launcher="slurm", eval__cluster__extra=own, cluster__interface="ib0,ib1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"slurm__partition": "gpu,gpu-long", "slurm__account": "lab_1", "slurm__time_limit_s": 361},
        {"slurm__extra": ["--gpus-per-node=h100:8", "--gres=gpu:h100:8", "--licenses=x y", "--hold"]},
        {"slurm__constraint": "[a|b]&c*2", "slurm__reservation": "course", "slurm__modules": ["CUDA/12.9"]},
        {"slurm__gpus_per_node": 8, "slurm__setup_script": "/project/a b/env.sh"},
        {"container__image": "nvcr.io#nvidia/pytorch:25.09-py3", "container__mounts": ["/data:/data:ro", "/a:/b"]},
    ],
)
def test_settings_that_clusters_use_are_valid(changes: dict[str, Any]) -> None:
    validate(slurm_config(**{f"cluster__{key}": value for key, value in changes.items()}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.slurm.extra", ["--auto-resume=1"]),
        ("cluster.container.options", ["--auto-resume=1"]),
        ("cluster.kubernetes.patch", {"metadata": {"annotations": {_AUTO_RESUME: "true"}}}),
    ],
)
def test_only_one_of_two_systems_may_restart_a_run(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}: turns HyperPod's auto-resume on, but hlatctl restarts the run"):
        validate(slurm_config(**{key.replace(".", "__"): value}))


@pytest.mark.parametrize("value", ["tomorrow", "2026-12-01", "2026-12-01T11:30"])
def test_the_end_of_bought_capacity_is_a_time_with_a_zone(value: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.capacity_ends={value}: must be a date and time with its time zone"):
        validate(config_with(cluster__capacity_ends=value))
    validate(config_with(cluster__capacity_ends="2026-12-01T11:30Z"))


@pytest.mark.parametrize(
    "value", ["https://host", "http://user@host", "http://host/latest", "169.254.169.254", "http://a:99999"]
)
def test_the_metadata_service_is_an_address_without_a_path(value: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.metadata_url="):
        validate(config_with(cluster__metadata_url=value))


def test_a_budget_in_dollars_needs_a_price() -> None:
    with pytest.raises(ConfigError, match=r"budget\.usd=5: can't be counted without cluster\.price"):
        validate(config_with(budget__usd=5.0))
