"""How often the scheduler is asked about sixteen jobs, and how soon their ends are seen; the same jobs with ReFrame."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.report import Row
from benchmarks.slurm_cluster import QUERIES, Cluster

JOBS, APART_S = 16, 5

#: $0 is where the program writes the time of its last act.
STAMP = 'printf %s "$EPOCHREALTIME" >"$0"'

HEAD = 'from pytest_mlhpc import Metric, program\n\nRATE = Metric("rate", r"rate: (\\S+)", "items/s")\n'
TEST = """
@program(["bash", "-c", {script!r}, {stamp!r}], RATE, judge=False)
def test_{name}(run):
    assert run["rate"].value == 100.0
"""

#: Ends that are no success, in the order in which they are seen: name -> what the program does. Nothing tells of the last
#: but that its batch falls silent; it stands alone, so that no query for another job happens to see it.
ABNORMAL = {
    "exit code": "sleep 4; {stamp}; exit 3",
    "program killed": "sleep 8; {stamp}; kill -9 $$",
    "scancel": "sleep 14; {stamp}; scancel $SLURM_JOB_ID; sleep 60",
    "all of the job killed": "sleep 20; {stamp}; scancel --signal=KILL --full $SLURM_JOB_ID; sleep 60",
    "batch killed": "sleep 26; {stamp}; kill -9 $PPID; sleep 60",
}

REFRAME = """
import reframe as rfm
import reframe.utility.sanity as sn

@rfm.simple_test
class Sleeper(rfm.RunOnlyRegressionTest):
    seconds = parameter({seconds})
    valid_systems = ['*']
    valid_prog_environs = ['*']
    executable = 'bash'
    num_cpus_per_task = 4

    @run_before('run')
    def say(self):
        self.executable_opts = ['{folder}/sleeper', str(self.seconds), '{folder}/stamp-%d' % self.seconds]

    @sanity_function
    def printed(self):
        return sn.assert_found('rate', self.stdout)
"""

REFRAME_SETTINGS = {
    "systems": [
        {
            "name": "bench",
            "hostnames": [".*"],
            "partitions": [
                {
                    "name": "cpu", "scheduler": "slurm", "launcher": "local", "environs": ["builtin"],
                    "access": ["--partition=cpu"], "max_jobs": JOBS,
                }
            ],
        }
    ]
}  # fmt: skip


def rows(cluster: Cluster, reframe: str) -> list[Row]:
    """Run sixteen jobs, five seconds between their ends; then ReFrame the same; then ends of other kinds."""
    ends = {f"job_{at}": f"sleep {at * APART_S}; echo rate: 100.0; {STAMP}" for at in range(1, JOBS + 1)}
    delays, asked, within = _followed(cluster, ends, "quarter")
    asked_of = sum(asked[name] for name in QUERIES)
    found = [
        Row(
            f"scheduler queries for {JOBS} jobs that end {APART_S} s apart",
            "<= 20",
            f"{asked_of} by the harness ({_told(asked, QUERIES)}), {sum(within[name] for name in QUERIES)} within jobs",
            asked_of + sum(within[name] for name in QUERIES) <= 20,
        ),
        Row(
            "... submissions for each allocation",
            "1",
            f"{asked['sbatch']} for {JOBS}",
            asked["sbatch"] == JOBS,
        ),
    ]
    if reframe:
        found += _reframe(cluster, reframe)
    found.append(_delay_row(f"end of a job to its verdict, {JOBS} jobs that pass", delays))
    stamped = {name.replace(" ", "_"): script.format(stamp=STAMP) for name, script in ABNORMAL.items()}
    others, _, _ = _followed(cluster, stamped, "quarter_plain")
    text = ", ".join(f"{name.replace('_', ' ')} {delay:.1f} s" for name, delay in others.items())
    most = max(others.values())
    found.append(
        Row("... ends of other kinds", "median <= 3 s, none over 15 s", text, most <= 15 and statistics.median(others.values()) <= 3)
    )  # fmt: skip
    every = [*delays.values(), *others.values()]
    found.append(_delay_row("... all of these together", dict(enumerate(every))))
    return found


def _followed(
    cluster: Cluster, scripts: Mapping[str, str], partition: str
) -> tuple[dict[str, float], Counter[str], Counter[str]]:
    """Run one test for each script; return seconds from each job's end to its verdict, and the calls meanwhile."""
    where = cluster.folder / f"stamps-{time.monotonic_ns()}"
    where.mkdir()
    suite = HEAD + "".join(
        TEST.format(script=script, stamp=str(where / name), name=name) for name, script in scripts.items()
    )
    reports = where / "reports"
    cluster.forget()
    ended = cluster.session(
        partition,
        suite,
        "reports",
        "-o",
        f"mlhpc_max_jobs={JOBS}",
        variables={"MLHPC_BENCH_REPORTS": str(reports)},
    )
    seen = {
        line["name"].removeprefix("test_"): line for line in map(json.loads, reports.read_text().splitlines())
    }
    missing = [name for name in scripts if name not in seen or not (where / name).exists()]
    if missing or ended.code not in (0, 1):
        raise SystemExit(f"pytest ended with {ended.code}, without {missing}:\n{ended.printed[-6000:]}")
    if partition == "quarter" and ended.code:
        raise SystemExit(f"tests that should pass did not:\n{ended.printed[-6000:]}")
    delays = {name: line["seen"] - float((where / name).read_text()) for name, line in seen.items()}
    calls, within = cluster.calls(), cluster.calls(".jobs")
    cluster.idle()
    return delays, calls, within


