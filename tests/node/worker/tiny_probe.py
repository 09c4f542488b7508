"""A probe that only counts, and fails on request; a rank imports it by MLHPC_WORKLOAD_MODULE."""

from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker.environment import WorkerFailure


class Tiny:
    def __init__(self, place):
        self.parameters = place.run.parameters
        self.calls = self.parameters["calls"]
        self.kernel_works = bool(self.parameters.get("kernel_works"))
        self.operations = (
            TimedOperation("count", (), (Rate("count_rate", "items/s", 10.0),), ("count_time",)),
        )

    def verify(self):
        self.calls.append("verify")
        if self.parameters.get("wrong") == self.calls.count("verify"):
            raise WorkerFailure("wrong_result", "it counted to eleven")

    def repeat(self):
        self.calls.append("repeat")
        if self.parameters.get("explode"):
            raise RuntimeError("the counter jams")
        return {"count": 0.5}

    def cache(self):
        return "unknown"

    def environment(self):
        return {"counter": "fingers"}

    def close(self):
        self.calls.append("close")


def probe(place):
    return Tiny(place)
