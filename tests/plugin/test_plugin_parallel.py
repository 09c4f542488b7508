"""A training that cannot be shared as asked, or that fits into no device, ends the session before anything starts."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.servers  # each test is a pytest of its own


def refused(suite, workers, *texts: str) -> None:
    result = suite.run("--preset", "llama_8b", system="site", n=workers)
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == 4, output
    for text in texts:
        assert output.count(text) == 1, output
    assert "Traceback" not in output
    assert suite.nothing_was_written()


def test_replicas_times_shards_are_the_devices(suite, workers):
    suite.write("""
    @pytest.mark.train("language_model", devices=4)
    @pytest.mark.parametrize("parallel", [{"replicate": 1, "shard": 8}, {"replicas": 4, "shard": 1}])
    def test_shared(run): pass
    """)
    refused(
        suite,
        workers,
        "parallel: replicate=1 x shard=8 are 8 devices, the test has devices=4",
        "parallel: unknown key 'replicas' (did you mean 'replicate'?)",
    )


def test_a_model_that_fits_into_no_device_is_refused_with_what_would_do(suite, workers):
    suite.write("""
    @pytest.mark.train("language_model", devices=4)
    @pytest.mark.parametrize("parallel", [{"replicate": 4, "shard": 1}])
    def test_large(run): pass
    """)
    refused(
        suite,
        workers,
        "needs 119.7GiB unsharded",
        "a rank's share of a node of site:part has 1GiB: shard over at least 120 devices; this test has 4",
    )
