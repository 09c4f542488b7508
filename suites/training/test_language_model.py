"""A decoder-only language model on real text: the Python sources of the interpreter that runs it."""

from pytest_mlhpc import train


@train("language_model")
def test_language_model(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
