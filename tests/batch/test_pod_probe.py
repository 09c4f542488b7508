"""What a pod's init container finds: an unfit node is told from a set-up that no node would make work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from pods import Pods, run_plan

from pytest_mlhpc.batch import probe
from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.vet.check import Wanted
from pytest_mlhpc.vet.settings import Settings
from pytest_mlhpc.vet.verdict import Exit, Fitness, NodeVerdict, Verdict

pytestmark = pytest.mark.servers  # a Python with torch each

TRAIN = {"workload": "resnet50", "argv": ()}
GPU = {"torch": "2.4", "built": ["cuda"], "kind": "cuda", "models": ["H100", "H100"]}


def plan(*runs, folder="/none") -> Plan:
    return Plan("a", "", str(folder), 1, 60.0, runs or (run_plan(),))


def probed(tmp_path, *runs, vetting: Settings | None = None, **environ: str) -> tuple[int, dict, str]:
    group = Pods(tmp_path, *runs)
    group.plan = replace(group.plan, vetting=vetting)
    home = group.write(0)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.batch.probe", str(home / "plan.json")],
        env=group.environment(0, **environ),
        capture_output=True,
        check=False,
    )
    assert done.stdout.startswith(b"\x1e")
    assert done.stdout.count(b"\n") == 1
    return done.returncode, json.loads(done.stdout[1:]), done.stderr.decode()


def test_a_fit_node_is_said_to_be_fit_with_what_was_seen(tmp_path):
    code, said, words = probed(tmp_path, run_plan(**TRAIN))
    assert (code, said["pod"], said["fit"], said["exit"], words) == (0, "probe", True, 0, "")
    assert said["facts"]["torch"]
    assert said["facts"]["work_free_bytes"] > 0


def test_a_program_needs_no_torch(tmp_path):
    code, said, _ = probed(tmp_path, run_plan(python="/no/python"))
    assert code == 0
    assert "torch" not in said["facts"]


@pytest.mark.parametrize(
    ("changes", "outcome", "says"),
    [
        ({"python": "/no/python"}, "launch_failed", "there is no interpreter /no/python in the image"),
        ({"python": "/bin/false"}, "import_failed", "/bin/false ended with exit code 1"),
        ({"variables": {"PYTHONHOME": "/nowhere"}}, "import_failed", "ended with exit code"),
        ({"device_type": "cuda"}, "wrong_device", "is built for CPUs, but the runs want cuda"),
    ],
)
def test_a_broken_set_up_is_not_the_nodes_fault(tmp_path, changes, outcome, says):
    code, said, words = probed(tmp_path, run_plan(**{**TRAIN, **changes}))
    assert (code, said["outcome"], said["fit"]) == (78, outcome, False)
    assert says in said["text"]
    assert said["text"] in words


def test_an_image_without_torch_is_a_broken_set_up(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    code, said, _ = probed(
        tmp_path, run_plan(**TRAIN, variables={"PYTHONPATH": ""}), PYTHONPATH=hidden(tmp_path)
    )
    assert (code, said["outcome"]) == (78, "import_failed")
    assert "torch cannot be imported: ImportError: libcudart.so.12" in said["text"]


def hidden(tmp_path) -> str:
    return os.pathsep.join([str(tmp_path), str(__file__).rpartition("/tests/")[0]])


def test_a_work_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    code, said, _ = probed(tmp_path, run_plan(), MLHPC_WORK=str(tmp_path / "file" / "work"))
    assert (code, said["outcome"]) == (10, "unfit_nodes")
    assert "cannot write" in said["text"]


def test_a_work_folder_without_room_is_the_nodes_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "ROOM", 1 << 62)
    verdict = probe.judge(plan(), tmp_path, tmp_path)
    assert (verdict.exit, verdict.outcome) == (10, "unfit_nodes")
    assert "bytes free, less than" in verdict.text


def test_too_little_shared_memory_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "SHARED_MEMORY", 1 << 62)
    verdict = probe.judge(plan(run_plan(**TRAIN)), tmp_path, tmp_path)
    assert verdict.exit == 78
    assert verdict.text.endswith("set shared_memory to more")


def test_a_driver_that_never_answers_is_the_nodes_fault(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    verdict = probe.judge(plan(run_plan(**TRAIN, python=str(python))), tmp_path, tmp_path)
    assert (verdict.exit, verdict.text) == (10, "torch or its devices did not answer within 0.5 s")


def test_torch_that_dies_while_it_asks_its_devices_is_the_nodes_fault(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n")
    python.chmod(0o755)
    verdict = probe.judge(plan(run_plan(**TRAIN, python=str(python), device_type="cuda")), tmp_path, tmp_path)
    assert (verdict.exit, verdict.text) == (10, "torch died of signal 11 when asked for its devices")


@pytest.mark.parametrize(
    ("changes", "wanted", "code"),
    [
        ({}, ("cuda", 2), 0),
        ({}, ("cuda", 3), 10),
        ({}, ("", 0), 0),
        ({"kind": "", "models": []}, ("cuda", 1), 10),
        ({"built": []}, ("cuda", 1), 78),
        ({"error": "device 1 does not work: ECC"}, ("cuda", 1), 10),
        ({"error": "device 1 does not work: ECC"}, ("", 0), 0),
        ({"torch": None, "error": "torch cannot be imported"}, ("", 0), 78),
        ({"models": "garbage", "built": 7}, ("cuda", 1), 10),
    ],
)
def test_what_torch_says_is_compared_with_what_runs_want(changes, wanted, code):
    found = probe.judge_answer({**GPU, **changes}, wanted)
    assert (found.exit if found else 0) == code


def test_devices_are_counted_for_one_pod():
    runs = [
        run_plan(**TRAIN, nodes=2, ranks=8, device_type="cuda"),
        run_plan(**TRAIN, ranks=2, device_type="cuda"),
        run_plan(**TRAIN, ranks=16),
    ]
    assert probe.devices_wanted(runs) == ("cuda", 4)
    assert probe.devices_wanted([run_plan(**TRAIN, device_type="ipu")]) == ("", 0)


def test_a_plan_that_is_none_is_told(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.probe", str(tmp_path / "plan.json")]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout[1:])["outcome"] == "protocol_mismatch"


QUICK = Settings(level="quick", need=2, unknown="warn")


def test_a_node_is_vetted_alone_without_load(tmp_path):
    code, said, words = probed(tmp_path, run_plan(), vetting=QUICK)
    assert (code, said["fit"], words) == (0, True, "")
    assert not (tmp_path / "pod0/work/.mlhpc-vet").exists()


def test_a_node_that_is_not_as_described_is_unfit_in_the_words_of_vetting(tmp_path):
    wanted = Wanted(expect={"numa": "77"})
    code, said, words = probed(tmp_path, run_plan(), vetting=replace(QUICK, wanted=wanted))
    assert (code, said["outcome"]) == (10, "unfit_nodes")
    assert re.fullmatch(r"\[node_problem\] numa is \d+, 77 is described.*", said["text"])
    assert said["text"] in words
    assert not (tmp_path / "pod0/work/.mlhpc-vet").exists()


def test_a_run_that_is_about_vetting_gets_its_verdict_from_the_agents(tmp_path):
    vetting = replace(QUICK, wanted=Wanted(expect={"numa": "77"}))
    code, said, _ = probed(tmp_path, run_plan(workload="vet", argv=(), device_type="cuda"), vetting=vetting)
    assert (code, said["fit"]) == (0, True)


def test_vetting_that_leaves_no_verdict_is_a_broken_set_up_with_its_last_words(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Fatal Python error: no codec'\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(python))
    verdict = probe.judge(replace(plan(), vetting=QUICK), tmp_path, tmp_path)
    assert (verdict.exit, verdict.outcome) == (78, "launch_failed")
    assert verdict.text.startswith("the node could not be vetted (exit code 3): ")
    assert verdict.text.endswith("Fatal Python error: no codec")


def test_vetting_that_does_not_end_is_the_nodes_fault(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(probe.sys, "executable", str(python))
    monkeypatch.setattr(probe, "START_S", 0.2)
    verdict = probe.judge(replace(plan(), vetting=replace(QUICK, budget_s=0.3)), tmp_path, tmp_path)
    assert (verdict.exit, verdict.text) == (10, "vetting did not end within 0.5 s")


NODE, USER = "[node_problem] DIMM 3", "[user_problem] open files: 64"


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
    vetted = Verdict(outcome, 1, (NodeVerdict("n1", fitness, reason),), (), (), text="in a sentence")
    found = probe.verdict_of(vetted)
    assert (found.exit if found else 0) == code
    assert (found.text if found else "") == ("" if code == 0 else reason or "in a sentence")
