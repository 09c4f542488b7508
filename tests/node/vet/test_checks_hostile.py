"""Whatever files, programs and variables of a node hold, checks answer or say that they cannot tell; they never break."""

from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from corpus import CORPUS, Case, _lay, _loaded, context_of, group_of, machine_of, outcomes
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.checks.job_network import fits, forcing, parse
from pytest_mlhpc.node.vet.checks.kernel_log import events, pci_name
from pytest_mlhpc.node.vet.checks.network import Fabric
from pytest_mlhpc.node.vet.checks.storage import parse_quota
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Done, Unreadable, from_dmesg, from_journal, from_kmsg

BASES = {group: _loaded((CORPUS / group / "base.yaml").resolve()) for group in ("host", "job")}
BASES["host"]["wanted"] = {
    "cores": 4, "memory": 1 << 39, "devices": 2, "accelerator": "cuda", "expect": {"numa": "2", "hugepages": "0"},
}  # fmt: skip
WATCHES = {group: [one for one in all_checks()[1] if group_of(one) == group] for group in BASES}

CHECKS, WATCHES = (
    {group: [one for one in every if group_of(one) == group and one.name != "storage"] for group in BASES}
    for every in all_checks()
)

HOSTILE = yaml.safe_load(Path(__file__).with_name("data").joinpath("hostile.yaml").read_text())
OF_JOBS = {**HOSTILE["host"], **HOSTILE["job"]}
CONTENTS = [
    pytest.param(group, content, id=f"{group}: {name}")
    for group, texts in (("host", HOSTILE["host"]), ("job", OF_JOBS))
    for name, content in {**texts, **HOSTILE["files"]}.items()
]
TEXTS = [
    pytest.param(text if isinstance(text, str) else text["text"] * text["times"], id=name)
    for name, text in OF_JOBS.items()
]


def case(group: str, **more) -> Case:
    return Case("hostile", group, {**BASES[group], **more})


def files_of(group: str) -> list[str]:
    return [name for name in BASES[group]["files"] if name != "/tmp" and "{" not in name]


def everything(of: Case) -> list[Severity]:
    """Return the severities of all that checks and watches say of a case."""
    said = outcomes(of, None, CHECKS[of.group], WATCHES[of.group])
    return [finding.severity for outcome in said for finding in outcome.findings]


def examine_all(group, machine, context) -> None:
    answered = 0
    for check in CHECKS[group]:
        with suppress(Unreadable):
            answered += len(check.examine(machine, context).findings)
    for watch in WATCHES[group]:
        with suppress(Unreadable):
            watch.end(machine, context, watch.sample(machine, watch.start(machine, context)))
    assert answered


@pytest.mark.parametrize(("group", "content"), CONTENTS)
def test_no_content_of_any_file_breaks_a_check(group, content):
    hostile = case(group)
    with machine_of(hostile) as machine:
        for name in files_of(group):
            _lay(machine, {name: content})
            examine_all(group, machine, context_of(hostile))
            _lay(machine, {name: BASES[group]["files"][name]})


@pytest.mark.parametrize(("group", "content"), CONTENTS)
def test_no_content_of_all_files_at_once_breaks_a_check(group, content):
    hostile = {"files": {name: content for name in BASES[group]["files"] if name != "/tmp"}}
    for more in (hostile, {"during": hostile}, {"after": hostile}):
        assert everything(case(group, **more))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("code", [0, 1])
def test_no_output_of_any_program_breaks_a_check(text, code):
    hostile = case("job")
    with machine_of(hostile) as machine:
        real = dict(machine.commands)
        for name in real:
            machine.commands = {**real, name: Done(code, text, text)}
            examine_all("job", machine, context_of(hostile))


@pytest.mark.parametrize("text", TEXTS)
def test_no_value_of_any_variable_breaks_a_check(text):
    hostile = case("job")
    with machine_of(hostile) as machine:
        real = dict(machine.environ)
        for name in (*real, *HOSTILE["variables"]):
            machine.environ = {**real, name: text}
            examine_all("job", machine, context_of(hostile))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("annotation", "files"),
    [
        ("TEXT", {}),
        ("7200", {"/proc/uptime": "TEXT"}),
        ("7200", {"/proc/uptime": "1 1", "/proc/1/stat": "TEXT"}),
    ],
    ids=["its value", "the time since the start", "the first process"],
)
def test_no_annotation_of_a_pod_breaks_the_time_left(text, annotation, files):
    files = {"/etc/podinfo/annotations": f'mlhpc.active-deadline-seconds="{annotation}"', **files}
    files = {name: content.replace("TEXT", text) for name, content in files.items()}
    pod = case("job", files={**BASES["job"]["files"], **files}, environ={}, checks=["job_time"])
    assert everything(pod)


@pytest.mark.parametrize(
    ("group", "severities"), [("host", {Severity.UNKNOWN}), ("job", {Severity.UNKNOWN, Severity.CRITICAL})]
)
def test_a_node_that_shows_nothing_at_all_is_not_fit(group, severities):
    nothing = Case("nothing", group, {"files": {}, "wanted": BASES[group]["wanted"]})
    assert set(everything(nothing)) >= severities


WORDS = st.sampled_from(HOSTILE["kernel log"])


@given(st.lists(st.one_of(WORDS, st.text(max_size=20)), max_size=40).map("".join))
def test_no_text_breaks_the_reading_of_a_kernel_log(text):
    logs = from_kmsg(text.encode(), 1e9, 100.0), from_dmesg(text, 1e9, None), from_journal(text, 1e9)
    for event in (event for messages in logs for event in events(messages, lambda _: True)):
        assert event.weight >= 0
        assert event.at is None or event.at <= 1e9


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("0000:65:00", "0000:65:00.0"),
        ("65:00", "0000:65:00.0"),
        ("00000000:CA:00.0", "0000:ca:00.0"),
        ("00010000:CA:00.0", "00010000:ca:00.0"),
        ("0009:01:00.1", "0009:01:00.1"),
    ],
)
def test_a_pci_address_is_written_as_sysfs_does(text, name):
    assert pci_name(text) == name


def test_a_long_log_of_a_chatty_driver_is_read_to_its_end():
    line = b"6,1,190000000000,-;amdgpu 0000:c1:00.0: amdgpu: 3 correctable hardware errors detected in total in umc block\n"
    messages = from_kmsg(line * (1 << 14), 1e9, 200000.0)
    assert len(messages) == 1 << 14
    assert not [event for event in events(messages, lambda _: False) if event.rule]


@given(st.text(max_size=300))
def test_no_text_breaks_a_reader_of_jobs(text):
    parse(text)
    parse(f"NCCL INFO NET/IB : Using {text}\nNCCL INFO Using network {text}\n")
    parse_quota(text)
    fits(text, "eth0")
    variables = ("NCCL_IB_HCA", "NCCL_NET", "FI_PROVIDER", "NCCL_IB_DISABLE")
    forcing(dict.fromkeys(variables, text), Fabric(("mlx5_0",), ("cxi0",), ("mlx5_1",)))
