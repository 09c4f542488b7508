#!/bin/bash
#PJM --name mlhpc-ALLOCATION
#PJM -L rscgrp=small
#PJM -L node=2
#PJM -L elapse=01:00:00
#PJM --norestart
#PJM -j
#PJM -o ${MLHPC_SHARED}/runs/SESSION/ALLOCATION/job.out
#PJM -g ${MLHPC_GROUP}
#PJM -L rscunit=rscunit_ft01

fail() {
    printf 'mlhpc: %s: %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$2" >&2
    exit "$1"
}

[ -r '${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json' ] || fail 77 'cannot read ${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json: set shared_directory under commands:'
[ -r '${MLHPC_SHARED}/payload/SHA256.zip' ] || fail 77 'cannot read ${MLHPC_SHARED}/payload/SHA256.zip: set shared_directory under commands:'
[ -O '${MLHPC_SHARED}/payload/SHA256.zip' ] || fail 78 '${MLHPC_SHARED}/payload/SHA256.zip belongs to another user, so it is not run'
export PYTHONPATH='${MLHPC_SHARED}/payload/SHA256.zip'"${PYTHONPATH:+:$PYTHONPATH}"
command -v python3 >/dev/null || fail 76 'there is no interpreter python3'
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || fail 76 'python3 does not run or is older than Python 3.9; see batch_python under commands:'
exec python3 -m pytest_mlhpc.node.batch.job_nodes --lines '${MLHPC_SHARED}/runs/SESSION/lines' '${MLHPC_SHARED}/runs/SESSION/ALLOCATION/plan.json'
