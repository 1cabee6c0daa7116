#!/bin/sh
# Job train, written by hlatctl. May be run by hand to repeat it.
printf '%s\n' "$$" >/runs/hlat_7b/launch/attempt-0001/train.pid.tmp && mv /runs/hlat_7b/launch/attempt-0001/train.pid.tmp /runs/hlat_7b/launch/attempt-0001/train.pid
# A request to stop goes to the whole process group; this shell waits for the job to answer it.
trap : TERM INT
export FI_EFA_FORK_SAFE=1
export FI_EFA_USE_DEVICE_RDMA=1
export FI_PROVIDER=efa
export HLATCTL_ERROR_FILE=/runs/hlat_7b/launch/attempt-0001/train.error.json
export MALLOC_ARENA_MAX=64
export NEURON_CC_FLAGS='--model-type=transformer --distribution-strategy=llm-training'
export NEURON_COMPILE_CACHE_URL=/var/tmp/hlatctl/compile/FINGERPRINT
export NEURON_FUSE_SOFTMAX=1
export NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=3
export NEURON_RT_ENABLE_VERBOSE_NUMERICAL_ERRORS=0
export NEURON_RT_EXEC_TIMEOUT=4000
export NEURON_RT_STOCHASTIC_ROUNDING_EN=1
export NEURON_TRANSFER_WITH_STATIC_RING_OPS=''
export OMP_NUM_THREADS=4
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
unset XLA_DOWNCAST_BF16
unset XLA_USE_BF16

PYTHON -m torch.distributed.run --standalone --nproc-per-node=32 --tee=3 --log-dir=/runs/hlat_7b/logs/attempt-0001/train -m trainer --run-dir /runs/hlat_7b --attempt 1
code=$?
printf '%s\n' "$code" >/runs/hlat_7b/launch/attempt-0001/train.exit_code.tmp && mv /runs/hlat_7b/launch/attempt-0001/train.exit_code.tmp /runs/hlat_7b/launch/attempt-0001/train.exit_code
exit "$code"
