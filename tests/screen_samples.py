"""Samples as the node's half takes them, made up: one process each second, with what a test wants to be told."""

from pytest_mlhpc.node.telemetry.samples import DeviceSample, NodeSample, ProcessSample, Sample
from pytest_mlhpc.screen import usage
from pytest_mlhpc.screen.hook_output import Profile, TrainingTrace
from pytest_mlhpc.screen.limits import ProgramEvidence, judge
from pytest_mlhpc.screen.usage import find_ranks

GIB, MIB = 1 << 30, 1 << 20


def process(pid, second, *, cores=1.0, main=None, **more):
    """One look at a process that keeps *cores* busy, its first thread *main* of one."""
    values = {
        "pid": pid, "parent": 1, "start_ticks": 5, "name": "python", "rank": None, "cpu_s": cores * second,
        "main_cpu_s": (min(cores, 1.0) if main is None else main) * second, "main_state": "S", "running": 1, "disk": 0,
        "sleeping": 3, "rss_bytes": 200 * MIB, "read_bytes": 0,
    }  # fmt: skip
    return ProcessSample(**{**values, **more})


def device(index=0, **more):
    """One look at a GPU that has all it wants."""
    values = {
        "index": index, "identity": f"GPU-{index}", "model": "NVIDIA H100 80GB HBM3", "busy": 0.99, "memory_busy": 0.4,
        "memory_used_bytes": 40 * GIB, "memory_bytes": 80 * GIB, "power_w": 500.0, "power_limit_w": 700.0, "celsius": 60.0,
        "clock_hz": 1.98e9, "highest_clock_hz": 1.98e9, "reasons": 0,
    }  # fmt: skip
    return DeviceSample(**{**values, **more})


def samples(processes, devices=lambda _second: (), seconds=20, **node):
    """Looks at one node, one each second."""
    values = {"host": "n1", "cores": 8, "memory_bytes": 64 * GIB, "memory_free_bytes": 32 * GIB, **node}
    return [
        Sample(100.0 + second, 0.001, NodeSample(**values), tuple(processes(second)), tuple(devices(second)))
        for second in range(seconds)
    ]


def reported(pid=10, rank=0, step=0.1, wait=0.0, **more):
    """What the hook says of a process with thirty equal steps."""
    ends = tuple(100.0 + step * number for number in range(30))
    return TrainingTrace(pid=pid, host="n1", rank=rank, ends=ends, waits=(wait,) * 30, **more)


def profile(**more):
    """A profiled second of computing alone."""
    values = {
        "seconds": 1.0, "computing_s": 1.0, "communicating_s": 0.0, "exposed_s": 0.0, "data_s": 0.0, "host_s": 0.0,
        "on_device": False, "launches": 0, "top": (("aten::mm", 0.8), ("aten::add_", 0.1)),
    }  # fmt: skip
    return Profile(**{**values, **more})


def see(looks, spoken=()):
    """What screening makes of looks and of what was told."""
    return ProgramEvidence(
        seconds=looks[-1].time_s - looks[0].time_s,
        ranks=find_ranks(usage.processes(looks), spoken),
        nodes=usage.nodes(looks),
        devices=usage.devices(looks),
    )


def found(looks, spoken=()):
    """Findings by their kind."""
    return {one.kind: one for one in judge(see(looks, spoken))}
