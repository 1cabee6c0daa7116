"""Renders a job as a manifest to read, or to apply by hand to repeat the job: a headless Service and an Indexed Job."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from conf.devices import DEVICES
from conf.schema import ClusterConfig, KubernetesConfig
from flows.launch.base import Job, export_lines, quote
from flows.launch.endings import token_file
from hlatctl import node
from hlatctl.allocation import TOKEN_ENV
from hlatctl.run.errors import ERROR_FILE_ENV
from hlatctl.run.processes import NODE_NAME_ENV

#: Labels of everything that a job creates. The token names the submission; it is set when the job is created.
MANAGED = {"app.kubernetes.io/managed-by": "hlatctl"}
TOKEN_LABEL, RUN_LABEL, DIR_ANNOTATION = "hlatctl/token", "hlatctl/run", "hlatctl/launch-dir"
INDEX = "batch.kubernetes.io/job-completion-index"
#: A pod's name is at most 63 characters: the job's, the node's number and a random part (KEP 2214).
_NAME_CHARACTERS = 50
_DIGEST_CHARACTERS = 8
_UNREACHABLE = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
#: Below the ports that Linux uses for outgoing connections (net.ipv4.ip_local_port_range).
_FIRST_PORT, _PORTS = 20_000, 12_768
#: Replaces the image in plans of a configuration without one; no image can have this name.
_NO_IMAGE = "IMAGE"
_HOME = "/tmp"
Object = dict[str, Any]


def object_name(launch_dir: str, name: str) -> str:
    """Return a job's name in the cluster: run, attempt and job for a reader, and a digest of its place on disk."""
    place = f"{launch_dir}/{name}"
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:_DIGEST_CHARACTERS]
    folder = Path(launch_dir)
    words = f"hlatctl-{folder.parent.parent.name}-{folder.name.replace('attempt-', 'a')}-{name}".lower()
    readable = re.sub("[^a-z0-9]+", "-", words)[: _NAME_CHARACTERS - _DIGEST_CHARACTERS - 1].strip("-")
    return f"{readable}-{digest}"


