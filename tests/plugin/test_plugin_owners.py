"""Who is asked about a test: what its records say, in one process and in two workers."""

import pytest

TESTS = """
@job(owner="ada, bob")
def test_own(run): pass

@job()
@pytest.mark.parametrize("owner", ["cy"])
def test_parameter(run): pass

@job()
def test_file(run): pass
"""


def owners(suite):
    found = {one["node_id"].split("::")[1].partition("[")[0]: one for one in suite.records()}
    assert {one["partition_owner"] for one in found.values()} == {"@hpc/ops"}
    return {name: one["owner"] for name, one in found.items()}


@pytest.fixture
def owned(suite):
    """A suite whose partition has an owner."""
    systems = suite.folder / "systems.yaml"
    text = systems.read_text()
    systems.write_text(text.replace("{scheduler: local,", "{scheduler: local, owner: '@hpc/ops',"))
    suite.write(TESTS)
    return suite


@pytest.mark.parametrize("run", ["run", "run_workers"])
def test_a_record_has_the_owner_of_its_test_or_file_or_partition(owned, run):
    owned.file("CODEOWNERS", "/test_suite.py @file @more\n*.py ada bob\n")
    result = getattr(owned, run)()
    problem = "CODEOWNERS:2: 'ada' is no owner, write @NAME or an address; the line is not used"
    result.expect(0, passed=3)
    assert [line for line in result.outlines if "CODEOWNERS" in line] == [problem]
    assert owners(owned) == {"test_own": "ada, bob", "test_parameter": "cy", "test_file": "@file, @more"}


@pytest.mark.parametrize("content", [b"* @all \xff", b"", b"\0"])
def test_a_file_that_cannot_be_used_fails_no_test(owned, content):
    (owned.folder / "CODEOWNERS").write_bytes(content)
    owned.run().expect(0, passed=3)
    assert owners(owned)["test_file"] == "@hpc/ops"
