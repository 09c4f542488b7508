"""What becomes of a session: outcomes and exit code, what is printed, what is started; a case of sessions.yaml each."""

import pytest
from inner_sessions import cases

SESSIONS = cases("sessions.yaml")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.servers] * ("workers" in case))
        for name, case in SESSIONS.items()
    ],
)
def test_what_becomes_of_a_session(suite, name):
    case = SESSIONS[name]
    suite.write(case["tests"])
    for file, text in case.get("files", {}).items():
        suite.file(file, text) if text is not None else (suite.folder / file).unlink()
    run = suite.run_workers if "workers" in case else suite.run
    result = run(*case.get("options", "").split(), system=case.get("system", "local"))
    result.expect(
        case["code"], *case.get("printed", ()), absent=case.get("absent", ""), **case.get("outcomes", {})
    )
    left = {
        "records": lambda: len(suite.records()),
        "started": suite.started,
        "wrote_nothing": suite.nothing_was_written,
    }
    assert {key: find() for key, find in left.items() if key in case} == {
        key: case[key] for key in left if key in case
    }
