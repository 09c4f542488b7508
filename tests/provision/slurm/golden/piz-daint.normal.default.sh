#!/bin/bash
#SBATCH --job-name=mlhpc-ALLOCATION
#SBATCH --partition=normal
#SBATCH --account="${MLHPC_ACCOUNT}"
#SBATCH --constraint=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:1
#SBATCH --time=60
#SBATCH --chdir=/STATE/runs/SESSION/ALLOCATION
#SBATCH --output=/STATE/runs/SESSION/ALLOCATION/slurm.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --export=NONE

fail() {
    printf 'mlhpc: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2
    exit "$1"
}
# With the first, srun would hand no variable on; with the second, it refuses other cores than the job's.
unset SLURM_EXPORT_ENV SLURM_TRES_PER_TASK

[ -r /STATE/runs/SESSION/ALLOCATION/plan.json ] || fail 77 'cannot read /STATE/runs/SESSION/ALLOCATION/plan.json: set shared_directory under slurm:'
[ -r /STATE/payload/SHA256.zip ] || fail 77 'cannot read /STATE/payload/SHA256.zip: set shared_directory under slurm:'
[ -O /STATE/payload/SHA256.zip ] || fail 78 '/STATE/payload/SHA256.zip belongs to another user, so it is not run'
export PYTHONPATH=/STATE/payload/SHA256.zip"${PYTHONPATH:+:$PYTHONPATH}"
command -v python3 >/dev/null || fail 76 'there is no interpreter python3'
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || fail 76 'python3 does not run or is older than Python 3.9; see batch_python under slurm:'
exec python3 -m pytest_mlhpc.node.batch.main --lines /STATE/runs/SESSION/lines /STATE/runs/SESSION/ALLOCATION/plan.json
