"""What a third party adds by one hook each, in a conftest.py, runs on a node that has none of it installed."""

import pytest
from inner_sessions import CONFTEST, data

pytestmark = pytest.mark.servers  # ranks that import torch


@pytest.fixture
def site(suite):
    """A suite with a workload, a launcher and a receiver of records of its site."""
    suite.file("conftest.py", CONFTEST + data("suites/site_hooks.py.txt"))
    for name in ("site_line", "site_pooled", "site_nicely"):
        suite.file(f"{name}.py", data(f"suites/{name}.py.txt"))
    return suite


def test_workload_launcher_and_receiver_of_a_third_party_take_part(site):
    systems = (site.folder / "systems.yaml").read_text()
    site.file("systems.yaml", systems.replace("cpu: {", "cpu: {launcher: nicely, ", 1))
    site.write("""
    @workload("line")
    def test_line(run):
        assert run["parameters"].value == 9
        assert run["loss"].last < run["loss"].first
    """)
    site.run().expect(0)
    assert site.folder.joinpath("verdicts.txt").read_text() == "new\n"


def test_a_workload_that_the_compiler_refuses_is_skipped_with_its_message(site):
    site.write("""
    @workload("pooled")
    def test_pooled(run): raise AssertionError("no run came to its end")
    """)
    site.run("-rs").expect(
        pytest.ExitCode.NO_TESTS_COLLECTED, "SKIPPED*no kernel matches MaxPool3d*", skipped=1
    )
    assert site.verdicts() == ["cannot_lower"]


def test_the_set_that_a_run_has_made_for_itself_is_removed_after_it(suite):
    suite.write("""
    @train("cosmoflow", data="files", steps=2, warmup=1, judge=False)
    def test_it(run): assert run.measurement.data_source == "files"
    """)
    assert suite.run().ret == 0
    left = sorted(path.name for path in suite.state.glob("runs/*/*/*") if path.is_file())
    assert left == ["batch.log", "plan.json"]
    assert not list(suite.state.glob("runs/*/*/data"))


def test_a_session_whose_systems_file_names_no_preset_says_which_trainings_use(suite):
    systems = (suite.folder / "systems.yaml").read_text()
    broken = "environments: {default: {python: 'false'}}, "  # each run fails at once
    suite.file("systems.yaml", systems.replace("preset: smoke, ", broken, 1))
    suite.write("""
    @train("cosmoflow")
    def test_it(run): pass
    """)
    suite.run().expect(
        1, "preset: reference (default)", "local:cpu: *write `preset: smoke` in the partition*", errors=1
    )
