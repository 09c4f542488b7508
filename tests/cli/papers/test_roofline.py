"""`mlhpc papers roofline`: points and roofs are those of the records, what is missing is said, and the page needs nothing."""

import re

import pytest
from nights_of import store
from roofline_records import kernels, peaks, training

from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.papers.roofline.page import (
    DeviceRoofline,
    Peaks,
    RecordedTraining,
    RooflinePoint,
    attainable,
    axes,
    bound,
    si,
)
from pytest_mlhpc.report.figures import MeasuredMachine


@pytest.fixture
def recorded(state_dir):
    return lambda *records: store(state_dir, records)


@pytest.fixture
def roofline(mlhpc):
    """Return what prints the table."""
    return lambda *words: mlhpc("papers", "roofline", *words).out


def row(text, start):
    """Return the cells of the one line of the table that starts so."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(start)]
    return re.split(r"  +", line)


def point(intensity, precision="fp32", rate=10e9):
    return RooflinePoint("cosmoflow", "p", precision, 8, intensity * 1e6, 1e6, rate, 0.1, {}, 0)


def test_the_roof_is_memory_on_the_left_of_the_ridge_and_computing_on_the_right():
    measured = Peaks({"fp32": 100e9}, 20e9, 10e9, 1, 0)
    assert [attainable(measured, point(one)) for one in (0.5, 5.0, 50.0)] == [10e9, 100e9, 100e9]
    assert [bound(measured, point(one)) for one in (0.5, 5.0, 50.0)] == ["memory", "computing", "computing"]
    assert attainable(measured, point(1.0, "bf16")) is None
    assert attainable(None, point(1.0)) is None
    assert bound(measured, point(1.0, "bf16")) == ""


def test_what_is_far_below_the_roof_is_bound_by_neither():
    measured = Peaks({"fp32": 100e9}, 20e9, 10e9, 1, 0)
    assert [bound(measured, point(50.0, rate=share * 100e9)) for share in (0.11, 0.04)] == [
        "computing",
        "overhead",
    ]


def test_figures_have_three_digits_and_a_prefix():
    texts = {0.5: "0.50 ", 999.4: "999 ", 999.6: "1.00 k", 51.82e9: "51.8 G", 2.5e18: "2.50 E"}
    assert {value: si(value, "B").removesuffix("B") for value in texts} == texts
    assert [si(value, "s") for value in (2.0, 0.0766, 12e-6)] == ["2.00 s", "76.6 ms", "12.0 us"]


def test_a_step_stands_below_the_roof_of_the_best_repetition(recorded, roofline):
    recorded(peaks(), kernels())
    text = roofline()
    assert "cirrus:standard, EPYC, default" in text
    # The best repetition is a tenth above the median; copies are faster than triads.
    assert "bf16 440 GFLOP/s, fp32 110 GFLOP/s, copy 22.0 GB/s, triad 11.0 GB/s" in text
    # Two operations a byte: 44 GFLOP/s at most, of which it reaches 20.
    assert row(text, "cosmoflow") == [
        "cosmoflow smoke batch 8 fp32", "2", "20.0 GFLOP/s", "45.5%", "memory", "10.0 GB/s modelled",
        "convolution 50%, optimizer 25%, other 25%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "fields", "shown"),
    [
        (7e9, {"counter": "resctrl mbm_total_bytes"}, "7.00 GB/s counted"),
        (8e9, {"counter": "uncore_imc cas_count", "devices": 4}, "2.00 GB/s counted"),
    ],
    ids=["of the program", "of the whole node, divided among its devices"],
)
def test_a_counter_that_was_read_stands_for_the_model_and_is_named_so(
    recorded, roofline, rate, fields, shown
):
    recorded(peaks(), kernels(more=(MetricValue("memory_bandwidth_counted", rate, "B/s", "none"),), **fields))
    assert shown in row(roofline(), "cosmoflow")


def test_shares_of_cores_of_different_size_have_roofs_of_their_own(recorded, roofline):
    """Two ranks of one thread each do half of what one rank of two threads does: neither is above the other's roof."""
    both = {"changes": {"benchmark": "k", "definition": "kernels devices=2 of=cosmoflow"}}
    two_ranks = kernels(3, threads="1", devices=2, **both)
    recorded(peaks(environment={"torch_threads": "2"}), kernels(2, threads="2"), two_ranks)
    text = roofline()
    two, one = text.index("default, 2 threads"), text.index("default, 1 thread\n")
    assert row(text[two:], "cosmoflow")[3] == "45.5%"
    assert row(text[one:two], "cosmoflow")[3] == "-"
    assert "cirrus:standard, 1 thread: no peaks are recorded" in text


