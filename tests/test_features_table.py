"""The tables of docs/state.md are the generated ones, and say of nothing that it ran which no test has run."""

import json
import time
from pathlib import Path

import pytest
from feature_evidence import is_there, mode_of, of_records, system_of
from feature_table import EVIDENCE, PAGE, ROOT, between, replaced, table, versions
from nights_of import store
from worlds import record

KNOWN = json.loads(EVIDENCE.read_text())


@pytest.mark.parametrize(("name", "made"), [("features", table(KNOWN)), ("versions", versions())])
def test_a_table_of_the_page_is_the_generated_one(name, made):
    """Run `make features`, or `python tests/feature_table.py` where features.json is new already."""
    assert between(PAGE.read_text(encoding="utf-8"), name) == made


def test_the_tests_that_gave_evidence_are_there():
    assert [test for test in KNOWN if not is_there(test)] == []


@pytest.mark.parametrize(
    ("runs", "row"),
    [
        pytest.param(
            [
                ["this machine", "cpu", "cosmoflow", "timed"],
                ["this machine", "cpu", "cosmoflow", "bagging"],
                ["Slurm", "cpu", "deepcam", "timed"],
                ["this machine", "cpu", "other", "storage"],
            ],
            "CPUs, this machine | timed, bagging | - | - | - | storage",
            id="modes that ran in their cells",
        ),
        pytest.param(
            [["Slurm", "cpu", "deepcam", "timed"]],
            "CPUs, Slurm | - | timed | - | - | -",
            id="by their scheduler",
        ),
        pytest.param([], "CPUs, Kubernetes | - | - | - | - | -", id="nothing that ran"),
        pytest.param([], "NVIDIA GPUs (needs hardware, not run) | - | - | - | - | -", id="no such device"),
        pytest.param([], "Graphcore (archived, needs hardware, not run) | - | - | - | - | -", id="a remark"),
        pytest.param(
            [["wse", "wse", "resnet50", "lowered"], ["this machine", "wse", "resnet50", "CPU back-end"]],
            "Cerebras (lowered only) | - | - | lowered, CPU back-end | - | -",
            id="what was only lowered",
        ),
        pytest.param(
            [["ipu", "ipu", "resnet50", "stand-in"]],
            "Graphcore (archived, needs hardware, not run) | - | - | stand-in | - | -",
            id="what only stood in",
        ),
        pytest.param(
            [["Slurm", "cuda", "cosmoflow", "timed"]],
            "NVIDIA GPUs | timed | - | - | - | -",
            id="a device that ran",
        ),
    ],
)
def test_a_row_tells(runs, row):
    assert f"| {row} |" in table({"a": runs}).splitlines()


@pytest.mark.parametrize(
    ("workload", "parameters", "mode"),
    [
        ("cosmoflow", {}, ("cosmoflow", "timed")),
        ("cosmoflow", {"until": "quality"}, ("cosmoflow", "to quality")),
        ("deepcam", {"bagging": [2, 1]}, ("deepcam", "bagging")),
        ("language_model", {"parallel": {"replicate": 2}}, ("language_model", "sharded")),
        ("kernels", {"of": "resnet50"}, ("resnet50", "characterised")),
        ("lowering", {"of": "resnet50"}, ("resnet50", "lowered")),
        ("cosmoflow", {"cerebras": "cpu"}, ("cosmoflow", "CPU back-end")),
        ("storage", {}, ("other", "storage")),
    ],
)
def test_the_mode_is_that_of_the_parameters(workload, parameters, mode):
    assert mode_of(workload, parameters) == mode


def test_the_id_of_a_job_says_which_scheduler_it_was():
    assert [system_of(one) for one in ("", "4711", "mlhpc-abc")] == ["this machine", "Slurm", "Kubernetes"]


def test_only_records_with_a_measurement_of_now_are_evidence(tmp_path):
    now = time.time_ns()
    records = [
        record(1, definition="cosmoflow a=1", job_id="12", created_ns=now),
        record(2, definition="deepcam a=1", measurement=None, failure="it broke", created_ns=now),
        record(3, definition="resnet50 a=1"),  # of a made-up night
    ]
    store(tmp_path / "deep/state", records)
    assert of_records(tmp_path, now) == {("Slurm", "cpu", "cosmoflow", "timed")}


def test_evidence_of_a_session_is_that_of_its_tests_that_passed(pytester):
    pytester.makeconftest(
        (ROOT / "conftest.py").read_text().replace("Path(__file__).parent", f"Path({str(ROOT)!r})")
    )
    pytester.makeini("[pytest]\nmarkers =\n  feature: x\n  servers: x\n")
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.feature("wse", "cosmoflow", "lowered")
        def test_good(): pass

        @pytest.mark.feature("wse", "deepcam", "lowered")
        def test_bad(): assert False
        """
    )
    file = Path(pytester.path) / "features.json"
    not_run = "tests/test_features_table.py::test_the_id_of_a_job_says_which_scheduler_it_was"
    known = ["test_it.py::test_bad", "tests/test_gone.py::test_it", not_run]
    file.write_text(json.dumps({test: [["e", "f", "g", "h"]] for test in known}))
    for more in ([], ["-n", "2"]):
        pytester.runpytest_subprocess("--features", str(file), "-p", "no:cacheprovider", *more)
        assert json.loads(file.read_text()) == {
            "test_it.py::test_good": [["wse", "wse", "cosmoflow", "lowered"]],
            not_run: [["e", "f", "g", "h"]],
        }


@pytest.mark.parametrize("text", ["", "{0}", "{1} {0}", "{0} {0} {1}"])
def test_a_page_without_its_markers_is_refused(text):
    text = text.format("<!-- a: start -->", "<!-- a: end -->")
    with pytest.raises(ValueError, match="must stand there once each, in this order"):
        replaced(text, "a", "x")
