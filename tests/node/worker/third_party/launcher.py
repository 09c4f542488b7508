"""A launcher of a third party: starts this module as the run's only rank, which reports without any training."""

from __future__ import annotations

import os
import sys


def launch(run, nodes, environment):
    return [run.python, "-m", "third_party.launcher"], dict(environment)


def main() -> None:
    from pytest_mlhpc.node.protocol.channel import RankChannel
    from pytest_mlhpc.node.protocol.schema import RankReport

    channel = RankChannel.from_environment()
    channel.started({"torch": "none"})
    report = RankReport(
        rank=0, local_rank=0, host=os.uname().nodename, device_type="cpu", device_index=0, device_model="none", steps=2,
        samples=8, started_ns=1, ended_ns=3_000_000_001, epoch_s=3.0, wait_s=0.0, copy_s=0.0, warmup_s=0.1,
        step_times_s=(1.5, 1.5), losses=(2.0, 1.0),
    )  # fmt: skip
    channel.report(report)
    sys.stdout.write(f"third parties here: {any('site-packages' in path for path in sys.path)}\n")
    channel.close()


if __name__ == "__main__":
    main()
