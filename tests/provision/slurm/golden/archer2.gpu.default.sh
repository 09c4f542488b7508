#!/bin/bash
#SBATCH --job-name=mlhpc-ALLOCATION
#SBATCH --partition=gpu
#SBATCH --qos=gpu-exc
#SBATCH --account="${MLHPC_ACCOUNT}"
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --gpus=8
#SBATCH --time=60
#SBATCH --chdir="${MLHPC_SHARED}/runs/SESSION/ALLOCATION"
#SBATCH --output="${MLHPC_SHARED}/runs/SESSION/ALLOCATION/slurm.out"
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --export=NONE

fail() {
    printf 'mlhpc: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2
    exit "$1"
}
# With the first, srun would hand no variable on; with the second, it refuses other cores than the job's.
unset SLURM_EXPORT_ENV SLURM_TRES_PER_TASK

if ! type module >/dev/null 2>&1; then
    for init in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash" \
        /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        # shellcheck source=/dev/null
        if [ -r "$init" ]; then . "$init"; break; fi
    done
fi
# setup of the environment, as the site wrote it
export HOME="${HOME/home/work}"
# end of setup
type module >/dev/null 2>&1 || fail 71 'the shell of a job has no command module'
module load pytorch/1.13.1-gpu || fail 71 'module pytorch/1.13.1-gpu cannot be loaded'

[ -r '${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json' ] || fail 77 'cannot read ${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json: set shared_directory under slurm:'
[ -r '${MLHPC_SHARED}/payload/SHA256.zip' ] || fail 77 'cannot read ${MLHPC_SHARED}/payload/SHA256.zip: set shared_directory under slurm:'
[ -O '${MLHPC_SHARED}/payload/SHA256.zip' ] || fail 78 '${MLHPC_SHARED}/payload/SHA256.zip belongs to another user, so it is not run'
export PYTHONPATH='${MLHPC_SHARED}/payload/SHA256.zip'"${PYTHONPATH:+:$PYTHONPATH}"
command -v python3 >/dev/null || fail 76 'there is no interpreter python3'
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || fail 76 'python3 does not run or is older than Python 3.9; see batch_python under slurm:'
exec python3 -m pytest_mlhpc.node.batch.main --lines '${MLHPC_SHARED}/runs/SESSION/lines' '${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json'