@pytest.mark.parametrize(
    ("cache", "named"), [("16777216", False), ("16777217", True), ("", False), ("?", False)]
)
def test_vectors_that_caches_hold_in_part_are_named(recorded, roofline, cache, named):
    recorded(peaks(environment={"vector_bytes": "67108864", "cache_bytes": cache}), kernels())
    note = "peaks moved vectors of 67.1 MB, less than 4 times the last caches (16.8 MB)"
    assert (note in roofline()) == named


def test_every_point_and_square_lies_where_its_figure_is():
    trained = (RecordedTraining("t", 1e5, 0),)
    below = RooflinePoint("cosmoflow", "p", "fp32", 8, 2e6, 1e6, 1e9, 0.1, {}, 0, trained=trained)
    x, y = axes(
        DeviceRoofline(MeasuredMachine("s", "p"), None, (below,)), Peaks({"fp32": 100e9}, 20e9, 10e9, 1, 0)
    )
    for scale, value in ((x, below.intensity), (y, below.flops), (y, trained[0].flops)):
        assert scale.low < value < scale.high


def with_parameters(one, **parameters):
    one.parameters.update(parameters)
    return one


AGAIN = {"changes": {"benchmark": "k", "definition": "kernels of=cosmoflow"}}
LARGER = with_parameters(peaks(1, flops=200e9), matrix=8192)
CACHED = with_parameters(peaks(1, flops=200e9, moved=500e9), matrix=8192, vector=4096)
SHARE_OF_ONE = "(share of one of 4): bf16 110 GFLOP/s, fp32 27.5 GFLOP/s, copy 5.50 GB/s"
NO_PEAKS = "no peaks are recorded, so there is no roof: run pytest suites/characterisation -k peaks"
ABOVE = "cosmoflow smoke batch 8 fp32 is above its roof: caches keep what the model of bytes moves"

#: What is recorded -> what stands in the text, and in which columns of the line of CosmoFlow.
SHOWN = {
    "of larger vectors the bandwidth counts, of larger matrices the operations": ([CACHED, peaks(9)], "fp32 220 GFLOP/s, copy 22.0 GB/s", {}),
    "peaks of larger matrices win over newer ones": ([LARGER, peaks(9)], "fp32 220 GFLOP/s", {}),
    "a point above its roof is explained": ([peaks(), kernels(measures={"achieved_flops": 45e9})], ABOVE, {3: "102.3%"}),
    "figures of several devices are divided": ([peaks(devices=4), kernels(devices=2)], SHARE_OF_ONE, {2: "20.0 GFLOP/s", 3: "181.8%"}),
    "the newest run counts": ([peaks(), kernels(2, measures={"achieved_flops": 1e9}, **AGAIN), kernels(5, **AGAIN)], "", {2: "20.0 GFLOP/s"}),
    "without peaks there is no roof": ([kernels()], NO_PEAKS, {3: "-", 4: "-"}),
    "without a peak of its precision there is no roof": ([peaks(), kernels(precision="fp16")], "", {3: "-", 4: "-"}),
    "fields of another version": ([peaks(), with_parameters(kernels(), fields={"no_such_field": 1})], "its record lacks 'cosmoflow has no field no_such_field'", {}),
}  # fmt: skip


