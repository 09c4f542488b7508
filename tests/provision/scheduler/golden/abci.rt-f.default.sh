#!/bin/bash
#$ -S /bin/bash
#$ -N mlhpc-ALLOCATION
#$ -q all.q
#$ -pe mlhpc 2
#$ -l h_rt=3600
#$ -wd /STATE/runs/SESSION/ALLOCATION
#$ -j y
#$ -o /STATE/runs/SESSION/ALLOCATION/job.out
#$ -r n
#$ -g ${MLHPC_GROUP}
#$ -l rt_F=2

fail() {
    printf 'mlhpc: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2
    exit "$1"
}

[ -r /STATE/runs/SESSION/ALLOCATION/plan.json ] || fail 77 'cannot read /STATE/runs/SESSION/ALLOCATION/plan.json: set shared_directory under commands:'
[ -r /STATE/payload/SHA256.zip ] || fail 77 'cannot read /STATE/payload/SHA256.zip: set shared_directory under commands:'
[ -O /STATE/payload/SHA256.zip ] || fail 78 '/STATE/payload/SHA256.zip belongs to another user, so it is not run'
export PYTHONPATH=/STATE/payload/SHA256.zip"${PYTHONPATH:+:$PYTHONPATH}"
command -v python3 >/dev/null || fail 76 'there is no interpreter python3'
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || fail 76 'python3 does not run or is older than Python 3.9; see batch_python under commands:'
exec python3 -m pytest_mlhpc.node.batch.job_nodes --lines /STATE/runs/SESSION/lines /STATE/runs/SESSION/ALLOCATION/plan.json
