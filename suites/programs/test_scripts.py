"""Scripts in Python: JSON lines, torch's own benchmark, a training under torchrun. Requires `python` or `torchrun` on PATH."""

from pytest_mlhpc import Metric, program


@program(
    "python3 scripts/sort.py", Metric("sorted", unit="items/s"), files=["scripts/sort.py"], requires="+python"
)
def test_json_lines(run):
    assert len(run["sorted"].samples) == 5


@program(
    "python3 scripts/matmul.py",
    Metric("matmul", r"matmul: (\S+)", "us"),
    files=["scripts/matmul.py"],
    env={"OMP_NUM_THREADS": "{cores}"},
    requires="+torchrun",
)
def test_torch_benchmark(run):
    pass


@program(
    "torchrun --standalone --nproc-per-node 2 scripts/ddp.py",
    Metric("rate", r"rate: (\S+)", "samples/s"),
    files=["scripts/ddp.py"],
    artifacts=["m.json"],
    devices_per_node=2,
    requires="+torchrun",
)
def test_ddp(run):
    assert run.json("m.json")["last"] < run.json("m.json")["first"]
