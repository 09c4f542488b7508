"""The workflows of GitHub Actions: what can be seen without GitHub, and their shell with stand-ins of its programs."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from services import ROOT

FOLDER = ROOT / "ci/github"
#: A program that writes down how it was called, and ends and answers as a file of its name says.
STAND_IN = f"""#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([pathlib.Path(__file__).name, *sys.argv[1:]]) + "\\n")
known = here / (pathlib.Path(__file__).name + ".json")
code, text = json.loads(known.read_text()) if known.exists() else (0, "")
print(text)
sys.exit(code)
"""


def workflow(name):
    """Return a workflow, with the ``on:`` that YAML 1.1 reads as true."""
    content = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    return {**content, "on": content[True]}


def inputs_of(name):
    return workflow(name)["on"]["workflow_call"]["inputs"]


@pytest.mark.parametrize("name", ["bench", "publish"])
def test_each_input_is_used_and_each_that_is_used_is_there(name):
    text = (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"\binputs\.(\w+)", text)) == set(inputs_of(name))


def test_the_example_gives_each_workflow_what_it_asks_for():
    jobs = workflow("example")["jobs"]
    assert sorted(job["uses"].rpartition("/")[2] for job in jobs.values()) == ["bench.yml", "publish.yml"]
    for job in jobs.values():
        known = inputs_of(job["uses"].rpartition("/")[2].removesuffix(".yml"))
        needed = {name for name, value in known.items() if value.get("required")}
        assert needed <= set(job["with"]) <= set(known)


@pytest.mark.parametrize("name", ["bench", "publish"])
def test_no_expression_stands_in_shell(name):
    """What a branch is called would be run."""
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []


@pytest.fixture
def shell(tmp_path):
    """Run the shell of a job, where the programs are stand-ins; return its exit code, what it printed, and all calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("pytest", "mlhpc", "gh"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)

    def call(name, job, answers=None, **environ):
        for program, answer in (answers or {}).items():
            (programs / f"{program}.json").write_text(json.dumps(answer))
        (text,) = [step["run"] for step in workflow(name)["jobs"][job]["steps"] if "run" in step]
        done = subprocess.run(
            ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
            cwd=tmp_path,
            env={"PATH": f"{programs}:/usr/bin:/bin", "MLHPC_SETUP": ":", "GITHUB_STEP_SUMMARY": "summary.md", **environ},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        calls = programs / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in lines]

    return call


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (4, 4), (75, 0)])
def test_a_job_measures_and_ends_as_pytest_did_but_for_infrastructure(shell, tmp_path, code, ends):
    found, said, calls = shell(
        "bench", "bench", {"pytest": (code, ""), "mlhpc": (0, "the comparison")},
        MLHPC_SYSTEM="cirrus", MLHPC_SUITE="suites/", MLHPC_OPTIONS="--mlhpc-wait=0 -k 'a'",
    )  # fmt: skip
    assert found == ends
    assert ("::warning::" in said) == (code == 75)
    assert calls[0][:4] == ["pytest", "suites/", "--system=cirrus", "--mlhpc-wait=0"]
    assert [one[1:3] for one in calls[1:]] == [["report", "openmetrics"], ["ci", "note"]]
    assert (tmp_path / "summary.md").read_text() == "the comparison\n"


@pytest.mark.parametrize(
    ("known", "method", "address"), [("", "POST", "all"), ("12\n13", "PATCH", "one/12")], ids=["new", "known"]
)
def test_each_system_has_one_comment_of_a_pull_request(shell, tmp_path, known, method, address):
    (tmp_path / "note.md").write_text("the comparison\n")
    places = {"MLHPC_SYSTEM": "cirrus", "MLHPC_COMMENTS": "all", "MLHPC_COMMENT": "one"}
    code, _, (asked, sent) = shell("bench", "note", {"gh": (0, known)}, **places)
    assert (code, asked[:4], sent[1:5]) == (
        0,
        ["gh", "api", "--paginate", "all"],
        ["api", "--method", method, address],
    )
    assert (tmp_path / "body.md").read_text() == "<!-- mlhpc cirrus -->\nthe comparison\n"


def test_nothing_that_was_measured_is_no_comment(shell, tmp_path):
    (tmp_path / "note.md").touch()
    assert shell("bench", "note", MLHPC_SYSTEM="cirrus")[::2] == (0, [])


def test_a_check_a_report_and_alerts_are_the_commands_of_gitlab(shell, tmp_path):
    (tmp_path / "systems.yaml").touch()
    shell("publish", "check", MLHPC_SUITE="suites/ more/")
    shell("publish", "report", MLHPC_SOURCE="local")
    code, _, calls = shell(
        "publish", "alert", {"mlhpc": (75, "")}, MLHPC_SOURCE="influx", MLHPC_ALERTS="a b.yaml"
    )
    assert code == 0
    assert [one[1:] for one in calls] == [
        ["systems", "check"],
        ["check", "suites/", "more/"],
        ["report", "html", "--output", "public/index.html", "--from", "local"],
        ["alert", "send", "--from", "influx", "--config", "a b.yaml", "--expect", "nightly"],
    ]
    assert (tmp_path / "public").is_dir()
