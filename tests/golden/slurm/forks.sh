#!/bin/bash
#SBATCH --job-name=hlatctl:/runs/golden/launch/attempt-0002/train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/golden/logs/attempt-0002/train.log
#SBATCH --partition=gpu
#SBATCH --account=physics
#SBATCH --qos=long
#SBATCH --reservation=course
#SBATCH '--constraint=$(touch x)|'"'"'a b'"'"'\\'
#SBATCH --time=25:01:01
#SBATCH --signal=TERM@600
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclude=n3,n7
# Job train, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat /runs/golden/launch/attempt-0002/train.token)" ] || exit 0
# What srun itself says belongs into the job's log too.
exec >>/runs/golden/logs/attempt-0002/train.log 2>&1
trap : TERM
# A shell that isn't a login shell may not have Environment Modules or Lmod yet.
type module >/dev/null 2>&1 || . /etc/profile
module load CUDA/12.9 '$(touch x)' && . '/project/a b/$(touch x).sh'
prepared=$?
export EVIL=''"'"'; touch x; $(touch x) `touch x` " \ %j
next line'
export HLATCTL_ERROR_FILE=/runs/golden/launch/attempt-0002/train.error.json
export HLATCTL_INTERFACE=eth0
export HLATCTL_LOG=/runs/golden/logs/attempt-0002/train.log
export OMP_NUM_THREADS=1
unset XLA_USE_BF16
nodes=${HLATCTL_NODE_LIST:-$SLURM_JOB_NODELIST}
export HLATCTL_NODES=$(scontrol show hostnames "$nodes" | wc -l)
export HLATCTL_MASTER_ADDR=$(scontrol show hostnames "$nodes" | head -n 1)
# A free port that nobody can foresee, below those that Linux gives to connections (net.ipv4.ip_local_port_range).
for try in 1 2 3 4 5 6 7 8; do
  export HLATCTL_MASTER_PORT=$((20000 + $(od -An -N2 -tu2 /dev/urandom) % 12768))
  cat /proc/net/tcp* | grep -q "^ *[0-9]*: [0-9A-F]*:$(printf %04X $HLATCTL_MASTER_PORT) " || break
done
# A task has the whole node, but a site may bind it to a core. Where Slurm can't bind, srun complains about the option.
scontrol show config | grep -q '^TaskPlugin .*affinity' && export SLURM_CPU_BIND=none
# An allocation also runs this script to have processes import, and wait for jobs.
if [ "$HLATCTL_STARTS_WARM" ]; then
  [ $prepared = 0 ] || exit 1; exec srun --overlap --no-kill --nodelist="$nodes" \
    --nodes=$HLATCTL_NODES --ntasks=$HLATCTL_NODES sh -c 'HLATCTL_NODE_NAME=$SLURMD_NODENAME exec PYTHON -m hlatctl.node --warm -- PYTHON -m trainer.launch 8 --import=trainer.backends.torch_native --import=torch._dynamo -m trainer --run-dir /runs/golden --attempt 2'
fi
[ $prepared = 0 ] && srun --overlap --kill-on-bad-exit=1 --output=/runs/golden/logs/attempt-0002/train.log --open-mode=append \
  --nodes=$HLATCTL_NODES --ntasks=$HLATCTL_NODES --nodelist="$nodes" \
  sh -c 'NODE_RANK=$SLURM_NODEID HLATCTL_NODE_NAME=$SLURMD_NODENAME exec PYTHON -m hlatctl.node /runs/golden/launch/attempt-0002/train -- PYTHON -m trainer.launch 8 --import=trainer.backends.torch_native --import=torch._dynamo -m trainer --run-dir /runs/golden --attempt 2'
code=$?
echo "{\"v\": 1, \"code\": $code}" >/runs/golden/launch/attempt-0002/train.ended.tmp && mv /runs/golden/launch/attempt-0002/train.ended.tmp /runs/golden/launch/attempt-0002/train.ended
exit $code
