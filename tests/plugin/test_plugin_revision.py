"""`--mlhpc-against rev=`: side B has what another git revision has; the worktree goes, whatever becomes of the session."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture
from git_checkouts import Checkout
from inner_sessions import CONFTEST, data, output
from inner_sessions import SYSTEMS as INNER_SYSTEMS
from running_suites import wait_for

SYSTEMS = """
schema: 1
systems:
  local:
    partitions:
      cpu:
        scheduler: local
        accelerator: cpu
        nodes: {cores: 1, memory: 1GiB, max: 1}
        environments:
          default: {python: python3}
"""

SCRIPT = """
@program("./rate.sh", RATE)
def test_script(run): pass
"""

OLD = "--mlhpc-against=rev=old"


@pytest.fixture
def checkout(suite):
    """The suite as a checkout whose tag *old* is half as fast as what is checked out."""
    made = Checkout.made(suite.folder)
    made.write("systems.yaml", SYSTEMS)
    made.write(".gitignore", "__pycache__\n/ignored\n")
    suite.write(SCRIPT)
    rate(made, 50)
    made.commit("old")
    rate(made, 100)
    made.commit("new")
    return made


def with_variable(checkout: Checkout) -> None:
    """Let a variable of the environment name a folder of the checkout."""
    variables = f"{{python: python3, variables: {{WHERE: {checkout.folder}/rates}}}}"
    checkout.write("systems.yaml", SYSTEMS.replace("{python: python3}", variables))


def rate(checkout: Checkout, value: int) -> None:
    """Let the programs, sources and packages of the checkout have this rate."""
    checkout.write("rate.sh", f"#!/bin/sh\necho rate: {value}\n", 0o755)
    checkout.write("rate.txt", f"rate: {value}\n")
    checkout.write("rates/rate.txt", f"rate: {value}\n")
    checkout.write("src/solver/__init__.py", f"RATE = {value}\n")


def compared(suite) -> dict[str, list[float]]:
    """Return the rates of A and B, of all records in the order of their runs."""
    found: dict[str, list[float]] = {"A": [], "B": []}
    for record in suite.records():
        if record["measurement"]:
            value = record["measurement"]["metrics"][0]["value"]
            found["B" if "rev=" in record["environment"] else "A"].append(value)
    return found


def nothing_is_left(suite, checkout) -> bool:
    left = [*suite.state.glob("worktrees/*"), *suite.state.glob("ledger/*.jsonl")]
    return not left and not checkout.worktrees() and checkout.git("status", "--porcelain") == ""


def test_a_program_next_to_the_test_is_that_of_the_revision(suite, checkout):
    result = suite.run(OLD)
    result.expect(0, "test_script*100 items/s*50 items/s*better", passed=1)
    assert "B has files, builds, programs and packages of old (" in output(result)
    found = compared(suite)
    assert (set(found["A"]), set(found["B"])) == ({100.0}, {50.0})
    assert nothing_is_left(suite, checkout)


HERE = "from pathlib import Path\nHERE = Path(__file__).parent\n"
BUILD = 'from pytest_mlhpc import build\nmade = build("cp rate.txt built.txt", files=["rate.txt"])\n'
IMPORT = f"{HERE}IT = \"import solver; print('rate:', solver.RATE)\"\n"


@pytest.mark.parametrize(
    ("before", "program", "takes"),
    [
        ("", '"cat rate.txt", RATE, files=["rate.txt"]', ""),
        ("", '"cat rate.txt", RATE, files=["rat?.txt"]', ""),
        ("", '"cat rates/rate.txt", RATE, cwd="."', ""),
        (HERE, '["cat", HERE / "rate.txt"], RATE', ""),
        (HERE, """["sh", "-c", "cat $AT/rate.txt"], RATE, env={"AT": str(HERE)}""", ""),
        ("", """["sh", "-c", "cat $WHERE/rate.txt"], RATE""", ""),
        (BUILD, '"cat {made}/built.txt", RATE', ", made"),
        (IMPORT, """[sys.executable, "-c", IT], RATE, env={"PYTHONPATH": str(HERE / "src")}""", ""),
    ],
    ids=["file", "glob", "cwd", "argument", "variable", "environment", "build", "pythonpath"],
)
def test_all_that_a_program_has_of_the_checkout_is_of_the_revision(suite, checkout, before, program, takes):
    with_variable(checkout)
    suite.write(f"{before}\n@program({program})\ndef test_it(run{takes}): pass\n")
    result = suite.run(OLD)
    result.expect(0, "test_it*100 items/s*50 items/s*better", passed=1)
    assert not list(suite.state.glob("worktrees/*"))
    assert checkout.worktrees() == []


def test_a_package_that_is_found_by_the_interpreter_is_of_the_revision(suite, checkout, monkeypatch):
    """As one that was installed in place is: the variable stands for the path file of ``pip install -e``."""
    monkeypatch.setenv("PYTHONPATH", str(suite.folder / "src"))
    suite.write("""
