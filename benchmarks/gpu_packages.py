"""Gather what ``python -m benchmarks gpu`` needs on a machine that has PyTorch and a GPU, but no network.

    python benchmarks/gpu_packages.py FOLDER [PYTHON]

downloads wheels without their dependencies into FOLDER, for x86-64 Linux and a version of Python (3.12), and prints the
command that installs them there. Packages that come with most images of PyTorch are left out, such as numpy, pyarrow,
tokenizers, safetensors, pyyaml, rich, typer, tensorboard, einops and pillow; with the last words of the command, the
machine lists what is still missing. Standard library only, apart from pip.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: The configuration needs the first three, precision=fp8 torchao, and backend=torchtitan the others.
PACKAGES = (
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "antlr4-python3-runtime==4.9.3",
    "torchao>=0.18",
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "torch_checkpointing>=0.1.1",
    "torchdata>=0.11",
    "tyro>=1",
    "docstring_parser>=0.16",
    "typeguard>=4",
    "shtab>=1.7",
    "datasets>=3.6",
    "dill",
    "multiprocess",
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: Distributions that exist as source only, of pure Python.
_BUILT_HERE = ("antlr4-python3-runtime",)


def main() -> int:
    """Download the wheels, and print their size and the command that installs them."""
    folder, python = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "3.12"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    platforms = [word for platform in (*_PLATFORMS, "any") for word in ("--platform", platform)]
    there = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", *platforms]
    for package in PACKAGES:
        if package.startswith(_BUILT_HERE):
            subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, package], check=True)
        else:
            subprocess.run([*pip, "download", "--no-deps", "-d", folder, *there, package], check=True)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{size_bytes / 2**20:.1f} MiB in {folder}")
    print(f"python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site {folder}/*.whl")
    print("PYTHONPATH=/tmp/site python3 -m benchmarks gpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
