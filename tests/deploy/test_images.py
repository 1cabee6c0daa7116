"""The Dockerfiles keep rules that hold for every image; one is built where a builder and a base image are at hand."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
DOCKERFILES = sorted((TOP / "deploy" / "images").glob("Dockerfile*"))
#: What is in the context of the image that is made from a bundle.
BUNDLE = ("bundle.tar", "hlatctl", "hlatctl-python")
#: An image to build on, such as docker.io/library/python:3.11-slim-bookworm; building needs a package index.
BASE = "HLATCTL_TEST_IMAGE_BASE"
IGNORED = (TOP / ".dockerignore").read_text(encoding="utf-8").splitlines()


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, each with what follows it."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def is_in_context(path: str) -> bool:
    """Whether a builder gets a file: the last line of .dockerignore that fits counts."""
    parents = [path, *(os.fspath(one) for one in Path(path).parents)]
    sent = True
    for line in IGNORED:
        pattern = line.removeprefix("!")
        names = [Path(one).name for one in parents] if pattern.startswith("**/") else parents
        if (
            line
            and not line.startswith("#")
            and any(fnmatch.fnmatch(one, pattern.removeprefix("**/")) for one in names)
        ):
            sent = line.startswith("!")
    return sent


def problems(text: str) -> Iterator[str]:
    found = instructions(text)
    stages = {rest.rpartition(" AS ")[2] for word, rest in found if word == "FROM" and " AS " in rest}
    defaults = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
    images = [rest.split(" AS ")[0] for word, rest in found if word == "FROM"]
    for image in images:
        name = defaults.get(image.strip("${}"), "") if image.startswith("$") else image
        tag = name.rpartition("/")[2].partition(":")[2]
        if name not in stages and name and "@sha256:" not in name and tag in ("", "latest"):
            yield f"FROM {image}: {name} has no version"
    for word, rest in found:
        if word == "ADD":
            yield f"ADD {rest}: COPY files, and install packages by their exact version"
        if word == "COPY" and not rest.startswith("--from=") and rest.split()[0] not in BUNDLE:
            missing = [one for one in rest.split()[:-1] if one != "." and not (TOP / one).exists()]
            unsent = [one for one in rest.split()[:-1] if one != "." and not is_in_context(one)]
            yield from (f"COPY {one}: there is no such file in the context" for one in {*missing, *unsent})
        if word in ("ENV", "ARG") and re.search("secret|password|token|key", rest, flags=re.IGNORECASE):
            yield f"{word} {rest}: an image has no secrets"
        if "pip install" in rest and "--requirement" in rest and "--constraint" not in rest:
            yield f"{word} {rest}: versions must be constrained"
    last = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1]
    users = [rest for word, rest in instructions(last) if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield "USER: must end as a number other than 0, which runAsNonRoot can check"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_dockerfiles_keep_the_rules(path: Path) -> None:
    assert list(problems(path.read_text(encoding="utf-8"))) == []


GOOD = """\
FROM registry.example/base:1
COPY constraints.txt /src/
RUN pip install --constraint c --requirement r
USER 10:10
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("base:1", "base:latest", "has no version"),
        ("base:1", "base", "has no version"),
        ("COPY constraints.txt", "ADD https://example.com/x", "ADD https"),
        ("constraints.txt", "nothing.txt", "COPY nothing.txt: there is no such file"),
        ("constraints.txt", "CHANGELOG.md", "COPY CHANGELOG.md: there is no such file in the context"),
        ("--constraint c ", "", "versions must be constrained"),
        ("USER 10:10", "USER root", "USER: must end as a number"),
        ("USER 10:10", "USER 0:0", "USER: must end as a number"),
        ("USER 10:10\n", "", "USER: must end as a number"),
        ("USER 10:10\n", "USER 10:10\nENV API_TOKEN=x\n", "an image has no secrets"),
        ("USER 10:10\n", "USER 10:10\nFROM registry.example/base:1\n", "USER: must end as a number"),
    ],
)
def test_a_rule_refuses_a_dockerfile_that_breaks_it(old: str, new: str, says: str) -> None:
    assert list(problems(GOOD)) == []
    found = list(problems(GOOD.replace(old, new)))
    assert any(says in problem for problem in found), found


def test_a_builder_gets_what_the_wheel_is_made_from_and_nothing_else() -> None:
    for path in ("conf/load.py", "hlatctl/cli/main.py", "pyproject.toml", "LICENSE", "deploy/images/requirements.py"):
        assert is_in_context(path)
    for path in (".git/config", ".venv/bin/python", "runs/a/run.json", ".kube/config", "tests/waiting.py", "x.pem"):
        assert not is_in_context(path)
    assert not is_in_context("conf/__pycache__/schema.pyc")


@pytest.mark.processes
def test_make_image_says_what_is_missing() -> None:
    def said(*words: str) -> str:
        done = subprocess.run(("make", "image", *words), cwd=TOP, check=False, capture_output=True, text=True)
        assert done.returncode
        return done.stdout

    assert "hint: apt-get install buildah" in said("BUILDER=")
    assert "must be cpu, cuda or neuron" in said("BUILDER=none", "IMAGE=tpu")
    assert "IMAGE=neuron needs BASE" in said("BUILDER=none", "IMAGE=neuron")


@pytest.mark.processes
@pytest.mark.skipif(BASE not in os.environ, reason=f"set {BASE} to an image with Python 3.11; it takes minutes")
def test_the_image_is_built_and_runs_as_any_user() -> None:
    builder = os.environ.get("BUILDER") or next(filter(shutil.which, ("podman", "docker")), "")
    assert builder, "there is no builder that also runs images"
    flags = [f"{name}={os.environ[name]}" for name in ("BUILDER", "BUILD_FLAGS") if name in os.environ]
    words = ("make", "image", "IMAGE=cpu", f"BASE={os.environ[BASE]}", "TAG=hlatctl-test", *flags)
    subprocess.run(words, cwd=TOP, check=True, capture_output=True)
    run = (*builder.split(), "run", "--rm", "--read-only", *os.environ.get("RUN_FLAGS", "").split())
    shown = subprocess.run((*run, "hlatctl-test", "id", "-u"), check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "10001"
    anybody = (*run, "--user=4321:4321", "--network=none", "--workdir=/tmp", "hlatctl-test", "hlatctl")
    subprocess.run((*anybody, "plan"), check=True, capture_output=True)
    few = ("train.max_steps=5", "eval.enabled=false", "tracking=none")
    subprocess.run((*anybody, "train", *few), check=True, capture_output=True)
