"""What docs/accelerators.md says of IPUs: every field is there, and the example is collected."""

import re
import textwrap
from pathlib import Path

import pytest
from pages import COLLECT, section, session

from pytest_mlhpc.node.worker.workloads.fields import compiled_devices

SECTION = section("Graphcore (ipu)")

SYSTEMS = Path(__file__).with_name("ipu_systems.yaml").read_text()


def test_the_table_names_every_field_and_its_limits():
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert [re.findall(r"`(\w+)`", row)[0] for row in rows] == list(compiled_devices.IPU_FIELDS)
    assert f"an even number from {compiled_devices.LEAST_TILES} to {compiled_devices.MOST_TILES}" in SECTION
    assert f"a power of 2 up to {compiled_devices.COUNTS[-1]}" in SECTION


def test_it_says_that_this_never_ran_on_an_ipu():
    assert "none of this has ever run on an IPU" in " ".join(SECTION.split())
    assert "Python 3.8" in SECTION


@pytest.mark.servers
@pytest.mark.parametrize(
    ("accumulation", "code", "text"),
    [
        (16, 0, "1 test collected"),
        (2, 1, "gradient_accumulation: a pipeline of 4 IPUs needs as many micro-batches to a step"),
    ],
    ids=["as it stands", "with a contradiction"],
)
def test_the_example_is_collected_and_a_contradiction_is_not(tmp_path, accumulation, code, text):
    (block,) = re.findall(r"((?:^    .*\n)+)", SECTION, re.MULTILINE)
    example = textwrap.dedent(block).replace(
        "gradient_accumulation=16", f"gradient_accumulation={accumulation}"
    )
    tests = f"from pytest_mlhpc import train\n\n{example}"
    found, output = session(tmp_path, tests, *COLLECT, "--system", "pod", systems=SYSTEMS)
    assert (found, text in output) == (code, True), output
