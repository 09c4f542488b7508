"""What a pod's init container finds: an unfit node is told from a set-up that no node would make work."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pods import Pods, run_plan

from pytest_mlhpc.node.batch import probe
from pytest_mlhpc.node.protocol.plan import Plan, VetSettings
from pytest_mlhpc.node.vet.finding import Exit, Fitness, NodeVerdict, VetVerdict
from pytest_mlhpc.node.vet.policy import ExpectedNode

TRAIN = {"workload": "resnet50", "argv": ()}
GPU = {"torch": "2.4", "built": ["cuda"], "kind": "cuda", "models": ["H100", "H100"]}
QUICK = VetSettings(level="quick", need=2, unknown="warn")
NODE, USER = "[node_problem] DIMM 3", "[user_problem] open files: 64"


@pytest.fixture
def probed(tmp_path, monkeypatch, capfdbinary):
    """Probe a node for runs; return the exit code, what the protocol line says, and the words on standard error."""

    def run(*runs, vetting=None, **environ):
        group = Pods(tmp_path, *runs)
        group.plan = replace(group.plan, vetting=vetting)
        for name, value in group.environment(0, **environ).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(probe.signal, "signal", lambda *_: None)
        code = probe.main([str(group.write(0) / "plan.json")])
        line, errors = capfdbinary.readouterr()
        assert line.startswith(b"\x1e")
        assert line.count(b"\n") == 1
        return code, json.loads(line[1:]), errors.decode()

    return run


@pytest.fixture
def judge(tmp_path):
    """Judge a node for a run, without a process of its own."""

    def run(vetting=None, **changes):
        plan = Plan("a", "", "/none", 1, 60.0, (run_plan(**changes),), vetting=vetting)
        return probe.judge(plan, tmp_path, tmp_path)

    return run


@pytest.mark.servers
def test_a_fit_node_is_reported_as_fit_with_what_was_found(tmp_path):
    group = Pods(tmp_path, run_plan(**TRAIN))
    argv = [sys.executable, "-m", "pytest_mlhpc.node.batch.probe", str(group.write(0) / "plan.json")]
    done = subprocess.run(argv, env=group.environment(0), capture_output=True, check=False)
    said = json.loads(done.stdout[1:])
    assert (done.returncode, done.stderr) == (0, b"")
    assert said.items() >= {"pod": "probe", "fit": True, "exit": 0}.items()
    assert said["facts"]["torch"]
    assert said["facts"]["work_free_bytes"] > 0


def test_a_program_needs_no_torch(probed):
    code, said, _ = probed(run_plan(python="/no/python"))
    assert (code, "torch" in said["facts"]) == (0, False)


@pytest.mark.parametrize(
    ("changes", "outcome", "says"),
    [
        ({"python": "/no/python"}, "launch_failed", "there is no interpreter /no/python in the image"),
        ({"python": "/bin/false"}, "import_failed", "/bin/false ended with exit code 1"),
        ({"variables": {"PYTHONHOME": "/nowhere"}}, "import_failed", "ended with exit code"),
    ],
)
def test_a_broken_set_up_is_not_the_nodes_fault(probed, changes, outcome, says):
    code, said, errors = probed(run_plan(**{**TRAIN, **changes}))
    assert (code, said["outcome"], said["fit"]) == (78, outcome, False)
    assert says in said["text"]
    assert said["text"] in errors


def test_an_image_without_torch_is_a_broken_set_up(probed, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    code, said, _ = probed(run_plan(**TRAIN, variables={"PYTHONPATH": ""}), PYTHONPATH=path)
    assert (code, said["outcome"]) == (78, "import_failed")
    assert "torch cannot be imported: ImportError: libcudart.so.12" in said["text"]


def test_a_work_folder_that_cannot_be_made_is_reported(probed, tmp_path):
    (tmp_path / "file").touch()
    code, said, _ = probed(run_plan(), MLHPC_WORK=str(tmp_path / "file" / "work"))
    assert (code, said["outcome"], "cannot write" in said["text"]) == (10, "unfit_nodes", True)


def test_a_plan_that_is_none_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(probe.signal, "signal", lambda *_: None)
    (tmp_path / "plan.json").write_text("{")
    assert probe.main([str(tmp_path / "plan.json")]) == 2
    assert json.loads(capsys.readouterr().out[1:])["outcome"] == "protocol_mismatch"


@pytest.mark.parametrize(
    ("limit", "run", "fault", "words"),
    [
        pytest.param(
            "ROOM", {}, (10, "unfit_nodes"), "bytes free, less than", id="in the work folder it is the node's"
        ),
        pytest.param(
            "SHARED_MEMORY",
            TRAIN,
            (78, "launch_failed"),
            "set shared_memory to more",
            id="in memory the set-up's",
        ),
    ],
)
def test_too_little_room_says_whose_fault_it_is(judge, monkeypatch, limit, run, *, fault, words):
    monkeypatch.setattr(probe, limit, 1 << 62)
    verdict = judge(**run)
    assert (verdict.exit, verdict.outcome) == fault
    assert words in verdict.text


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exec sleep 600", "torch or its devices did not answer within 0.5 s"),
        ("kill -SEGV $$", "torch died of signal 11 when asked for its devices"),
    ],
)
def test_torch_that_does_not_answer_is_the_nodes_fault(judge, stand_in, monkeypatch, script, text):
    monkeypatch.setattr(probe, "ANSWER_S", 0.5 if "sleep" in script else 300.0)
    verdict = judge(**TRAIN, python=stand_in(script), device_type="cuda")
    assert (verdict.exit, verdict.text) == (10, text)


@pytest.mark.parametrize(
    ("changes", "wanted", "code", "outcome", "says"),
    [
        ({}, ("cuda", 2), 0, "", ""),
        ({}, ("cuda", 3), 10, "unfit_nodes", "3 devices of type cuda are needed, torch finds 2"),
        ({}, ("", 0), 0, "", ""),
        ({"kind": "", "models": []}, ("cuda", 1), 10, "unfit_nodes", "1 devices of type cuda are needed, torch finds 0"),
        ({"built": []}, ("cuda", 1), 78, "wrong_device", "is built for CPUs, but the runs want cuda"),
        ({"error": "device 1 does not work: ECC"}, ("cuda", 1), 10, "unfit_nodes", "device 1 does not work: ECC"),
        ({"error": "device 1 does not work: ECC"}, ("", 0), 0, "", ""),
        ({"torch": None, "error": "torch cannot be imported"}, ("", 0), 78, "import_failed", "torch cannot be imported"),
        ({"models": "garbage", "built": 7}, ("cuda", 1), 10, "unfit_nodes", "torch finds 0"),
    ],
)  # fmt: skip
def test_what_torch_says_is_compared_with_what_runs_want(changes, wanted, code, outcome, *, says):
    found = probe.judge_answer({**GPU, **changes}, wanted) or probe.ProbeVerdict()
    assert (found.exit, found.outcome) == (code, outcome)
    assert says in found.text


@pytest.mark.parametrize(
    ("runs", "wanted"),
    [
        (
            [
                {"nodes": 2, "ranks": 8, "device_type": "cuda"},
                {"ranks": 2, "device_type": "cuda"},
                {"ranks": 16},
            ],
            ("cuda", 4),
        ),
        ([{"device_type": "ipu"}], ("", 0)),
    ],
)
def test_devices_are_counted_for_one_pod(runs, wanted):
    assert probe.needed_devices([run_plan(**TRAIN, **run) for run in runs]) == wanted


def test_a_node_is_vetted_alone_without_load(probed, tmp_path):
    code, said, errors = probed(run_plan(), vetting=QUICK)
    assert (code, said["fit"], errors) == (0, True, "")
    assert not (tmp_path / "pod0/work/.mlhpc-vet").exists()


UNDESCRIBED = replace(QUICK, wanted=ExpectedNode(expect={"numa": "77"}))


def test_a_node_that_is_not_as_described_is_unfit_with_the_reason_of_vetting(probed, tmp_path):
    code, said, errors = probed(run_plan(), vetting=UNDESCRIBED)
    assert (code, said["outcome"], said["text"] in errors) == (10, "unfit_nodes", True)
    assert re.fullmatch(r"\[node_problem\] numa is \d+, 77 is described.*", said["text"])
    assert not (tmp_path / "pod0/work/.mlhpc-vet").exists()


def test_a_run_that_is_about_vetting_gets_its_verdict_from_the_agents(probed):
    code, said, _ = probed(run_plan(workload="vet", argv=(), device_type="cuda"), vetting=UNDESCRIBED)
    assert (code, said["fit"]) == (0, True)


def test_vetting_that_leaves_no_verdict_is_a_broken_set_up_with_its_last_lines(judge, stand_in, monkeypatch):
    python = stand_in("echo 'Fatal Python error: no codec'\nexit 3")
    monkeypatch.setattr(probe.sys, "executable", python)
    verdict = judge(QUICK)
    assert (verdict.exit, verdict.outcome) == (78, "launch_failed")
    text = r"the node could not be vetted \(exit code 3\): .*Fatal Python error: no codec"
    assert re.fullmatch(text, verdict.text, re.DOTALL)


def test_vetting_that_does_not_end_is_the_nodes_fault(judge, stand_in, monkeypatch):
    monkeypatch.setattr(probe.sys, "executable", stand_in("exec sleep 600"))
    monkeypatch.setattr(probe, "START_S", 0.2)
    verdict = judge(replace(QUICK, budget_s=0.3))
    assert (verdict.exit, verdict.text) == (10, "vetting did not end within 0.5 s")


@pytest.mark.parametrize(
    ("outcome", "reason", "code"),
    [
        (Exit.READY, "", 0),
        (Exit.TOO_FEW, NODE, 10),
        (Exit.TOO_FEW, USER, 78),  # on any node
        (Exit.UNKNOWN, "[node_problem] the kernel's log is closed", 0),  # the agents' vetting decides
        (Exit.USAGE, "", 78),
        (Exit.INTERNAL, NODE, 78),
    ],
)
def test_only_what_is_wrong_with_this_node_asks_for_another(outcome, reason, code):
    fitness = Fitness.UNFIT if reason else Fitness.FIT
    vetted = VetVerdict(outcome, 1, (NodeVerdict("n1", fitness, reason),), (), (), text="in a sentence")
    found = probe.verdict_of(vetted) or probe.ProbeVerdict()
    assert (found.exit, found.text) == (code, "" if code == 0 else reason or "in a sentence")
