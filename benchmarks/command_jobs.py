"""CPU seconds per trivial `command` test through the whole path: harness, children, start of pytest, store."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row

TESTS = 500

TEST = """
@program(["bash", "-c", "echo rate: 100.0"], RATE)
def test_trivial_{number}(run):
    assert run["rate"].value == 100.0
"""

#: One function for each test: two tests that differ in nothing would be one benchmark.
SUITE = (
    'from pytest_mlhpc import Metric, program\n\nRATE = Metric("rate", r"rate: (\\S+)", "items/s")\n'
    + "".join(TEST.format(number=number) for number in range(TESTS))
)

PLAIN = """
def test_trivial_{number}():
    output = subprocess.run(["bash", "-c", "echo rate: 100.0"], capture_output=True, text=True, check=True).stdout
    assert float(re.search(r"rate: (\\S+)", output)[1]) == 100.0
"""

#: The same programs by tests that nobody records.
PLAIN_SUITE = "import re\nimport subprocess\n\n" + "".join(
    PLAIN.format(number=number) for number in range(TESTS)
)

REFRAME = """
import reframe as rfm
import reframe.utility.sanity as sn

@rfm.simple_test
class Trivial(rfm.RunOnlyRegressionTest):
    number = parameter(range({count}))
    executable = 'echo'
    executable_opts = ['rate:', '100.0']
    valid_systems = ['*']
    valid_prog_environs = ['*']
    reference = {{'*': {{'rate': (100.0, -0.1, 0.1, 'items/s')}}}}

    @sanity_function
    def printed(self):
        return sn.assert_found('rate', self.stdout)

    @performance_function('items/s')
    def rate(self):
        return sn.extractsingle(r'rate: (\\S+)', self.stdout, 1, float)
"""


def _cpu_of(argv: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        )
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def run() -> list[Row]:
    """Run 500 trivial tests with ours, with pytest alone, and with ReFrame where it is installed."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "MLHPC_STATE": str(folder / "state"), "PYTEST_ADDOPTS": ""}
        environment.pop("CI", None)
        (folder / "test_trivial.py").write_text(SUITE)
        argv = [sys.executable, "-m", "pytest", "-q", "--system", "local:cpu", "-p", "no:cacheprovider"]
        cpu, wall = _cpu_of(argv, folder, environment)
        each = 1000 * cpu / TESTS
        rows.append(
            Row(
                f"{TESTS} trivial `command` jobs, CPU per test",
                "<= 10 ms",
                f"{each:.1f} ms (wall {wall:.1f} s)",
                each <= 10,
            )
        )
        (folder / "plain").mkdir()
        (folder / "plain/test_plain.py").write_text(PLAIN_SUITE)
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:mlhpc", "plain"]
        plain, wall = _cpu_of(argv, folder, environment)
        text = f"{cpu / plain:.1f} ({1000 * plain / TESTS:.1f} ms, wall {wall:.1f} s)"
        rows.append(Row("over plain pytest that spawns the programs", "-", text, None))
        if importlib.util.find_spec("reframe"):
            (folder / "reframe_test.py").write_text(REFRAME.format(count=TESTS))
            argv = [str(Path(sys.executable).with_name("reframe")), "-c", "reframe_test.py", "-r"]
            cpu, wall = _cpu_of(argv, folder, environment)
            rows.append(
                Row("the same with ReFrame", "-", f"{1000 * cpu / TESTS:.1f} ms (wall {wall:.1f} s)", None)
            )
    return rows
