"""What the environment of a session gives to a system's runs is not shown, whatever pytest shows of a failure."""

import json

import pytest

SECRET = "hf_confidential"  # noqa: S105 - of nobody

#: Its program is told the secret, which stands nowhere in this text.
FAILS = """
@script('test "$TOKEN" = "$(printf hf_conf; printf idential)" && echo rate: 4', judge=False)
def test_it(system, run):
    variables = system.environment.variables
    rates = {"of the run": run["rate"].value}
    assert variables == rates
"""


@pytest.fixture
def secret(suite, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    environment = {"python": "python3", "variables": {"TOKEN": "${HF_TOKEN}", "THREADS": "{cores}"}}
    nodes = {"cores": 1, "memory": "1GiB"}
    partition = {"scheduler": "local", "nodes": nodes, "environments": {"default": environment}}
    suite.file("systems.yaml", json.dumps({"systems": {"local": {"partitions": {"p": partition}}}}))
    return suite


def test_a_variable_of_the_environment_is_in_no_traceback_and_no_report(secret):
    secret.write(FAILS)
    result = secret.run("--showlocals", "-vv", "--junitxml=junit.xml")
    shown = "variables *{'THREADS': '[*][*][*]', 'TOKEN': '[*][*][*]'}"
    result.expect(1, shown, "rates *{'of the run': 4.0}", failed=1)
    reported = [*result.outlines, *result.errlines, (secret.folder / "junit.xml").read_text()]
    assert [line for line in reported if SECRET in line] == []
