"""A stranger's first hour with the wheel alone: each command is one that the last one printed, or an example of its help."""

import pytest
from installed_wheel import find_a_slower_program, printed


@pytest.fixture
def project(stranger):
    """Return a stranger with a new project."""
    stranger.said = stranger.type(printed(stranger.type("mlhpc status"), "run"))
    return stranger


@pytest.mark.servers
def test_the_suite_of_a_new_project_passes_at_once(project):
    assert "3 passed" in project.type(printed(project.said, "next"))
    assert "3 new" in project.type("mlhpc status")
    assert "3 tests checked on 1 target: no problem" in project.type("mlhpc check")


def test_a_slower_program_is_found_and_accepted_by_the_printed_commands(project):
    find_a_slower_program(project, printed(project.said, "next"), "local:cpu")
    assert "page.html: 1 benchmark" in project.type("mlhpc report html --output page.html")
    assert (project.folder / "page.html").exists()


@pytest.mark.servers
def test_a_node_and_a_program_are_looked_at_without_a_project(stranger):
    assert "\nGO, not compared: 1/1 node healthy" in stranger.type("mlhpc vet", code=5)
    loop = "import time; end = time.time() + 3\nwhile time.time() < end: pass"
    assert "mlhpc screen: 1. " in stranger.type(f'mlhpc screen -- python3 -c "{loop}"')