def label(text: str) -> str:
    """Return a text as the value of a label: at most 63 characters, and no unusual ones."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-_.")


def pods_of(job: Job) -> int:
    """Return on how many nodes a job runs."""
    return job.nodes if job.processes_per_node or job.each_node else 1


def manifest(job: Job, cluster: ClusterConfig) -> list[Object]:
    """Return the Job, and the Service by whose name the nodes find the first node.

    Raises:
        ConfigError: a name is not a valid variable name.
    """
    name = object_name(os.fspath(job.launch_dir), job.name)
    settings, pods = cluster.kubernetes, pods_of(job)
    labels = {**MANAGED, RUN_LABEL: label(job.run_dir.name)}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**labels, **queue},
            "annotations": {DIR_ANNOTATION: os.fspath(job.launch_dir)},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": settings.keep_ended_s,
            **({"suspend": True} if settings.queue else {}),
            "template": {
                "metadata": {
                    "labels": labels,
                    # Autoscalers that move pods to save nodes: Karpenter, and the cluster autoscaler.
                    "annotations": {
                        "karpenter.sh/do-not-disrupt": "true",
                        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                    },
                },
                "spec": _pod(job, name, cluster),
            },
        },
    }
    return [service, work]


def text_of(objects: list[Object]) -> str:
    """Return objects as YAML, with texts of several lines as blocks."""
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in objects)


def submitted(text: str, token: str) -> str:
    """Return a manifest with the token of one submission, by which its objects are found."""
    objects = list(yaml.safe_load_all(text))
    for one in objects:
        one["metadata"]["labels"][TOKEN_LABEL] = token
    template = objects[-1]["spec"]["template"]
    template["metadata"]["labels"][TOKEN_LABEL] = token
    template["spec"]["containers"][0]["env"].append({"name": TOKEN_ENV, "value": token})
    return text_of(objects)


def _pod(job: Job, name: str, cluster: ClusterConfig) -> Object:
    settings = cluster.kubernetes
    given = {
        "priorityClassName": settings.priority_class,
        "serviceAccountName": settings.service_account,
        "nodeSelector": dict(job.node_selector or settings.node_selector),
        "imagePullSecrets": [{"name": settings.pull_secret}] if settings.pull_secret else None,
    }
    volumes, mounts = _volumes(cluster)
    limits = _limits(job, cluster)
    return {
        "subdomain": name,
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": settings.grace_s,
        "securityContext": _identity(),
        **{key: value for key, value in given.items() if value},
        "tolerations": [
            *({"key": key, "operator": "Exists"} for key in settings.tolerations),
            *(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": settings.lost_after_s}
                for key in _UNREACHABLE
            ),
        ],
        "affinity": _affinity(job, name),
        "containers": [
            {
                "name": "node",
                "image": settings.image or _NO_IMAGE,
                "command": ["/bin/sh", "-c"],
                # Kubernetes replaces $(NAME), and reads $$ as one $.
                "args": [_script(job, settings).replace("$", "$$")],
                "env": _variables(job, name),
                **({"resources": {"limits": limits}} if limits else {}),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _identity() -> Object:
    """Return the driver's own user and group for a pod, because run directories are private to their owner.

    With the containers' settings, a pod fits Kubernetes' profile "restricted", unless the driver's user is root.
    """
    user, group = os.getuid(), os.getgid()
    return {
        **({"runAsNonRoot": True} if user else {}),
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "fsGroupChangePolicy": "OnRootMismatch",  # else Kubernetes changes the group of every file before each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _limits(job: Job, cluster: ClusterConfig) -> dict[str, str]:
    """Return the limits of a pod. One process gets its share of training's devices, unless it names its own."""
    training = cluster.kubernetes.resources
    if job.processes_per_node:
        return dict(training)
    if not job.devices or any(map(_is_device, job.resources)):
        return dict(job.resources)
    whole = {name: int(number) for name, number in training.items() if _is_device(name) and number.isdecimal()}
    share = {name: -(-number * job.devices // cluster.processes_per_node) for name, number in whole.items()}
    return {**{name: str(number) for name, number in share.items()}, **job.resources}


def _is_device(resource: str) -> bool:
    return any(resource.startswith(device.resources) for device in DEVICES.values())


def _script(job: Job, settings: KubernetesConfig) -> str:
    """Return the pod's script. Its output is also written to the run's log, because pods are removed."""
    base = job.launch_dir / job.name
    token, log = shlex.quote(os.fspath(token_file(base))), shlex.quote(os.fspath(job.log))
    env = {**job.env, ERROR_FILE_ENV: os.fspath(job.error_file)}
    program = (settings.python, "-m", "hlatctl.node", os.fspath(base), "--")
    command = quote((*program, settings.python, *job.argv))
    if job.processes_per_node:
        wrapper = (settings.python, *job.wrapper) if job.wrapper else ()
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={job.processes_per_node}", "--tee=3")
        logs = f'--log-dir={shlex.quote(os.fspath(job.log_dir / job.name))}/node-"${node.NODE_RANK_ENV}"'
        command = f"{quote((*program, *wrapper, settings.python, *torchrun))} {logs} {quote(job.argv)}"
    return f"""\
set -e
# A job that its driver has given up does nothing.
[ -z "${TOKEN_ENV}" ] || expected=$(cat {token})
[ -z "${TOKEN_ENV}" ] || [ "${TOKEN_ENV}" = "$expected" ] || exit 0
{export_lines(env, job.unset)}exec >>{log} 2>&1
exec {command}
"""


def _variables(job: Job, name: str) -> list[Object]:
    port = _FIRST_PORT + int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % _PORTS
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    return [
        {"name": node.NODE_RANK_ENV, "valueFrom": index},
        {"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": node.NODES_ENV, "value": str(pods_of(job))},
        {"name": node.MASTER_ADDR_ENV, "value": f"{name}-0.{name}"},
        {"name": node.MASTER_PORT_ENV, "value": str(port)},
        # The driver's user may be unknown to the image, so it has no name and no home folder there.
        {"name": "HOME", "value": _HOME},
        {"name": "USER", "value": MANAGED["app.kubernetes.io/managed-by"]},
    ]


def _affinity(job: Job, name: str) -> Object:
    """Return node rules: one pod of the job per node, none on an excluded node, avoided nodes last."""
    nodes: Object = {}
    if job.excluded_hosts:
        nodes["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [_not_on(job.excluded_hosts)]}
    if job.avoided_hosts:
        preferred = {"weight": 100, "preference": _not_on(job.avoided_hosts)}
        nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [preferred]
    alone = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": name}},
    }
    return {
        **({"nodeAffinity": nodes} if nodes else {}),
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]},
    }


def _not_on(hosts: tuple[str, ...]) -> Object:
    """Return a term that none of these hosts matches; a requirement takes one name."""
    return {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]}


def _volumes(cluster: ClusterConfig) -> tuple[list[Object], list[Object]]:
    settings = cluster.kubernetes
    path = settings.cache_host_path
    cache = {"hostPath": {"path": path, "type": "DirectoryOrCreate"}} if path else {"emptyDir": {}}
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        {"name": "cache", **cache},
    ]
    mounts: list[Object] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": cluster.worker_cache_dir},
    ]
    for number, (claim, folder) in enumerate(settings.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
    return volumes, mounts


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