def _delay_row(what: str, delays: Mapping[object, float]) -> Row:
    middle, most = statistics.median(delays.values()), max(delays.values())
    return Row(
        what,
        "median <= 3 s, none over 15 s",
        f"median {middle:.2f} s, longest {most:.2f} s",
        middle <= 3 and most <= 15,
    )


def _reframe(cluster: Cluster, reframe: str) -> list[Row]:
    """Run the same jobs with ReFrame, all of them in the queue at once as well."""
    where = cluster.folder / "reframe"
    where.mkdir()
    seconds = [at * APART_S for at in range(1, JOBS + 1)]
    (where / "settings.py").write_text(f"site_configuration = {REFRAME_SETTINGS!r}\n")
    (where / "sleeper").write_text("sleep $1; echo rate: 100.0; " + STAMP.replace("$0", "$2") + "\n")
    (where / "sleepers.py").write_text(REFRAME.format(seconds=seconds, folder=where))
    argv = [reframe, "-C", "settings.py", "-c", "sleepers.py", "-r", "--nocolor", "--exec-policy=async"]
    cluster.forget()
    seen, printed, code = _timed_lines(argv, where, cluster.environment)
    calls = cluster.calls()
    if code:
        raise SystemExit(f"reframe ended with {code}:\n{printed[-5000:]}")
    cluster.idle()
    delays = {at: seen[at] - float((where / f"stamp-{at}").read_text()) for at in seconds if at in seen}
    middle = (
        f"median {statistics.median(delays.values()):.2f} s, longest {max(delays.values()):.2f} s"
        if delays
        else "unknown"
    )
    version = subprocess.run(
        [reframe, "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return [
        Row(f"... queries of ReFrame {version} for the same jobs", "-", f"{sum(calls[name] for name in QUERIES)} ({_told(calls, QUERIES)})", None),
        Row("... ReFrame's delay from the end of a job to its verdict", "-", middle, None),
    ]  # fmt: skip


def _timed_lines(
    argv: list[str], where: Path, environment: Mapping[str, str]
) -> tuple[dict[int, float], str, int]:
    """Run ReFrame; return seconds of each test -> when it said OK, all that was printed, and the exit code."""
    seen: dict[int, float] = {}
    printed = []
    with subprocess.Popen(
        argv, cwd=where, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if match := re.search(r"\[\s+OK\s+\].*%seconds=(\d+)", line):
                seen[int(match[1])] = time.time()
    return seen, "".join(printed), process.returncode


def _told(calls: Counter[str], names: tuple[str, ...]) -> str:
    return ", ".join(f"{calls[name]} {name}" for name in names if calls[name]) or "none"


def find_reframe() -> str:
    """Return the path of ReFrame: what MLHPC_BENCH_REFRAME says, or beside this interpreter, or on PATH; empty: none."""
    beside = Path(sys.executable).with_name("reframe")
    return (
        os.environ.get("MLHPC_BENCH_REFRAME")
        or (str(beside) if beside.exists() else shutil.which("reframe"))
        or ""
    )