@program([sys.executable, "-c", "import solver; print('rate:', solver.RATE)"], RATE)
def test_it(run): pass
""")
    suite.run_process("--system", "local", OLD).expect(0, "test_it*100 items/s*50 items/s*better", passed=1)


@pytest.mark.servers  # a rank that imports torch
def test_a_training_of_the_site_has_the_code_of_the_revision(suite, checkout):
    """Its module travels in the payload, too, which has that of the checkout."""
    suite.file("systems.yaml", INNER_SYSTEMS)  # its interpreter has torch
    suite.file("conftest.py", CONFTEST + data("suites/site_hooks.py.txt"))
    line = data("suites/site_line.py.txt")
    for name in ("site_pooled", "site_nicely"):
        suite.file(f"{name}.py", data(f"suites/{name}.py.txt"))
    suite.file("site_line.py", line + "\nraise ImportError('this is the old code')\n")
    suite.write("""
    @workload("line", preset="smoke")
    def test_line(run): pass
    """)
    checkout.commit("older")
    suite.file("site_line.py", line)
    result = suite.run("--mlhpc-against=rev=older")
    result.expect(1, "import_failed: run 2 of 30 (B): *this is the old code*", errors=1)
    assert [record["attempt"] for record in suite.records() if record.get("measurement")] == [1]


def test_records_have_the_commit_of_their_side_and_say_that_the_checkout_has_changes(suite, checkout):
    old, new = checkout.git("rev-parse", "old"), checkout.git("rev-parse", "HEAD")
    suite.run(OLD).expect(0, passed=1)
    (path,) = suite.state.glob("runs/*/against.json")
    content = json.loads(path.read_text())
    assert (content["A"], content["B"]) == ({"commit": new, "dirty": False}, {"commit": old})
    commits = {"rev=" in one["environment"]: (one["commit"], one["branch"]) for one in suite.records()}
    assert commits == {False: (new, "main"), True: (old, "")}


def test_uncommitted_changes_are_compared_with_what_is_committed(suite, checkout):
    rate(checkout, 200)
    head = checkout.git("rev-parse", "HEAD")
    result = suite.run("--mlhpc-against=rev=HEAD")
    result.expect(0, "test_script*200 items/s*100 items/s*better", passed=1)
    assert "with its uncommitted changes" in output(result)
    assert {record["commit"] for record in suite.records()} == {head, f"{head}-dirty"}
    assert (suite.folder / "rate.txt").read_text() == "rate: 200\n"


def test_limits_and_metrics_are_those_of_the_checkout(suite, checkout):
    suite.write("""
from pytest_mlhpc import Metric
def doubled(run):
    return 2 * float(run.output.split()[1])

@program("./rate.sh", Metric("rate", extract=doubled, unit="items/s", better="higher"))
def test_it(run): pass
""")
    suite.run(OLD).expect(0, "test_it*200 items/s*100 items/s*better", passed=1)


def test_a_variable_may_differ_besides(suite, checkout):
    with_variable(checkout)
    suite.write("""
@program("sh -c 'cat $WHERE/rate.txt'", RATE)
def test_it(run): pass
""")
    other = suite.folder / "ignored"
    other.mkdir()
    (other / "rate.txt").write_text("rate: 400\n")
    result = suite.run(OLD, f"--mlhpc-against=variables.WHERE={other}")
    result.expect(1, "test_it*100 items/s*400 items/s*worse", failed=1)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ('@program("echo rate: 4", RATE)', "nothing that it runs comes from the checkout"),
        ('@program("cat new.txt", RATE, files=["new.txt"])', "there is no 'new.txt' in"),
        ('@program("./new.sh", RATE)', "has no ./new.sh beside the test; declare a build that makes it"),
        ('@program("cat x", RATE, cwd="fresh")', "has no folder fresh (cwd)"),
        ('@program(["cat", os.path.abspath("new.txt")], RATE)', "has no new.txt"),
        ("@train('cosmoflow', preset='smoke', steps=1)", "its code is the installed pytest-mlhpc's"),
    ],
)
def test_a_test_that_the_revision_cannot_run_is_left_out_and_says_why(suite, checkout, test, reason):
    checkout.write("new.txt", "rate: 1\n")
    checkout.write("new.sh", "#!/bin/sh\necho rate: 1\n", 0o755)
    (suite.folder / "fresh").mkdir()
    suite.write(f"import os\n{SCRIPT}\n{test}\ndef test_it(run): pass\n")
    result = suite.run(OLD)
    result.expect(0, passed=1)
    (line,) = [
        line for line in " ".join(output(result).split()).split("suite.py::") if line.startswith("test_it")
    ][:1]
    assert reason in line


def test_a_run_that_goes_before_is_made_once_and_so_may_have_no_file_of_the_checkout(suite, checkout):
    suite.write("""
