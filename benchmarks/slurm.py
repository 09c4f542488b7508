"""The figures of Slurm, measured on a real cluster that ``ci/slurm`` starts for them. ``python -m benchmarks.slurm``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import packed_training, slurm_following, slurm_packing, slurm_queued, slurm_waiting
from benchmarks.report import Row, machine, table
from benchmarks.slurm_cluster import Cluster, NotHereError, started

PARTS = ("waiting", "packing", "training", "queued", "following")


def run(parts: tuple[str, ...] = PARTS, accounting: str = "dbd") -> list[Row]:
    """Take all figures on one cluster, one after the other; where none can run, one row says so."""
    try:
        return _measured(parts, accounting)
    except NotHereError as error:
        return [Row("figures of Slurm", "-", f"not on this machine: {' '.join(str(error).split())}", None)]


def _measured(parts: tuple[str, ...], accounting: str) -> list[Row]:
    reframe = slurm_following.find_reframe()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mlhpc-bench-slurm-") as name:
        Path(name).chmod(0o755)
        with started(Path(name), accounting) as cluster:
            for part in parts:
                rows += _part(part, cluster, reframe if accounting == "dbd" else "")
                print(f"{part}: {'; '.join(row.measured for row in rows)}", file=sys.stderr, flush=True)
    return rows


def _part(part: str, cluster: Cluster, reframe: str) -> list[Row]:
    if part == "following":
        return slurm_following.rows(cluster, reframe)
    if part == "training":
        state = Path(cluster.environment["MLHPC_STATE"])
        return packed_training.rows("in a packed Slurm allocation", state, lambda name: _train(cluster, name))
    measure = {"packing": slurm_packing, "queued": slurm_queued, "waiting": slurm_waiting}[part]
    return measure.rows(cluster)


def _train(cluster: Cluster, partition: str) -> None:
    unwatched = {"MLHPC_BENCH_REPORTS": "/dev/null"}
    ended = cluster.session(partition, packed_training.SUITE, "reports", "--mlhpc-pack", variables=unwatched)
    if ended.code:
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[-5000:]}")
    cluster.idle()


def main() -> int:
    """Print the figures; exit code 1 if one is out of reach."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slurm", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--accounting",
        choices=("dbd", "filetxt", "none"),
        default="dbd",
        help="of the cluster; ReFrame needs dbd",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(f"Measured {machine()}.\n", flush=True)
    rows = run(tuple(arguments.parts) or PARTS, arguments.accounting)
    print(table(rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
