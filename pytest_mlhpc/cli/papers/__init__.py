"""``mlhpc papers``: its verbs."""

from pytest_mlhpc.cli.commands import LazyGroup

command = LazyGroup(
    "papers",
    package=__name__,
    summaries={
        "mlperf": "MLPerf HPC: logs of recorded runs, their check, time to train and scaling",
        "ai500": "HPC AI500: FLOPS, VFLOPS and scaling of bagging",
        "tables": "the HPDC'24 paper: throughput, compute fraction and effective throughput",
        "roofline": "each workload against the measured peaks of its device",
    },
    help="Reports as published papers have them, from what was recorded.",
    example="mlhpc papers tables archer2 cirrus --format latex",
)
