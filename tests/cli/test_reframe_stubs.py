"""The stubs that ``mlhpc init --from-reframe SETTINGS SUITE`` writes: our plug-in collects them, runs those that are whole, and skips
the others with what a person must do."""

import ast
import os
import shutil
import subprocess
import sys

import pytest

from pytest_mlhpc.cli.reframe_stubs import write_stubs
from pytest_mlhpc.cli.reframe_suite import read_suite
from pytest_mlhpc.store.store import read_records

#: A suite that nobody has: a whole test, one that is built, and one of which much is left to a person.
SUITE = {
    "base.py": """
import reframe as rfm
import reframe.utility.sanity as sn

class Bench(rfm.RunOnlyRegressionTest):
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    maintainers = ["ada@example.org"]
    executable = "python3"

    @sanity_function
    def right(self):
        return sn.all([
            sn.assert_found(r"all right", self.stdout), sn.assert_eq(self.job.exitcode, 0),
            sn.assert_not_found("error", self.stderr), sn.assert_eq(sn.count(sn.findall("rate", self.stdout)), 3),
            sn.assert_found("^end$", "log.txt"),
        ])
""",
    "rates/rates.py": '''
import reframe as rfm
import reframe.utility.sanity as sn
from base import Bench

@rfm.simple_test
class RateBench(Bench):
    """Rates of three turns."""
    executable_opts = ["rates.py", "--unit 'MB/s'"]
    time_limit = "0d0h10m0s"
    env_vars = {"TURNS": 3}
    extra_resources = {"switches": {"count": 1}}
    reference = {"hill:cpu": {"First Rate": (10, -0.5, None, "MB/s")}, "*": {"First Rate": (1, -0.5, None, "MB/s"), "took": (9, None, 0.1, "s")}}

    @performance_function("MBytes/sec", perf_key="First Rate")
    def first(self):
        return sn.extractsingle(r"(?P<name>rate) (\\d): (?P<value>[\\d.]+)", self.stdout, "value", float)

    @performance_function("MB/s")
    def best(self):
        return sn.max(sn.extractall(r"rate \\d: ([\\d.]+)", self.stdout, 1, float))

    @performance_function("s")
    def took(self):
        return sn.extractsingle(r"took (\\S+)", "log.txt", 1, float, item=-1)
''',
    "rates/src/rates.py": """
import os, sys
for turn in range(int(os.environ["TURNS"])):
    print(f"rate {turn}: {turn + 6}.5")
print("all right", sys.argv[1:])
open("log.txt", "w").write("took 3\\ntook 2\\nend\\n")
""",
    "built/built.py": """
import reframe as rfm
import reframe.utility.sanity as sn

@rfm.simple_test
class Hello(rfm.RegressionTest):
    valid_systems = ["*"]
    valid_prog_environs = ["gnu"]
    build_system = "SingleSource"
    sourcepath = "hello.c"
    executable_opts = ["a b"]

    @run_before("compile")
    def flags(self):
        self.build_system.cflags = ["-O1", "-DTEXT=7"]

    @sanity_function
    def greets(self):
        return sn.assert_found("hello 7 3", self.stdout)
""",
    "built/src/hello.c": '#include <stdio.h>\nint main(int n, char **v) { printf("hello %d %d\\n", TEXT, n); return 0; }\n',
    "hard.py": """
import reframe as rfm
import reframe.utility.sanity as sn

@rfm.simple_test
class Hard(rfm.RunOnlyRegressionTest):
    valid_systems = ["hill:cpu"]
    valid_prog_environs = ["gnu", "cray"]
    executable = "./bench > out.txt"
    size = parameter([1, 2])
    num_tasks = 2
    prerun_cmds = ["lfs setstripe ."]
    reference = {"hill": {"score": (1, -0.1, 0.1, "points"), "lost": (1, None, 0.1, "s")}, "cliff": {"score": (cliff(), None, None)}}

    @run_after("setup")
    def procs(self):
        if self.current_system.name == "hill":
            self.num_cpus_per_task = 2
        self.skip_if(self.num_tasks > 8, "too many")

    @sanity_function
    def right(self):
        return sn.assert_lt(sn.extractsingle("x (.)", self.stdout, 1, float), 3)

    @performance_function("points")
    def score(self):
        return sn.extractsingle("score (.)", self.stdout, 1, float) / self.num_tasks
""",
}
SETTINGS = """
site_configuration = {
    "systems": [{"name": "hill", "partitions": [
        {"name": "cpu", "scheduler": "slurm", "launcher": "srun", "environs": ["gnu"],
         "resources": [{"name": "switches", "options": ["--switches={count}"]}]}]}],
    "environments": [{"name": "gnu"}],
}
"""


