"""Our tables of Xids and SXids say what the vendor's documents say, code by code."""

from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.node.vet.checks.kernel_log import Xid, driver_events, events
from pytest_mlhpc.node.vet.machine import KernelMessage

TABLES = driver_events()
CATALOGUE = yaml.safe_load(Path(__file__).with_name("data").joinpath("xid_catalogue.yaml").read_text())

#: What a resolution other than Xid.NODE makes of a node.
MEANING = {
    "WORKFLOW_XID_45": Xid.FOLLOWS,
    "XID_154": Xid.RECOVERY,
    "RESTART_APP": Xid.APPLICATION,
    "IGNORE": Xid.IGNORE,
}

#: Where we are stricter: others fail on them.
STRICTER = {63: Xid.REPEATED, 92: Xid.REPEATED, 121: Xid.C2C}

#: Of 162 to 172 the catalogue gives no resolution: power smoothing on and off, and details of a 48, are harmless.
UNRESOLVED = {162: Xid.IGNORE, 163: Xid.IGNORE, 171: Xid.FOLLOWS, 172: Xid.FOLLOWS}

#: The rule of each meaning that is a fault.
RULES = {
    Xid.NODE: "xid.node",
    Xid.REPEATED: "xid.repeated",
    Xid.C2C: "xid.c2c",
    Xid.RECOVERY: "xid.recovery",
}


def xid(code: int, rest: str = "to 0x1 (GPU Reset Required)") -> tuple[str, str]:
    """Return rule and device of the kernel's message of an Xid."""
    text = f"NVRM: Xid (PCI:0000:65:00): {code}, {rest}"
    [event] = events([KernelMessage(text, 1.0)], lambda _: True)
    return event.rule, event.device


def sxids(codes: set[int], rest: str) -> set[str]:
    """Return the rules of the kernel's messages of switch errors."""
    texts = [f"nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): {code}, {rest}" for code in codes]
    found = [events([KernelMessage(text, 1.0)], lambda _: False) for text in texts]
    assert all(len(each) == 1 for each in found)
    return {event.rule for each in found for event in each}


def test_the_table_is_the_catalogue_but_for_what_it_says_itself() -> None:
    assert set(MEANING) < set(CATALOGUE)
    expected = {code: MEANING.get(word, Xid.NODE) for word, codes in CATALOGUE.items() for code in codes}
    assert {**expected, **STRICTER, **UNRESOLVED} == TABLES.xids


def test_each_code_gives_the_rule_of_its_meaning() -> None:
    expected = {code: (RULES.get(meaning, ""), "0000:65:00.0") for code, meaning in TABLES.xids.items()}
    assert {code: xid(code) for code in TABLES.xids} == expected


@pytest.mark.parametrize("code", [1, 61, 142, 159, 164, 167, 173, 999999])
def test_a_code_without_a_resolution_is_unlisted(code: int) -> None:
    assert xid(code, "x")[0] == "xid.unlisted"


def test_codes_that_are_named_are_in_the_table_and_no_switch_error_is_in_two() -> None:
    assert set(TABLES.names) <= set(TABLES.xids)
    tables = [TABLES.always_fatal, TABLES.fatal, TABLES.notable, TABLES.harmless]
    assert sum(len(table) for table in tables) == len(frozenset().union(*tables))


@pytest.mark.parametrize(
    ("codes", "rest", "rule"),
    [
        *[(TABLES.always_fatal, rest, "sxid.fatal") for rest in ("Fatal, Link 1", "Non-fatal, Link 1", "Data {0x1}")],
        (TABLES.fatal, "Data {0x1}", "sxid.fatal"),
        (TABLES.fatal, "Non-fatal, Link 1", ""),
        (TABLES.notable, "Non-fatal, Link 1", "sxid.notable"),
        (TABLES.harmless, "Non-fatal, Link 1", ""),
        (TABLES.harmless, "Data {0x1}", ""),
        ({99999}, "Data {0x1}", "sxid.notable"),
        ({99999}, "Non-fatal, Link 1", ""),
        ({99999}, "Fatal, Link 1", "sxid.fatal"),
    ],
)  # fmt: skip
def test_a_switch_error_is_as_bad_as_its_table_and_its_line_say(codes, rest: str, rule: str) -> None:
    assert sxids(codes, rest) == {rule}
