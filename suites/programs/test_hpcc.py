"""HPL and what HPC Challenge measures around it (Debian's hpcc), two ranks of one node. Requires `hpcc`."""

from pytest_mlhpc import Metric, program

RESULTS = "hpccoutf.txt"


@program(
    "hpcc",
    Metric("hpl", r"^HPL_Tflops=(\S+)", "TFLOP/s", file=RESULTS),
    Metric("triad", r"^StarSTREAM_Triad=(\S+)", "GB/s", file=RESULTS),
    Metric("transpose", r"^PTRANS_GBs=(\S+)", "GB/s", file=RESULTS),
    files=["hpccinf.txt"],
    ranks_per_node=2,
    sanity=lambda run: "Success=1" in run.text(RESULTS),
    requires="+hpcc",
)
def test_hpcc(run):
    pass