@pytest.fixture
def project(tmp_path, mlhpc, monkeypatch):
    """Return the folder of a project that took over the suite, with what init printed in ``said``."""
    for name, text in SUITE.items():
        path = tmp_path / "old" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "settings.py").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "said").write_text(mlhpc("init", "new", "--from-reframe", "settings.py", "old").out)
    return tmp_path / "new"


def stub(project, name):
    return (project / "suites/from_reframe" / f"test_{name}.py").read_text()


def test_what_was_taken_over_is_counted_with_the_reasons(project):
    said = (project.parent / "said").read_text()
    assert "3 test classes of 5 files: 2 taken over whole, 1 skipped until a person has answered\n" in said
    assert "next: cd new && pytest suites/test_first.py --system local\n" in said
    assert "next, for the stubs: cd new && pytest suites/from_reframe --system NAME\n" in said


def test_a_whole_test_has_all_fields(project):
    assert (
        stub(project, "rates_rates").splitlines()[2:]
        == """import re

from pytest_mlhpc import Metric, program


@program(
    ["python3", "rates.py", "--unit", "MB/s"],
    Metric("first_rate", r"(?:rate) (?:\\d): ([\\d.]+)", "MB/s", reduce="first"),
    Metric("best", r"rate \\d: ([\\d.]+)", "MB/s", reduce="max"),
    Metric("took", r"took (\\S+)", "s", reduce="last", file="log.txt"),
    env={"TURNS": "3"},
    time_limit="10m",
    owner="ada@example.org",
    slurm={"sbatch": ["--switches=1"]},
    reference={"first_rate": {"hill": (1, -0.5, None), "hill:cpu": (10, -0.5, None)}, "took": {"hill": (9, None, 0.1)}},
    sanity="all right",
    files=["../../../old/rates/src/*"],
    artifacts=["log.txt"],
)
def test_rate_bench(run):
    "Rates of three turns."
    assert not re.search("error", run.errors, re.MULTILINE)
    assert len(re.findall("rate", run.output, re.MULTILINE)) == 3
    assert re.search("^end$", run.text("log.txt"), re.MULTILINE)
""".splitlines()
    )


def test_what_needs_a_person_stands_above_its_test(project):
    text = stub(project, "hard")
    asked = [line for line in text.splitlines() if line.startswith("# ")]
    assert asked == [
        "# to know:",
        "# - ReFrame runs it with valid_systems=['hill:cpu'] alone: select by --system",
        "# - ReFrame runs it with valid_prog_environs=['gnu', 'cray'] alone: select by --mlhpc-environment",
        "# what needs a person:",
        "# - `./bench > out.txt` is for a shell, and no shell takes part",
        "# - prerun_cmds are lines of a shell: ['lfs setstripe .']",
        "# - num_tasks=2 does not say of how many nodes; one was taken",
        (
            "# - score is `sn.extractsingle('score (.)', self.stdout, 1, float) / self.num_tasks`: it is computed; "
            "write pattern= or extract="
        ),
        "# - score is in 'points', which is no unit here: it is a plain number",
        "# - score: is higher or lower better? No unit and no bound says it",
        "# - score on hill: (1, -0.1, 0.1): it is none that can be promised here",
        "# - score on cliff: the reference ('⟨cliff()⟩', None, None) is computed by ReFrame",
        "# - there is a reference of lost, and no figure of that name was found",
        "# - references are computed by ReFrame: `cliff()`",
        "# - write the condition `sn.assert_lt(sn.extractsingle('x (.)', self.stdout, 1, float), 3)`",
        "# - parameter size = [1, 2]: parametrize the fields that it changes",
        "# - a hook was not followed: `if self.current_system.name == 'hill':`",
        "# - a hook leaves it out: `self.skip_if(self.num_tasks > 8, 'too many')`",
    ]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) builds the test's program")
