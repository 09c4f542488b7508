"""Every case of the fault corpus gets the verdict that its source demands."""

import pytest
from corpus import Case, all_cases, findings, outcomes, rows

CASES = all_cases()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_node_gets_the_verdict_that_its_source_demands(case: Case) -> None:
    assert "broken" not in case.data, case.data["broken"]
    said = outcomes(case)
    assert rows(said) == case.expected, "\n".join(f"{one}" for one in findings(said))
    facts = {fact.name: fact.value for outcome in said for fact in outcome.facts}
    readings = {reading.key: reading.value for outcome in said for reading in outcome.readings}
    for name, value in (case.data.get("facts") or {}).items():
        assert facts.get(name) == str(value), facts
    for key, value in (case.data.get("readings") or {}).items():
        assert readings.get(key) == pytest.approx(float(value)), readings
    for finding in findings(said):
        assert finding.reason, finding


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_kind_of_a_case_agrees_with_what_it_expects(case: Case) -> None:
    severities = {row[1] for row in case.expected}
    if case.data["kind"] == "good":
        assert not severities
    elif case.data["kind"] == "bad":
        assert severities & {"WARNING", "CRITICAL"}
    elif case.data["kind"] == "unreadable":
        assert "UNKNOWN" in severities
