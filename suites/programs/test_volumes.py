"""What a volume takes: by fio, which requires `fio`, and by dd, which any image has: in a pod it needs no Python (`dd`)."""

from pytest_mlhpc import Metric, program


@program(
    "fio write.fio --output-format=json --output=fio.json",
    Metric("bandwidth", file="fio.json", key="jobs.0.write.bw_bytes", unit="B/s"),
    Metric("operations", file="fio.json", key="jobs.0.write.iops", unit="IOPS"),
    files=["write.fio"],
    requires="+fio",
)
def test_fio(run):
    assert run.json("fio.json")["jobs"][0]["error"] == 0


@program(
    "dd if=/dev/zero of=dd.data bs=1048576 count=64 conv=fsync",
    Metric("time", r"copied, (\S+) s", "s"),
    kubernetes={"agent": False},
    requires="+dd",
)
def test_dd(run):
    assert "64+0 records out" in run.output
