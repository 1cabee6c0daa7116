#!/bin/sh
# Job train, written by hlatctl. May be run by hand to repeat it.
printf '%-15s\n' "$$" 1<>/runs/golden/launch/attempt-0002/train.pid.tmp && mv /runs/golden/launch/attempt-0002/train.pid.tmp /runs/golden/launch/attempt-0002/train.pid
# A request to stop goes to the whole process group; this shell waits for the job to answer it.
trap : TERM INT
export HLATCTL_ERROR_FILE=/runs/golden/launch/attempt-0002/train.error.json
export OMP_NUM_THREADS=1
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=CACHE_DIR

PYTHON -m torch.distributed.run --standalone --nproc-per-node=2 --tee=3 --log-dir=/runs/golden/logs/attempt-0002/train -m trainer --run-dir /runs/golden --attempt 2
code=$?
printf '%-15s\n' "$code" 1<>/runs/golden/launch/attempt-0002/train.exit_code.tmp && mv /runs/golden/launch/attempt-0002/train.exit_code.tmp /runs/golden/launch/attempt-0002/train.exit_code
exit "$code"
