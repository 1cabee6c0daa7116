#!/usr/bin/env bash
# Set up what tests/nxd needs: the real torch-xla and NeuronX Distributed, on a CPU.
#
#   tests/nxd/setup.sh VENV        makes the environment (some 4 GB; not the project's own: another torch)
#
# NeuronX Distributed imports closed packages (torch_neuronx, libneuronxla, neuronxcc, nki). On a machine of the Neuron SDK
# they are there. Elsewhere stand-ins on PYTHONPATH take their place: a sitecustomize.py that makes these names importable,
# lets get_platform_target() say trn1, models the flash-attention kernels in torch, and runs torch-xla's collectives over
# gloo, for PJRT's CPU client knows one process only. Then, with the src/ folder of a checkout of
# github.com/aws-neuron/neuronx-distributed (0.18) in NXD_SRC and the stand-ins' folder in NXD_STAND_INS:
#
#   NXD_HARNESS=1 PJRT_DEVICE=CPU OMP_NUM_THREADS=1 NXD_LOG_LEVEL=error \
#       PYTHONPATH=$NXD_STAND_INS:$NXD_SRC VENV/bin/python -m pytest tests/nxd
set -euo pipefail
venv=${1:?usage: tests/nxd/setup.sh VENV}
root=$(cd "$(dirname "$0")/../.." && pwd)
python3 -m venv "$venv"
"$venv/bin/pip" install torch==2.9.0 torch-xla==2.9.0
# What the library imports but does not all declare,
"$venv/bin/pip" install 'transformers>=4.57,<5' safetensors tenacity 'setuptools>=70.1,<81' packaging numpy psutil protobuf \
    scipy boto3 requests 'huggingface-hub<1.0' 'datasets<=3.6.0' tensorboard
# and what the trainer and its tests do, and the flow's (configuration, and the report's figures).
"$venv/bin/pip" install pytest pytest-xdist hypothesis pyyaml pyarrow tokenizers sentencepiece zstandard \
    hydra-core rich typer matplotlib
"$venv/bin/python" - "$root" <<'PY'
import importlib.util
import sys

sys.path.insert(0, sys.argv[1])
for name in ("torch_xla", "trainer", "conf", "hlatctl"):
    assert importlib.util.find_spec(name), f"{name} can't be imported"
PY
echo "set NXD_SRC and NXD_STAND_INS, then run the tests as this file's head says"
