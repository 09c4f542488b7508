"""Whatever files, programs and variables of a node hold, checks for jobs answer or say that they cannot tell; they never break."""

from __future__ import annotations

from contextlib import suppress

import pytest
from corpus import CORPUS, Case, _lay, _loaded, context_of, group_of, machine_of, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.finding import Severity
from pytest_mlhpc.vet.job_disk import parse_quota
from pytest_mlhpc.vet.job_fabric import Fabric
from pytest_mlhpc.vet.job_transport import fits, forcing, parse
from pytest_mlhpc.vet.machine import Done, Unreadable

FABRIC = Fabric(("mlx5_0",), ("cxi0",), ("mlx5_1",))
BASE = _loaded((CORPUS / "job" / "base.yaml").resolve())
CHECKS = [one for one in all_checks()[0] if group_of(one) == "job"]

TEXTS = {
    "empty": "",
    "words": "none of your business",
    "negative": "-1",
    "unicode digits": "²٣",
    "long number": "9" * 5000,
    "not finite": "nan inf",
    "lines": "\n" * 1000,
    "controls": "\x01\x1b[2J\x7f" * 50,
    "options": "--help; $(reboot)",
    "commas": ",,,,",
    "range": "0-99999999999999999999",
}
CONTENTS = {
    **TEXTS,
    "folder": {"folder": True},
    "denied": {"error": "EACCES"},
    "broken": {"error": "EIO"},
    "gone": None,
}

#: In pods and under Slurm, further variables are looked at.
FURTHER = ("SLURM_JOB_END_TIME", "TMPDIR", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FI_PROVIDER",
           "NCCL_NET", "LD_LIBRARY_PATH", "ROCR_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "APPTAINER_CONTAINER")  # fmt: skip


def case(**more) -> Case:
    return Case("hostile", "job", {**BASE, **more})


def examine_all(machine, context) -> list[Severity]:
    said = []
    for check in CHECKS:
        with suppress(Unreadable):
            said += [finding.severity for finding in check.examine(machine, context).findings]
    return said


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_no_content_of_any_file_breaks_a_check(content):
    hostile = case()
    with machine_of(hostile) as machine:
        for name, before in BASE["files"].items():
            _lay(machine, {name: content})
            assert examine_all(machine, context_of(hostile))
            _lay(machine, {name: before})


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_no_content_of_all_files_at_once_breaks_a_check(content):
    assert outcomes(case(files=dict.fromkeys(BASE["files"], content)), None, CHECKS, [])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("code", [0, 1])
def test_no_output_of_any_program_breaks_a_check(text, code):
    hostile = case()
    with machine_of(hostile) as machine:
        real = dict(machine.commands)
        for name in real:
            machine.commands = {**real, name: Done(code, text, text)}
            assert examine_all(machine, context_of(hostile))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_no_value_of_any_variable_breaks_a_check(text):
    hostile = case()
    with machine_of(hostile) as machine:
        real = dict(machine.environ)
        for name in (*real, *FURTHER):
            machine.environ = {**real, name: text}
            assert examine_all(machine, context_of(hostile))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_no_annotation_of_a_pod_breaks_the_time_left(text):
    seconds = 'mlhpc.active-deadline-seconds="7200"'
    for files in (
        {"/etc/podinfo/annotations": f'mlhpc.active-deadline-seconds="{text}"'},
        {"/etc/podinfo/annotations": seconds, "/proc/uptime": text},
        {"/etc/podinfo/annotations": seconds, "/proc/uptime": "1 1", "/proc/1/stat": text},
    ):
        pod = case(files={**BASE["files"], **files}, environ={}, checks=["job_time"])
        assert outcomes(pod, None, CHECKS, [])


def test_a_node_that_shows_nothing_at_all_is_not_fit():
    said = outcomes(Case("nothing", "job", {"files": {}, "wanted": BASE["wanted"]}), None, CHECKS, [])
    severities = {finding.severity for outcome in said for finding in outcome.findings}
    assert severities >= {Severity.UNKNOWN, Severity.CRITICAL}


@settings(max_examples=200)
@given(st.text(max_size=300))
def test_no_text_breaks_a_reader(text):
    parse(text)
    parse(f"NCCL INFO NET/IB : Using {text}\nNCCL INFO Using network {text}\n")
    parse_quota(text)
    fits(text, "eth0")
    forcing(dict.fromkeys(("NCCL_IB_HCA", "NCCL_NET", "FI_PROVIDER", "NCCL_IB_DISABLE"), text), FABRIC)
