"""What the pages on vetting show is true: commands parse, scripts run, manifests and policies are accepted."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.cli import COMMANDS, Parser
from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.command.policy_file import read_policy
from pytest_mlhpc.vet.load import WORKS

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: A command of ours up to what the shell does with it.
COMMAND = re.compile(r"\bmlhpc (vet\b[^|>;#&]*)")

PAGES = ("vetting.md", "vetting-site.md", "vetting-kubernetes.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def lines(page: str) -> list[str]:
    """Return the lines of a page's code, whole where a backslash continues them, without comments."""
    text = (DOCS / page).read_text()
    code = [line for line in text.replace("\\\n", " ").splitlines() if line.startswith("    ")]
    code += [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line.partition(" #")[0] for line in code]


def commands() -> list[list[str]]:
    """Return the arguments of every `mlhpc vet` in the pages' code, and in their manifests."""
    found = [match[1] for page in PAGES for line in lines(page) for match in COMMAND.finditer(line)]
    manifests = [one for page in PAGES for block in blocks(page, "yaml") for one in yaml.safe_load_all(block)]
    pods = [manifest["spec"].get("template", manifest)["spec"] for manifest in manifests]
    containers = [one for pod in pods for one in [*pod.get("initContainers", []), *pod.get("containers", [])]]
    given = [one["command"][1:] for one in containers if one["command"][0] == "mlhpc"]
    return [shlex.split(text.replace("$need", "6")) for text in found] + given


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands()])
def test_every_command_on_the_pages_is_understood(words):
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    place, summary = COMMANDS[name]
    path, _, part = place.partition(":")
    module = __import__(path, fromlist=["add_arguments"])
    parser = Parser(prog=name, description=summary)
    getattr(module, f"add_{part}_arguments" if part else "add_arguments")(parser)
    rest = [word for word in words[len(name.split()) :] if word != "2"]  # of 2>&1
    parser.parse_args(rest)


def test_there_are_commands_on_each_page():
    assert len(commands()) >= 12


@pytest.mark.parametrize("page", PAGES)
def test_scripts_are_bash(page):
    for script in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.stderr == ""


def test_a_site_s_policy_is_accepted(tmp_path):
    [text] = blocks("vetting-site.md", "toml")
    (tmp_path / "vet.toml").write_text(text)
    [bound] = read_policy(tmp_path / "vet.toml")
    assert (bound.key, bound.warn, bound.fail) == ("job.wall_time", 1.05, 1)


def test_the_table_of_job_checks_names_checks_that_exist():
    text = (DOCS / "vetting.md").read_text()
    rows = re.findall(r"^\| .* \| .* \| (`.*`) \|$", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    there = {check.name for check in all_checks()[0] if check.purpose == "job"}
    assert named == there | {work.name for work in WORKS if work.purpose == "job"}


FAKE = """#!/bin/bash
echo "$@" >> "$CALLS"
[ "$2" = apply ] || exit $CODE
"""


@pytest.mark.parametrize("code", [0, 1, 3, 4, 137])
@pytest.mark.parametrize("number", [0, 1])
def test_health_checks_drain_only_what_is_unfit_and_never_fail(tmp_path, code, number):
    script = blocks("vetting-site.md", "bash")[number]
    for name, text in (("mlhpc", FAKE), ("logger", "#!/bin/sh\ncat > /dev/null\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls, temporary = tmp_path / "calls", tmp_path / "tmp"
    calls.touch()
    temporary.mkdir()
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "CODE": str(code), "SLURM_JOB_ID": "1",
        "TMPDIR": str(temporary),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    said = calls.read_text().splitlines()
    assert said[0].startswith("vet quick --no-load --budget ")
    assert len(said) == (2 if code == 1 else 1)
    assert list(temporary.iterdir()) == [], "nothing is left behind"


@pytest.mark.servers
def test_pods_of_a_job_vet_each_other_by_the_variables_of_the_manifest(tmp_path):
    """Two processes in the place of two pods, with what the manifest says but the names of Kubernetes."""
    _, job = yaml.safe_load_all(blocks("vetting-kubernetes.md", "yaml")[1])
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert {entry["name"] for entry in container["env"]} == {
        f"MLHPC_VET_{name}" for name in ("NODES", "RANK", "HOST", "LEADER", "KEY")
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", *container["command"][1:], "--no-load", "--need", "2"]
    pods = []
    for rank in range(2):
        environ = {
            **os.environ, "MLHPC_VET_NODES": "2", "MLHPC_VET_RANK": str(rank), "MLHPC_VET_HOST": f"worker{rank}",
            "MLHPC_VET_LEADER": f"127.0.0.1:{port}", "MLHPC_VET_KEY": "a key", "MLHPC_STATE": str(tmp_path / "state"),
        }  # fmt: skip
        words = [*argv, "--out", str(tmp_path / f"out{rank}")]
        pods.append(
            subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [pod.communicate(timeout=120) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert said[0][0].splitlines()[-1].startswith("GO 2/2 nodes")
    assert (tmp_path / "out0/nodelist.txt").read_text().split() == ["worker0", "worker1"]
