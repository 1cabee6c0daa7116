#!/bin/bash
#SBATCH --job-name=hlatctl:/runs/a%20%24%28touch%20x%29%27%25j/launch/attempt-0000/eval-833333
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH '--output=/runs/a $(touch x)'"'"'%%j/logs/attempt-0000/eval-833333.log'
# Job eval-833333, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.token')" ] || exit 0
trap : TERM
export EVIL=''"'"'; touch x; $(touch x) `touch x` " \ %j
next line'
export HLATCTL_ERROR_FILE='/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.error.json'
export OMP_NUM_THREADS=1
export HLATCTL_NODES=$SLURM_JOB_NUM_NODES
export HLATCTL_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HLATCTL_MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=1 '--output=/runs/a $(touch x)'"'"'%%j/logs/attempt-0000/eval-833333.log' --open-mode=append \
  sh -c 'NODE_RANK=$SLURM_NODEID HLATCTL_NODE_NAME=$SLURMD_NODENAME exec PYTHON -m hlatctl.node '"'"'/runs/a $(touch x)'"'"'"'"'"'"'"'"'%j/launch/attempt-0000/eval-833333'"'"' -- PYTHON -m eval --note '"'"''"'"'"'"'"'"'"'"'; touch x; $(touch x) `touch x` " \ %j
next line'"'"''
code=$?
echo "{\"v\": 1, \"code\": $code}" >'/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'.tmp && mv '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'.tmp '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'
exit $code
