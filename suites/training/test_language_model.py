"""A decoder-only language model on real text: the Python sources of the interpreter that runs it."""

import pytest


@pytest.mark.train("language_model")
def test_language_model(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
