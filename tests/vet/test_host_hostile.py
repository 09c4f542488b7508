"""Whatever a node's files hold, checks of the host answer or say that they cannot read; they never break."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from corpus import CORPUS, Case, _lay, _loaded, context_of, group_of, machine_of, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.vet.checks import all_checks
from pytest_mlhpc.vet.finding import Severity
from pytest_mlhpc.vet.kernel_events import events, pci_name
from pytest_mlhpc.vet.kernel_messages import from_dmesg, from_journal, from_kmsg
from pytest_mlhpc.vet.machine import Unreadable

BASE = _loaded((CORPUS / "host" / "base.yaml").resolve())
CHECKS = [one for one in all_checks()[0] if group_of(one) == "host" and one.name != "storage"]
WATCHES = [one for one in all_checks()[1] if group_of(one) == "host"]
WANTED = {
    "cores": 4,
    "memory": 1 << 39,
    "devices": 2,
    "accelerator": "cuda",
    "expect": {"numa": "2", "hugepages": "0"},
}

HOSTILE = {
    "empty": "",
    "words": "none of your business",
    "negative": "-1",
    "unicode digits": "²٣",
    "too long a number": "9" * 5000,
    "not finite": "nan inf",
    "lines": "\n" * 1000,
    "binary": {"hex": "00ff" * 300},
    "folder": {"folder": True},
    "denied": {"error": "EACCES"},
    "broken": {"error": "EIO"},
    "gone": None,
}


def _case(files: dict, **more) -> Case:
    return Case("hostile", "host", {**BASE, "files": {**BASE["files"], **files}, "wanted": WANTED, **more})


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_content_of_any_file_breaks_a_check(content: object) -> None:
    case = _case({})
    context = context_of(case)
    with machine_of(case) as machine:
        for name, before in BASE["files"].items():
            if name != "/tmp" and "{" not in name:
                _lay(machine, {name: content})
                for check in CHECKS:
                    with suppress(Unreadable):
                        check.examine(machine, context)
                for watch in WATCHES:
                    with suppress(Unreadable):
                        state = watch.sample(machine, watch.begin(machine, context))
                        watch.end(machine, context, state)
                _lay(machine, {name: before})


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_content_of_all_files_at_once_breaks_a_check(content: object) -> None:
    said = outcomes(_case({name: content for name in BASE["files"] if name != "/tmp"}), None, CHECKS, WATCHES)
    assert said


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_content_that_comes_during_the_load_breaks_a_watch(content: object) -> None:
    files = {name: content for name in BASE["files"] if name != "/tmp"}
    for when in ("during", "after"):
        outcomes(_case({}, **{when: {"files": files}}), None, [], WATCHES)


def test_a_node_that_shows_nothing_at_all_is_unknown_and_not_fit() -> None:
    case = Case("nothing", "host", {"files": {}, "wanted": WANTED})
    severities = {
        one.severity for outcome in outcomes(case, None, CHECKS, WATCHES) for one in outcome.findings
    }
    assert Severity.UNKNOWN in severities


WORDS = st.sampled_from(
    ["NVRM: Xid (PCI:0000:65:00): ", "79,", "SXid (PCI:", "Fatal", "amdgpu 0000:c1:00.0: ", "uncorrectable hardware errors",
     " detected", "GPU reset", "EDAC MC0: ", "12 UE ", "I/O error, dev ", "sda", "<4>", "[1.5]", "4,1,2,-;", "\n", "Machine Check: 0 Bank 5: ",
     "be00000000800400", "(", ")", ":", "to 0x0 (None)", "\x00", "99999999999999999999"]
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.one_of(WORDS, st.text(max_size=20)), max_size=40).map("".join))
def test_no_text_breaks_the_reading_of_a_kernel_log(text: str) -> None:
    for messages in (
        from_kmsg(text.encode(), 1e9, 100.0),
        from_dmesg(text, 1e9, None),
        from_journal(text, 1e9),
    ):
        for event in events(messages, lambda _: True):
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
def test_a_pci_address_is_written_as_sysfs_does(text: str, name: str) -> None:
    assert pci_name(text) == name


def test_a_long_log_of_a_chatty_driver_is_read_in_no_time(tmp_path: Path) -> None:
    line = b"6,1,190000000000,-;amdgpu 0000:c1:00.0: amdgpu: 3 correctable hardware errors detected in total in umc block\n"
    begun = time.process_time()
    messages = from_kmsg(line * (1 << 16), 1e9, 200000.0)
    assert not [event for event in events(messages, lambda _: False) if event.rule]
    assert time.process_time() - begun < 10, "far from linear"
