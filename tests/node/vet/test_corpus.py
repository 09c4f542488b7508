"""Every case of the fault corpus gets the verdict that its source demands."""

import pytest
from corpus import Case, all_cases, findings, judged, rows

#: What the expected severities of a case of this kind must be.
OF_A_KIND = {
    "good": lambda severities: not severities,
    "bad": lambda severities: severities & {"WARNING", "CRITICAL"},
    "unreadable": lambda severities: "UNKNOWN" in severities,
    "odd": lambda severities: True,
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in all_cases()])
def test_the_node_gets_the_verdict_that_its_source_demands(case: Case) -> None:
    assert "broken" not in case.data, case.data["broken"]
    outcomes, _ = judged(case)
    assert rows(outcomes) == case.expected, "\n".join(f"{one}" for one in findings(outcomes))
    assert OF_A_KIND[case.data["kind"]]({severity for _, severity, _, _ in case.expected})
    facts = {fact.name: fact.value for outcome in outcomes for fact in outcome.facts}
    readings = {reading.key: reading.value for outcome in outcomes for reading in outcome.readings}
    for name, value in (case.data.get("facts") or {}).items():
        assert facts.get(name) == str(value), facts
    for key, value in (case.data.get("readings") or {}).items():
        assert readings.get(key) == pytest.approx(float(value)), readings
    assert all(finding.reason for finding in findings(outcomes))