@pytest.mark.parametrize(("records", "text", "columns"), SHOWN.values(), ids=SHOWN)
def test_what_is_shown_of(recorded, roofline, records, text, columns):
    recorded(*records)
    shown = roofline()
    assert text in shown
    assert {at: row(shown, "cosmoflow")[at] for at in columns} == columns


@pytest.mark.parametrize("more", [{}, {"seed": 7, "learning_rate": 0.5}])
def test_a_recorded_training_of_the_same_step_stands_beside_it(recorded, roofline, more):
    recorded(peaks(), kernels(), training(**more))
    shown = row(roofline(), "as trained by")
    assert shown == ["as trained by test_cosmoflow devices=1", "15.0 GFLOP/s", "34.1%"]


OTHER_STEPS = [
    {"batch": 4}, {"kernel_size": 2}, {"precision": "bf16"}, {"of": "resnet50"}, {"changes": {"device_model": "another"}},
    {"changes": {"verdict": "regressed"}},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHER_STEPS, ids=str)
def test_a_training_of_another_step_does_not(recorded, roofline, other):
    recorded(peaks(), kernels(), training(**other))
    assert "as trained by" not in roofline()


def test_a_record_that_lacks_figures_is_left_out_and_named(recorded, roofline):
    recorded(peaks(), kernels(measures={"step_bytes_modelled": 0.0}))
    text = roofline()
    assert "is left out, its record lacks operations, bytes or time of a step" in text
    assert "cosmoflow smoke" not in text


def test_one_system_can_be_asked_for(recorded, roofline, mlhpc):
    recorded(peaks(), peaks(2, system="archer2"), kernels(3))
    text = roofline("--system", "archer2:standard")
    assert "archer2:standard" in text
    assert "cirrus" not in text
    err = mlhpc("papers", "roofline", "--system", "archer3").err
    assert "no peaks and no kernels of archer3 are recorded since" in err


def test_nothing_recorded_is_said_and_nothing_is_written(mlhpc, state_dir, tmp_path):
    err = mlhpc("papers", "roofline", "--output", tmp_path / "page.html").err
    assert f"nothing is recorded in {state_dir}; run: pytest suites/characterisation --system NAME" in err
    assert not (tmp_path / "page.html").exists()
    assert not state_dir.exists()


def test_what_is_too_old_is_not_shown(recorded, mlhpc):
    recorded(peaks(created_ns=1_700_000_000 * 10**9))
    mlhpc("papers", "roofline", "--since", "30d")


def test_the_page_asks_for_nothing_and_runs_nothing(recorded, roofline, tmp_path):
    hostile = '<script>alert(1)</script>"\N{GREEK SMALL LETTER ALPHA}'
    device = {"changes": {"device_model": hostile}}
    recorded(peaks(device_model=hostile), kernels(**device), training(**device))
    path = tmp_path / "page.html"
    assert f"{path}: 1 device; open it in a browser" in roofline("--output", path, "--title", hostile)
    text = path.read_text(encoding="ascii")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#945;" in text
    assert "default-src 'none'" in text  # which forbids styles, too
    assert not re.findall(r"""<script|(?:src|href)=["'](?!data:)| style=""", text)
    assert (text.count("<circle"), text.count('class="trained c0"')) == (1, 1)
    assert text.count('class="roof"') == 3  # memory, and both precisions


def test_the_page_goes_to_standard_output_alone(recorded, roofline):
    recorded(peaks(), kernels())
    assert roofline("--output", "-").startswith("<!doctype html>")


def test_a_folder_that_cannot_be_written_is_named(recorded, mlhpc, tmp_path):
    recorded(peaks())
    (tmp_path / "file").write_text("")
    assert (
        f"{tmp_path / 'file'}"
        in mlhpc("papers", "roofline", "--output", tmp_path / "file" / "page.html", code=4).err
    )
