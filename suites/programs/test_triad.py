"""Memory bandwidth of a node: the triad of STREAM on all cores, built by make. Requires a C compiler with OpenMP (`cc`)."""

from pytest_mlhpc import Metric, build, program

triad = build("make -C triad", files=["triad/"])


@program(
    "{triad}/triad/triad 20",
    Metric("triad", r"Triad: (\S+)", "MB/s", reduce="max"),
    env={"OMP_NUM_THREADS": "{cores}", "OMP_PROC_BIND": "close"},
    sanity="Solution Validates",
    requires="+cc",
)
def test_triad(run, triad):
    pass
