#!/bin/sh
# Job train, written by hlatctl. May be run by hand to repeat it.
export FI_EFA_FORK_SAFE=1
export FI_EFA_USE_DEVICE_RDMA=1
export FI_PROVIDER=efa
export HLATCTL_ERROR_FILE=/runs/hlat_70b/launch/attempt-0001/train.error.json
export MALLOC_ARENA_MAX=64
export NEURON_CC_FLAGS='--model-type=transformer --distribution-strategy=llm-training'
export NEURON_COMPILE_CACHE_URL=/var/tmp/hlatctl/compile/FINGERPRINT
export NEURON_EXPERIMENTAL_COMPRESS_RG=1
export NEURON_FUSE_SOFTMAX=1
export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=31
export NEURON_RT_ENABLE_VERBOSE_NUMERICAL_ERRORS=0
export NEURON_RT_EXEC_TIMEOUT=4000
export NEURON_RT_STOCHASTIC_ROUNDING_EN=0
export NEURON_TRANSFER_WITH_STATIC_RING_OPS=''
export OMP_NUM_THREADS=4
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
export TORCH_DIST_INIT_BARRIER=0
unset XLA_DOWNCAST_BF16
unset XLA_USE_BF16

# Writes train.pid first and train.exit_code last; SIGTERM asks the job to stop, SIGQUIT ends it at once.
exec PYTHON -m hlatctl.node /runs/hlat_70b/launch/attempt-0001/train -- \
  PYTHON -m torch.distributed.run --rdzv-id=train --nproc-per-node=32 -m trainer --run-dir /runs/hlat_70b --config /runs/hlat_70b/config.yaml --attempt 1
