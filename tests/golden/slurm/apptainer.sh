#!/bin/bash
#SBATCH --job-name=hlatctl:/runs/golden/launch/attempt-0002/train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/golden/logs/attempt-0002/train.log
#SBATCH --exclusive
#SBATCH --exclude=n3,n7
# Job train, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat /runs/golden/launch/attempt-0002/train.token)" ] || exit 0
trap : TERM
export EVIL=''"'"'; touch x; $(touch x) `touch x` " \ %j
next line'
export HLATCTL_ERROR_FILE=/runs/golden/launch/attempt-0002/train.error.json
export OMP_NUM_THREADS=1
unset XLA_USE_BF16
for name in EVIL HLATCTL_ERROR_FILE OMP_NUM_THREADS; do export "APPTAINERENV_$name=${!name}"; done
export HLATCTL_NODES=$SLURM_JOB_NUM_NODES
export HLATCTL_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HLATCTL_MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 --output=/runs/golden/logs/attempt-0002/train.log --open-mode=append \
  sh -c 'NODE_RANK=$SLURM_NODEID HLATCTL_NODE_NAME=$SLURMD_NODENAME exec apptainer exec --bind=/runs:/runs --bind=/data:/data:ro --nv /images/h.sif /opt/venv/bin/python -m hlatctl.node /runs/golden/launch/attempt-0002/train -- /opt/venv/bin/python -m torch.distributed.run --nproc-per-node=8 --tee=3 --log-dir=/runs/golden/logs/attempt-0002/train/node-$SLURM_NODEID -m trainer --run-dir /runs/golden --attempt 2'
code=$?
echo "{\"v\": 1, \"code\": $code}" >/runs/golden/launch/attempt-0002/train.ended.tmp && mv /runs/golden/launch/attempt-0002/train.ended.tmp /runs/golden/launch/attempt-0002/train.ended
exit $code
