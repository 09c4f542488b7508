"""What the pages on vetting show is true: commands parse, scripts run, manifests and policies are accepted."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cli_calls import parsed

from pytest_mlhpc.config.policy import read_policy
from pytest_mlhpc.node.agents.nodes import free_port
from pytest_mlhpc.node.vet.checks import all_checks

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: A command of ours up to what the shell does with it.
COMMAND = re.compile(r"\bmlhpc (vet\b[^|>;#&]*)")

PAGES = ("vetting.md", "vetting-site.md", "vetting-kubernetes.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def lines(page: str) -> list[str]:
    """Return the lines of a page's code, whole where a backslash continues them, without comments."""
    text = (DOCS / page).read_text().replace("\\\n", " ")
    code = [line for line in text.splitlines() if line.startswith("    ")]
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
    assert parsed(*(word for word in words if word != "2"))  # of 2>&1


def test_there_are_commands_on_the_pages():
    assert len(commands()) >= 12


@pytest.mark.parametrize("page", PAGES)
def test_scripts_are_bash(page):
    for script in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_site_s_policy_is_accepted(tmp_path):
    [text] = blocks("vetting-checks.md", "toml")
    (tmp_path / "vet.toml").write_text(text)
    [bound] = read_policy(tmp_path / "vet.toml")
    assert (bound.key, bound.warn) == ("amd.ecc_corrected", 50000)
    assert (bound.source, bound.fail) == ("our vendor, ticket 4711", None)


def test_the_section_of_a_large_job_names_its_checks():
    text = (DOCS / "vetting-checks.md").read_text().partition("## Before a large job")[2]
    named = re.findall(r"^- \*\*(\w+)\*\*:", text, re.MULTILINE)
    assert sorted(named) == sorted(check.name for check in all_checks()[0] if check.purpose == "job")


@pytest.mark.parametrize("code", [0, 1, 3, 4, 137])
@pytest.mark.parametrize("number", [0, 1])
def test_health_checks_drain_only_what_is_unfit_and_never_fail(tmp_path, code, number):
    calls, temporary, programs = (tmp_path / name for name in ("calls", "tmp", "bin"))
    temporary.mkdir()
    programs.mkdir()
    fake = f'echo "$@" >> {calls}\n[ "$2" = drain ] || exit {code}\n'
    for name, text in (("mlhpc", fake), ("logger", "cat > /dev/null\n")):
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "TMPDIR": str(temporary)}
    argv = ["bash", "-c", blocks("vetting-site.md", "bash")[number]]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    first, *others = calls.read_text().splitlines()
    assert (first.startswith("vet quick --no-load --budget "), len(others)) == (True, int(code == 1))
    assert list(temporary.iterdir()) == [], "nothing is left behind"


@pytest.mark.servers
def test_pods_of_a_job_vet_each_other_by_the_variables_of_the_manifest(tmp_path):
    """Two processes in the place of two pods, with what the manifest says but the names of Kubernetes."""
    _, job = yaml.safe_load_all(blocks("vetting-kubernetes.md", "yaml")[1])
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {"NODES": "2", "LEADER": f"127.0.0.1:{free_port()}", "KEY": "a key"}
    names = {entry["name"].removeprefix("MLHPC_VET_") for entry in container["env"]}
    assert names == {*variables, "RANK", "HOST"}
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", *container["command"][1:], "--no-load", "--need", "2"]

    def pod(rank):
        given = {**variables, "RANK": str(rank), "HOST": f"worker{rank}"}
        environ = os.environ | {f"MLHPC_VET_{name}": value for name, value in given.items()}
        words = [*argv, "--output", str(tmp_path / f"out{rank}")]
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(pod, range(2))
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert first.stdout.splitlines()[-1].startswith("GO 2/2 nodes")
    assert (tmp_path / "out0/nodelist.txt").read_text().split() == ["worker0", "worker1"]
