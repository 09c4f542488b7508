"""The figures of Kubernetes, measured on a real cluster of ``ci/kubernetes`` started for them. ``python -m benchmarks.kubernetes``.

Requests are counted in the API server's own audit log, so that nothing of the client's is forgotten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from benchmarks import packed_training
from benchmarks.kubernetes_cluster import Cluster, started
from benchmarks.report import Row, machine, table
from benchmarks.slurm_cluster import NotHereError
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.log_follower import LogEnded, LogFollower, LogLine

JOBS, AT_ONCE = 20, 8
#: Seconds that the jobs take: from 10 to 60, short and long ones mixed as in a suite.
SECONDS = [10 + (at * 23) % 51 for at in range(JOBS)]
LINES, CUTS = 100_000, (5_000, 20_000, 40_000)
PARTS = ("jobs", "lines", "training")

HEAD = 'from pytest_mlhpc import Metric, program\n\nRATE = Metric("rate", r"rate: (\\S+)", "items/s")\n'
TEST = """
@program(["bash", "-c", {script!r}, {stamp!r}], RATE, judge=False)
def test_{name}(run):
    assert run["rate"].value == 100.0
"""
#: The program's last act: $0 is the file for its time. Its container ends a moment later.
SCRIPT = 'sleep {seconds}; echo rate: 100.0; printf %s "$EPOCHREALTIME" >"$0"'
#: 100,000 lines, 2,000 every tenth of a second.
PRINTER = """awk 'BEGIN { for (i = 0; i < 100000; i++) { print "line " i; if (i % 2000 == 1999) { fflush(); system("sleep 0.1") } } }'"""


def run(parts: tuple[str, ...] = PARTS) -> list[Row]:
    """Take all figures on one cluster; where none can run, one row says so."""
    try:
        with tempfile.TemporaryDirectory(prefix="mlhpc-bench-kubernetes-") as name:
            Path(name).chmod(0o755)
            with started(Path(name)) as cluster:
                rows: list[Row] = []
                for part in parts:
                    rows += {"jobs": _jobs, "lines": _lines, "training": _trainings}[part](cluster)
                    print(f"{part}: {'; '.join(row.measured for row in rows)}", file=sys.stderr, flush=True)
                return rows
    except NotHereError as error:
        return [
            Row("figures of Kubernetes", "-", f"not on this machine: {' '.join(str(error).split())}", None)
        ]


def _jobs(cluster: Cluster) -> list[Row]:
    """Run twenty tests of 10 to 60 s, eight Jobs at a time; count requests, and seconds from each end to its verdict."""
    stamps = cluster.folder / "stamps"
    names = {f"job_{at:02}": seconds for at, seconds in enumerate(SECONDS)}
    suite = HEAD + "".join(
        TEST.format(name=name, script=SCRIPT.format(seconds=seconds), stamp=str(stamps / name))
        for name, seconds in names.items()
    )
    before = len(cluster.asked())
    reports = cluster.folder / "reports"
    ended = cluster.session(suite, reports, "-o", f"mlhpc_max_jobs={AT_ONCE}")
    seen = {
        line["name"].removeprefix("test_"): line["seen"]
        for line in map(json.loads, reports.read_text(encoding="utf-8").splitlines())
    }
    if ended.code or set(seen) != set(names):
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[-6000:]}")
    asked = cluster.asked()[before:]
    return [*_asked_rows(asked), _delay_row(names, seen, stamps), _left_row(cluster)]


def _asked_rows(asked: list[tuple[float, str]]) -> list[Row]:
    verbs = Counter(what.partition(" ")[0] for _, what in asked)
    told = ", ".join(f"{count} {verb}" for verb, count in verbs.most_common())
    last: dict[str, float] = {}
    soonest = float("inf")
    for when, what in sorted(asked):
        if what.partition(" ")[0] not in ("get", "list", "watch"):
            continue  # two objects made in one place are not one request made twice
        if what in last:
            soonest = min(soonest, when - last[what])
        last[what] = when
    repeated = (
        "none repeated"
        if soonest == float("inf")
        else f"the same one again after {soonest:.0f} s at the soonest"
    )
    each = len(asked) / JOBS
    return [
        Row(f"API requests for {JOBS} Jobs of 10-60 s, {AT_ONCE} at a time", "<= 12 per Job in all", f"{each:.1f} per Job ({told})", each <= 12),
        Row("... the same request again", ">= 30 s apart", repeated, soonest >= 30),
    ]  # fmt: skip


def _delay_row(names: dict[str, int], seen: dict[str, float], stamps: Path) -> Row:
    """A test's verdict is told in the tests' order: what an earlier one holds up is no delay of the harness."""
    ends = {name: float((stamps / name).read_text(encoding="ascii")) for name in names}
    ready = 0.0
    delays = []
    for name in names:
        ready = max(ready, ends[name])
        if ready == ends[name]:
            delays.append(seen[name] - ends[name])
    middle, most = statistics.median(delays), max(delays)
    text = f"median {middle:.2f} s, longest {most:.2f} s, of {len(delays)} that no earlier test held up"
    return Row("from a program's end to its verdict", "median <= 1.5 s", text, middle <= 1.5)


def _left_row(cluster: Cluster) -> Row:
    left = cluster.objects()
    return Row("objects left", "0", str(len(left)) + (f": {', '.join(left)}" if left else ""), not left)


def _trainings(cluster: Cluster) -> list[Row]:
    """Train in pods that several trainings share."""

    def session(partition: str) -> None:
        unwatched = Path("/dev/null")
        ended = cluster.session(packed_training.SUITE, unwatched, "--mlhpc-pack", partition=partition)
        if ended.code:
            raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[-5000:]}")

    return packed_training.rows("in a pod", cluster.folder / "state", session)


def _lines(cluster: Cluster) -> list[Row]:
    """Follow a container that prints 100,000 lines in 5 s, and cut the connection three times."""
    with cluster.cuttable() as (kubeconfig, cut):
        api = connect(kubeconfig=str(kubeconfig), namespace=cluster.namespace, environ=cluster.environment)
        ref = cluster.printer(PRINTER)
        lines: list[bytes] = []
        over = threading.Event()
        cuts = 0

        def put(report: object) -> None:
            nonlocal cuts
            if isinstance(report, LogLine):
                lines.append(report.line)
                if cuts < len(CUTS) and len(lines) >= CUTS[cuts]:
                    cuts += bool(
                        cut()
                    )  # between two connections there is nothing to cut: at the next line then
            elif isinstance(report, LogEnded):
                over.set()

        follower = LogFollower(api, ref, "main", put)
        follower.start()
        over.wait(120)
        follower.close()
        api.close()
        cluster.remove(ref)
    whole = lines == [b"line %d" % number for number in range(LINES)]
    text = f"{len(lines):,}, {'in order, each once' if whole else 'not all in order, or not each once'}, {cuts} cuts"
    return [
        Row(f"log lines delivered of {LINES:,} printed in 5 s, follow cut three times", f"{LINES:,}, in order, once", text, whole and cuts >= len(CUTS))
    ]  # fmt: skip


def main() -> int:
    """Print the figures; exit code 1 if one is out of reach."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kubernetes", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(f"Measured {machine()}.\n", flush=True)
    rows = run(tuple(arguments.parts) or PARTS)
    print(table(rows))
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