def test_whole_stubs_run_and_others_are_skipped_with_what_must_be_done(project):
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "suites/from_reframe",
        "--system",
        "local",
        "-rs",
        "-p",
        "no:cacheprovider",
    ]
    environ = {**os.environ, "MLHPC_STATE": str(project / "state")}
    ran = subprocess.run(
        [*argv, "--mlhpc-baseline=record"],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 skipped" in ran.stdout, ran.stdout
    assert (
        "needs a person: `./bench > out.txt` is for a shell, and no shell takes part; prerun_cmds are"
        in ran.stdout
    )
    measured = [one.measurement for one in read_records(project / "state") if one.measurement]
    values = {metric.name: metric.value for one in measured for metric in one.metrics}
    assert values == {"first_rate": 6.5e6, "best": 8.5e6, "took": 2.0}


def test_a_stub_that_is_there_is_not_changed(project, mlhpc):
    path = project / "suites/from_reframe/test_hard.py"
    path.write_text("mine")
    (project / "suites/from_reframe/test_rates_rates.py").unlink()
    said = mlhpc("init", "new", "--from-reframe=settings.py", "old").out
    assert path.read_text() == "mine"
    assert "wrote suites/from_reframe/test_rates_rates.py\n" in said
    assert "suites/from_reframe/test_hard.py is there and was not changed\n" in said


def test_a_suite_without_tests_writes_nothing(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "old").mkdir()
    assert "old has no file that ends in .py" in refused("init new --from-reframe settings.py old")
    assert not (tmp_path / "new").exists()


ATTRIBUTES = [
    "valid_systems",
    "valid_prog_environs",
    "executable",
    "executable_opts",
    "num_tasks",
    "num_tasks_per_node",
    "num_cpus_per_task",
    "num_gpus_per_node",
    "env_vars",
    "modules",
    "time_limit",
    "maintainers",
    "tags",
    "descr",
    "sourcesdir",
    "sourcepath",
    "build_system",
    "prebuild_cmds",
    "prerun_cmds",
    "keep_files",
    "container_platform",
    "extra_resources",
    "reference",
    "perf_patterns",
    "perf_variables",
    "sanity_patterns",
    "exclusive_access",
]


@pytest.mark.parametrize(
    "value", ["text", "'\"\\\n", 7, None, [], {}, [["x"]], {"a": {"b": (1, 2, 3, 4)}}, True, -1.5], ids=repr
)
@pytest.mark.parametrize("base", ["RegressionTest", "RunOnlyRegressionTest", "CompileOnlyRegressionTest"])
def test_attributes_of_any_form_become_python_that_can_be_read(tmp_path, value, base):
    lines = ["import reframe as rfm", "import reframe.utility.sanity as sn", "import reframe.core as core"]
    for number, name in enumerate(ATTRIBUTES):
        lines += ["@rfm.simple_test", f"class A{number}(rfm.{base}):", f"    {name} = {value!r}"]
        lines += ["    @performance_function('s')", "    def f(self):"]
        lines += [f"        return sn.extractsingle({value!r}, {value!r}, {value!r}, {value!r}, {value!r})"]
        lines += ["    @sanity_function", "    def g(self):"]
        lines += [
            f"        return sn.all([sn.assert_found({value!r}, {value!r}), sn.assert_eq({value!r}, {value!r})])"
        ]
    (tmp_path / "a.py").write_text("\n".join(lines))
    (tmp_path / '"""; b.py').write_text(
        "import reframe as rfm\n@rfm.simple_test\nclass B(rfm.RegressionTest): pass"
    )
    suite = read_suite(tmp_path)
    files, stubs = write_stubs(suite, tmp_path, tmp_path / "new", ["hill"], {"a": [["--a={b}"]]})
    assert len(stubs) == len(ATTRIBUTES) + 1
    for name, text in files.items():
        made = compile(text, name, "exec", ast.PyCF_ONLY_AST).body
        assert {type(one) for one in made} <= {
            ast.Expr,
            ast.Import,
            ast.ImportFrom,
            ast.Assign,
            ast.FunctionDef,
        }
        assert all(isinstance(one.value, ast.Constant) for one in made if isinstance(one, ast.Expr))
