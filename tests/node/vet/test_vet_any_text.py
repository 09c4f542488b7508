"""Whatever text comes from a node: files stay well-formed, terminals and shells obey nothing of it."""

import json
import shlex
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from test_vet_files import complaints

from pytest_mlhpc.node.vet.finding import (
    Exit,
    Finding,
    Fitness,
    LinkVerdict,
    NodeVerdict,
    Origin,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.output import fold, last_line, table
from pytest_mlhpc.node.vet.verdict_files import (
    WrittenVerdict,
    environment,
    junit,
    verdict_from_json,
    verdict_to_json,
)
from pytest_mlhpc.vetting.cordon import MOST, is_ours, sealed

#: Every code point, lone surrogates and control characters too.
ANY = st.text(st.characters(exclude_categories=()), max_size=40)
NAME = st.text(st.characters(exclude_categories=()), min_size=1, max_size=40)
NAMES = st.lists(NAME, max_size=3, unique=True).map(tuple)
NUMBER = st.none() | st.floats()
FINDINGS = st.builds(
    Finding, NAME, st.sampled_from(Severity), ANY, ANY, ANY, st.sampled_from(Origin), ANY, NUMBER, ANY, NUMBER, NUMBER, NUMBER,
    st.floats(0, 1e9),
)  # fmt: skip
NODES = st.builds(NodeVerdict, NAME, st.sampled_from(Fitness), ANY, st.lists(FINDINGS, max_size=3).map(tuple))
LINKS = st.builds(LinkVerdict, NAME, NAME, ANY, st.floats(), st.floats())
VERDICTS = st.builds(
    VetVerdict, st.sampled_from(Exit), st.integers(0, 9), st.lists(NODES, max_size=3).map(tuple), NAMES,
    NAMES, st.lists(LINKS, max_size=2).map(tuple), st.just("quick"), st.floats(0, 1e6), ANY,
)  # fmt: skip


@given(VERDICTS)
def test_junit_is_well_formed_xml(verdict):
    ET.fromstring(junit(verdict))  # noqa: S314 - what we have just written


def reported(verdict):
    """Return what of a verdict must survive."""
    nodes = [
        (node.host, [(one.check, one.severity, one.reason) for one in node.findings])
        for node in verdict.nodes
    ]
    return verdict.exit, verdict.good, verdict.exclude, verdict.text, nodes


@given(VERDICTS)
def test_a_verdict_becomes_json_by_the_schema_and_back_with_all_its_text(verdict):
    data = json.loads(json.dumps(verdict_to_json(WrittenVerdict("id", 1, verdict)), allow_nan=False))
    assert complaints(data) == []
    assert reported(verdict_from_json(data).verdict) == reported(verdict)


@given(VERDICTS)
def test_what_is_printed_is_printable_lines_of_which_the_last_says_go_or_no_go(verdict):
    text = table(verdict) + last_line(verdict)
    assert all(line.isprintable() for line in text.split("\n"))
    last = text.split("\n")[-1]
    assert last.startswith({Exit.READY: "GO ", Exit.NOT_COMPARED: "GO, "}.get(verdict.exit, "NO-GO: "))


@given(VERDICTS)
def test_an_environment_file_is_quoted_for_a_shell(verdict):
    try:
        values = environment(verdict)
    except ValueError:
        return  # a name that is none stands in no list
    assert all(shlex.split(f"x={shlex.quote(value)}") == [f"x={value}"] for value in values.values())
    assert values["MLHPC_MASTER_ADDR"] not in set(verdict.exclude) - {""}


@given(ANY, ANY | st.sampled_from(['say "no"', "[user_problem] y", "x" * 10_000]))
def test_a_sealed_reason_is_ours_and_a_printable_line_of_ascii_whatever_it_was_made_of(host, text):
    reason = sealed(host, text)
    assert is_ours(host, reason)
    assert reason.isascii()
    assert reason.isprintable()
    assert len(reason) <= MOST
    assert (reason.count('"'), reason.count("_problem]")) == (0, 1)


@given(st.lists(ANY | st.from_regex(r"[a-z]{1,3}[0-9]{1,12}", fullmatch=True), max_size=20))
def test_any_names_can_be_folded(names):
    assert bool(fold(names)) is any(names)
