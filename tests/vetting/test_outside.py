"""`mlhpc vet --system`: nodes are had, vetted and given back; wrong targets are refused in words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc import cli as top
from pytest_mlhpc.node.vet.finding import Exit, Fitness, NodeVerdict, VetVerdict
from pytest_mlhpc.vetting.outside import exit_of, merged

ROOT = Path(__file__).parents[2]

SYSTEMS = (
    "schema: 1\nsystems: {here: {partitions: {cpu: {scheduler: local, accelerator: cpu, preset: smoke, "
    'vet: {level: "off", unknown: UNKNOWN, expect: EXPECT}}}}}\n'
)


def verdict(exit_: Exit, *hosts: str) -> VetVerdict:
    fit = exit_ is Exit.READY
    nodes = tuple(NodeVerdict(host, Fitness.FIT if fit else Fitness.UNFIT) for host in hosts)
    return VetVerdict(exit_, len(hosts), nodes, hosts if fit else (), () if fit else hosts)


def vet(
    folder: Path, *words: str, expect: str = "{}", unknown: str = "warn", torch: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder that has a systems.yaml; without *torch*, so that nothing is computed, unless it is asked for."""
    missing = folder / "missing"
    missing.mkdir(exist_ok=True)
    (missing / "torch.py").write_text("raise ImportError('there is none')")
    (folder / "systems.yaml").write_text(SYSTEMS.replace("EXPECT", expect).replace("UNKNOWN", unknown))
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "vet", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT) if torch else f"{missing}{os.pathsep}{ROOT}"}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.servers
def test_a_fit_machine_is_ready_and_its_files_are_written(tmp_path):
    done = vet(tmp_path, "--system", "here", "--output", "found")
    assert done.returncode == Exit.READY, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("GO 1/1 node, ")
    noise = [word for word in ("[100%]", "passed", "benchmarks") if word in done.stdout]
    assert noise == [], "nobody asked for a test"
    assert json.loads((tmp_path / "found/verdict.json").read_text())["exclude"] == []


@pytest.mark.servers
def test_a_first_vetting_of_a_healthy_machine_is_not_compared_and_the_second_is_with_the_first(tmp_path):
    first = vet(tmp_path, "--system", "here", torch=True, unknown="fail")
    assert first.returncode == Exit.NOT_COMPARED, first.stdout + first.stderr
    assert first.stdout.splitlines()[-1].startswith("GO, not compared: 1/1 node healthy, ")
    second = vet(tmp_path, "--system", "here", torch=True, unknown="fail")
    assert second.returncode == Exit.READY, second.stdout + second.stderr
    assert "not compared" not in second.stdout


@pytest.mark.servers
def test_a_machine_that_must_be_compared_is_unknown_where_nothing_compares(tmp_path):
    done = vet(tmp_path, "--system", "here", "--require-comparison", torch=True, unknown="fail")
    assert done.returncode == Exit.UNKNOWN, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("NO-GO: cannot judge: 0 of 1 needed nodes are fit, and 1 ")


@pytest.mark.servers
def test_an_unfit_machine_is_named_with_its_reason(tmp_path):
    done = vet(tmp_path, "--system", "here", expect='{numa: "77"}')
    assert done.returncode == Exit.TOO_FEW, done.stdout + done.stderr
    assert "[node_problem] numa is 1, 77 is described" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("NO-GO: 0/1 node fit, 1 needed")


def test_a_system_that_does_not_exist_is_refused(tmp_path):
    done = vet(tmp_path, "--system", "heer")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert "unknown system 'heer' (did you mean 'here'?)" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--system", "here", "--nodes", "0"), "--nodes 0 --need 0: give at least 1 node"),
        (("--system", "here", "--nodes", "2", "--need", "3"), "--nodes 2 --need 3: "),
        (("--system", "here", "--for", "job", "--no-load"), "--for, --no-load: only inside a job"),
        (("--nodes", "2"), "are for --system; inside a job its own nodes are vetted"),
    ],
    ids=["no nodes", "more than there are", "options of a job", "nodes without a system"],
)
def test_options_that_mean_nothing_are_refused(tmp_path, monkeypatch, capsys, words, text):
    (tmp_path / "systems.yaml").write_text(SYSTEMS.replace("EXPECT", "{}"))
    monkeypatch.chdir(tmp_path)
    assert top.main(["vet", *words]) == Exit.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ended", "code"), [(pytest.ExitCode.TESTS_FAILED, Exit.UNKNOWN), (pytest.ExitCode.INTERRUPTED, 130)]
)
def test_no_verdict_is_no_judgement_and_ctrl_c_ends_as_shells_expect(ended, code):
    assert exit_of([], ended) == code


def test_a_refused_session_is_a_wrong_usage_of_which_pytest_alone_speaks():
    assert exit_of([], pytest.ExitCode.USAGE_ERROR) == Exit.USAGE


def test_verdicts_on_two_partitions_make_one_with_the_worse_exit():
    both = merged([verdict(Exit.READY, "a1", "a2"), verdict(Exit.TOO_FEW, "b1")])
    assert (both.exit, both.need) == (Exit.TOO_FEW, 3)
    assert (both.good, both.exclude) == (("a1", "a2"), ("b1",))


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        ((Exit.READY, Exit.NOT_COMPARED), Exit.NOT_COMPARED),
        ((Exit.NOT_COMPARED, Exit.TOO_FEW), Exit.TOO_FEW),
        ((Exit.UNKNOWN, Exit.NOT_COMPARED), Exit.UNKNOWN),
        ((Exit.READY, Exit.READY), Exit.READY),
    ],
)
def test_healthy_nodes_without_comparison_are_better_than_too_few(exits, said):
    assert merged([verdict(code, code.name.lower()) for code in exits]).exit is said
