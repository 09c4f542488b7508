"""Our tables of Xids and SXids say what the vendor's documents say, code by code."""

from __future__ import annotations

import pytest

from pytest_mlhpc.vet.kernel_events import events
from pytest_mlhpc.vet.kernel_messages import Message
from pytest_mlhpc.vet.policies import xid
from pytest_mlhpc.vet.policies.xid import (
    SXID_ALWAYS_FATAL,
    SXID_FATAL,
    SXID_HARMLESS,
    SXID_NOTABLE,
    XIDS,
    Xid,
)

#: NVIDIA Xid catalogue of 2025-10-29, column "immediate resolution"; codes that it calls unused are left out.
CATALOGUE = {
    "RESTART_BM": [79],
    "RESTART_VM": [151],
    "RESET_GPU": [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158],
    "CHECK_MECHANICALS": [54],
    "WORKFLOW_XID_48": [48],
    "WORKFLOW_NVLINK_ERR": [74],
    "WORKFLOW_NVLINK5_ERR": [144, 145, 146, 147, 148, 149, 150],
    "WORKFLOW_XID_45": [45],
    "XID_154": [154],
    "RESTART_APP": [
        *(
            8,
            11,
            13,
            25,
            31,
            32,
            39,
            40,
            41,
            60,
            68,
            69,
            70,
            71,
            72,
            75,
            76,
            77,
            80,
            82,
            83,
            84,
            85,
            86,
            88,
            89,
            94,
        ),
        *range(96, 106),
        *range(126, 136),
        139,
    ],
    "IGNORE": [
        *(14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161),
    ],
}

#: What each resolution makes of a node.
MEANING = {
    "RESTART_BM": Xid.NODE,
    "RESTART_VM": Xid.NODE,
    "RESET_GPU": Xid.NODE,
    "CHECK_MECHANICALS": Xid.NODE,
    "WORKFLOW_XID_48": Xid.NODE,
    "WORKFLOW_NVLINK_ERR": Xid.NODE,
    "WORKFLOW_NVLINK5_ERR": Xid.NODE,
    "WORKFLOW_XID_45": Xid.FOLLOWS,
    "XID_154": Xid.RECOVERY,
    "RESTART_APP": Xid.APPLICATION,
    "IGNORE": Xid.IGNORE,
}

#: Where we are stricter: others fail on them.
STRICTER = {63: Xid.REPEATED, 92: Xid.REPEATED, 121: Xid.C2C}

#: Of 162 to 172 the catalogue gives no resolution: power smoothing on and off, and details of a 48, are harmless.
UNRESOLVED = {162: Xid.IGNORE, 163: Xid.IGNORE, 171: Xid.FOLLOWS, 172: Xid.FOLLOWS}


def test_the_table_is_the_catalogue_but_for_what_it_says_itself() -> None:
    expected = {code: MEANING[word] for word, codes in CATALOGUE.items() for code in codes}
    assert {**expected, **STRICTER, **UNRESOLVED} == XIDS


@pytest.mark.parametrize("code", sorted(XIDS))
def test_each_code_gives_the_rule_of_its_meaning(code: int) -> None:
    message = Message(f"NVRM: Xid (PCI:0000:65:00): {code}, to 0x1 (GPU Reset Required)", 1.0)
    [event] = events([message], lambda _: True)
    rules = {
        Xid.NODE: "xid.node",
        Xid.REPEATED: "xid.repeated",
        Xid.C2C: "xid.c2c",
        Xid.RECOVERY: "xid.recovery",
        Xid.APPLICATION: "",
        Xid.IGNORE: "",
        Xid.FOLLOWS: "",
    }
    assert event.rule == rules[XIDS[code]]
    assert event.device == "0000:65:00.0"


@pytest.mark.parametrize("code", [1, 61, 142, 159, 164, 167, 173, 999999])
def test_a_code_without_a_resolution_is_unlisted(code: int) -> None:
    [event] = events([Message(f"NVRM: Xid (PCI:0000:65:00): {code}, x", 1.0)], lambda _: True)
    assert event.rule == "xid.unlisted"


def test_codes_that_are_named_are_in_the_table() -> None:
    assert set(xid.XID_NAMES) <= set(XIDS)


def test_no_switch_error_is_in_two_tables() -> None:
    tables = [SXID_ALWAYS_FATAL, SXID_FATAL, SXID_NOTABLE, SXID_HARMLESS]
    assert sum(len(table) for table in tables) == len(frozenset().union(*tables))


def rule_of(code: int, rest: str) -> str:
    [event] = events(
        [Message(f"nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): {code}, {rest}", 1.0)], lambda _: False
    )
    return event.rule


@pytest.mark.parametrize("code", sorted(SXID_ALWAYS_FATAL))
@pytest.mark.parametrize("rest", ["Fatal, Link 1", "Non-fatal, Link 1", "Data {0x1}"])
def test_always_fatal_is_fatal_whatever_the_line_says(code: int, rest: str) -> None:
    assert rule_of(code, rest) == "sxid.fatal"


@pytest.mark.parametrize("code", sorted(SXID_FATAL))
def test_fatal_is_fatal_unless_the_line_says_otherwise(code: int) -> None:
    assert rule_of(code, "Data {0x1}") == "sxid.fatal"
    assert not rule_of(code, "Non-fatal, Link 1")


@pytest.mark.parametrize("code", sorted(SXID_NOTABLE))
def test_what_stalls_a_link_is_notable(code: int) -> None:
    assert rule_of(code, "Non-fatal, Link 1") == "sxid.notable"


@pytest.mark.parametrize("code", sorted(SXID_HARMLESS))
def test_what_is_corrected_is_only_mentioned(code: int) -> None:
    assert not rule_of(code, "Non-fatal, Link 1")
    assert not rule_of(code, "Data {0x1}")


def test_a_switch_error_that_nobody_knows_is_notable_unless_it_says_that_it_is_not_fatal() -> None:
    assert rule_of(99999, "Data {0x1}") == "sxid.notable"
    assert not rule_of(99999, "Non-fatal, Link 1")
    assert rule_of(99999, "Fatal, Link 1") == "sxid.fatal"