from pytest_mlhpc import prepare
data = prepare("sh -c 'cp rate.txt out.txt'", files=["rate.txt"], artifacts=["out.txt"])
plain = prepare("sh -c 'echo 1 > out.txt'", artifacts=["out.txt"])

@program("./rate.sh {data}", RATE)
def test_data(run, data): pass

@program("./rate.sh {plain}", RATE)
def test_plain(run, plain): pass
""")
    result = suite.run(OLD)
    result.expect(0, "test_plain*100 items/s*50 items/s*better", passed=1)
    assert "the run data that it needs is made once for both sides" in " ".join(output(result).split())


@pytest.mark.parametrize("collect", [(), ("--collect-only",)], ids=["run", "collect"])
@pytest.mark.parametrize(
    ("revision", "said"),
    [
        ("odl", "has no such revision (did you mean 'old'?)"),
        ("--upload-pack=x", "has no such revision"),
        ("HEAD", "both sides are the same"),
        ("new", "both sides are the same"),
    ],
)
def test_a_revision_that_cannot_be_compared_is_refused(suite, checkout, revision, said, collect):
    result = suite.run(f"--mlhpc-against=rev={revision}", *collect)
    assert result.ret == 4, output(result)
    assert said in " ".join(output(result).split())
    assert "Traceback" not in output(result)
    assert nothing_is_left(suite, checkout)


def test_collecting_alone_checks_nothing_out(suite, checkout):
    suite.run(OLD, "--collect-only", "-q").expect(0, "*test_script*")
    assert not suite.state.exists()
    assert nothing_is_left(suite, checkout)


def test_workers_of_xdist_share_the_worktree_of_the_session(suite, checkout):
    suite.write(SCRIPT + SCRIPT.replace("test_script", "test_other"))
    result = suite.run_workers(OLD)
    result.expect(0, "over all*better", passed=2)
    assert not list(suite.state.glob("worktrees/*"))
    assert checkout.worktrees() == []


def test_an_error_of_collection_leaves_no_worktree(suite, checkout):
    suite.write("import nothing_of_this_name\n")
    assert suite.run(OLD).ret == 2
    assert not list(suite.state.glob("worktrees/*"))
    assert checkout.worktrees() == []


def end_while_a_program_runs(suite, number=signal.SIGKILL):
    """End the session of a suite by a signal while a program of it runs."""
    begun = suite.folder / "ignored"
    suite.write(f"""
@program("sh -c 'cat rate.txt && touch {begun} && exec sleep 600'", RATE, files=["rate.txt"])
def test_it(run): pass
""")
    suite.end_by(number, begun, OLD)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_the_next_session_removes_the_worktree_of_a_killed_one(suite, checkout, number):
    end_while_a_program_runs(suite, number)
    assert (len(checkout.worktrees()) == 1) == (number == signal.SIGKILL)
    suite.write("@job()\ndef test_next(run): pass\n")
    suite.run().expect(0, passed=1)
    assert checkout.worktrees() == []
    assert not [*suite.state.glob("worktrees/*"), *suite.state.glob("ledger/*.jsonl")]


def test_reaping_removes_the_worktree_of_a_killed_session(suite, checkout, mlhpc):
    end_while_a_program_runs(suite)
    assert len(checkout.worktrees()) == 1
    mlhpc("reap")
    assert checkout.worktrees() == []


def test_a_session_leaves_the_worktree_of_a_living_one(suite, checkout):
    begun, wait = suite.folder / "ignored", suite.folder / "__pycache__" / "wait"
    wait.parent.mkdir()
    wait.touch()
    suite.write(f"""
@program("sh -c 'touch {begun}; while test -e {wait}; do sleep 0.05; done; ./rate.sh'", RATE, files=["rate.sh"])
def test_it(run): pass
""")
    with suite.start(OLD) as session:
        wait_for(begun.exists)
        (tree,) = checkout.worktrees()
        suite.write("@job()\ndef test_next(run): pass\n", "test_next.py")
        suite.run("test_next.py").expect(0, passed=1)
        assert Path(tree, "rate.sh").exists()
        wait.unlink()
        assert session.wait() == 0
    assert checkout.worktrees() == []


def test_what_git_knows_of_a_worktree_whose_state_directory_was_removed_is_forgotten(suite, checkout):
    end_while_a_program_runs(suite)
    shutil.rmtree(suite.state)
    suite.write(SCRIPT)
    suite.run(OLD).expect(0, passed=1)
    assert checkout.worktrees() == []
