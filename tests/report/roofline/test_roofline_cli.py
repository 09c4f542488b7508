"""`mlhpc roofline`: points and roofs are those of the records, what is missing is said, and the page needs nothing."""

from __future__ import annotations

import re

import pytest
from roofline_records import kernels, peaks, training

from pytest_mlhpc.cli import main
from pytest_mlhpc.report.machines import Machine
from pytest_mlhpc.report.roofline.chart import axes
from pytest_mlhpc.report.roofline.model import Device, Peaks, Point, Trained, attainable, bound, si
from pytest_mlhpc.results.schema import Metric
from pytest_mlhpc.results.store import Store


@pytest.fixture
def recorded(state_dir):
    store = Store(state_dir, "s1")

    def put(*records):
        for record in records:
            store.append(record)

    yield put
    store.close()


@pytest.fixture
def roofline(capsys):
    """Call the command, expect an exit code, return (what it printed, what it complained about)."""

    def call(*words, code=0):
        capsys.readouterr()
        found = main(["roofline", *words])
        told = capsys.readouterr()
        assert found == code, told.err
        return told.out, told.err

    return call


def row(text, start):
    """Return the cells of the one line of the table that starts so."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(start)]
    return re.split(r"  +", line)


def point(intensity, precision="fp32"):
    return Point("cosmoflow", "p", precision, 8, intensity * 1e6, 1e6, 1e9, 0.1, {}, 0)


def test_the_roof_is_memory_on_the_left_of_the_ridge_and_computing_on_the_right():
    measured = Peaks({"fp32": 100e9}, 20e9, 10e9, 1, 0)
    assert [attainable(measured, point(one)) for one in (0.5, 5.0, 50.0)] == [10e9, 100e9, 100e9]
    assert [bound(measured, point(one)) for one in (0.5, 5.0, 50.0)] == ["memory", "computing", "computing"]
    assert attainable(measured, point(1.0, "bf16")) is None
    assert attainable(None, point(1.0)) is None
    assert bound(measured, point(1.0, "bf16")) == ""


def test_figures_have_three_digits_and_a_prefix():
    shown = [si(value, "FLOP/s") for value in (0.5, 999.4, 999.6, 51.82e9, 1e12, 2.5e18)]
    assert shown == [
        "0.50 FLOP/s",
        "999 FLOP/s",
        "1.00 kFLOP/s",
        "51.8 GFLOP/s",
        "1.00 TFLOP/s",
        "2.50 EFLOP/s",
    ]
    assert [si(value, "s") for value in (2.0, 0.0766, 12e-6)] == ["2.00 s", "76.6 ms", "12.0 us"]


def test_a_step_stands_below_the_roof_of_the_best_repetition(recorded, roofline):
    recorded(peaks(), kernels())
    text, _ = roofline()
    assert "cirrus:standard, EPYC, default" in text
    # The best repetition is a tenth above the median; copies are faster than triads.
    assert "bf16 440 GFLOP/s, fp32 110 GFLOP/s, copy 22.0 GB/s, triad 11.0 GB/s" in text
    # Two operations a byte: 44 GFLOP/s at most, of which it reaches 20.
    assert row(text, "cosmoflow") == [
        "cosmoflow smoke batch 8 fp32", "2", "20.0 GFLOP/s", "45.5%", "memory", "10.0 GB/s modelled",
        "convolution 50%, optimizer 25%, other 25%",
    ]  # fmt: skip


def test_a_counter_that_was_read_stands_for_the_model_and_is_named_so(recorded, roofline):
    counted = Metric("memory_bandwidth_counted", 7e9, "B/s", "none")
    recorded(peaks(), kernels(more=(counted,), counter="resctrl mbm_total_bytes"))
    assert "7.00 GB/s counted" in row(roofline()[0], "cosmoflow")


def test_a_counter_of_the_whole_node_is_divided_among_its_devices(recorded, roofline):
    counted = Metric("memory_bandwidth_counted", 8e9, "B/s", "none")
    recorded(peaks(), kernels(more=(counted,), devices=4, counter="uncore_imc cas_count"))
    assert "2.00 GB/s counted" in row(roofline()[0], "cosmoflow")


def test_shares_of_cores_of_different_size_have_roofs_of_their_own(recorded, roofline):
    """Two ranks of one thread each do half of what one rank of two threads does: neither is above the other's roof."""
    both = {"changes": {"benchmark": "kernels[of=cosmoflow] devices=2 name=k"}}
    recorded(
        peaks(environment={"torch_threads": "2"}),
        kernels(2, threads="2"),
        kernels(3, threads="1", devices=2, **both),
    )
    text, _ = roofline()
    two, one = text.index("default, 2 threads"), text.index("default, 1 thread\n")
    assert row(text[two:], "cosmoflow")[3] == "45.5%"
    assert row(text[one:two], "cosmoflow")[3] == "-"
    assert "cirrus:standard, 1 thread: no peaks are recorded" in text


def test_the_largest_vectors_tell_the_bandwidth_whatever_the_matrices(recorded, roofline):
    cached = peaks(1, flops=200e9, moved=500e9)
    cached.parameters.update(matrix=8192, vector=4096)
    recorded(cached, peaks(9))
    assert "fp32 220 GFLOP/s, copy 22.0 GB/s" in roofline()[0]


@pytest.mark.parametrize(
    ("cache", "told"), [("16777216", False), ("16777217", True), ("", False), ("?", False)]
)
def test_vectors_that_caches_hold_in_part_are_told(recorded, roofline, cache, told):
    recorded(peaks(environment={"vector_bytes": "67108864", "cache_bytes": cache}), kernels())
    text = roofline()[0]
    assert ("peaks moved vectors of 67.1 MB, less than 4 times the last caches (16.8 MB)" in text) == told


def test_a_point_above_its_roof_is_explained(recorded, roofline):
    recorded(peaks(), kernels(measures={"achieved_flops": 45e9}))
    text, _ = roofline()
    assert row(text, "cosmoflow")[3] == "102.3%"
    assert "cosmoflow smoke batch 8 fp32 is above its roof: caches keep what the model of bytes moves" in text


def test_every_point_and_square_lies_where_its_figure_is():
    trained = (Trained("t", 1e5, 0),)
    below = Point("cosmoflow", "p", "fp32", 8, 2e6, 1e6, 1e9, 0.1, {}, 0, trained=trained)
    x, y = axes(Device(Machine("s", "p"), None, (below,)), Peaks({"fp32": 100e9}, 20e9, 10e9, 1, 0))
    for scale, value in ((x, below.intensity), (y, below.flops), (y, trained[0].flops)):
        assert scale.low < value < scale.high


def test_figures_of_several_devices_are_divided(recorded, roofline):
    recorded(peaks(devices=4), kernels(devices=2))
    text, _ = roofline()
    assert "(share of one of 4): bf16 110 GFLOP/s, fp32 27.5 GFLOP/s, copy 5.50 GB/s" in text
    assert row(text, "cosmoflow")[2:4] == ["20.0 GFLOP/s", "181.8%"]


def test_a_recorded_training_of_the_same_step_stands_beside_it(recorded, roofline):
    recorded(peaks(), kernels(), training())
    assert row(roofline()[0], "as trained by") == [
        "as trained by test_cosmoflow devices=1", "15.0 GFLOP/s", "34.1%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"batch": 4},
        {"kernel_size": 2},
        {"precision": "bf16"},
        {"of": "resnet50"},
        {"changes": {"device_model": "another"}},
        {"changes": {"verdict": "regressed"}},
    ],
)
def test_a_training_of_another_step_does_not(recorded, roofline, other):
    recorded(peaks(), kernels(), training(**other))
    assert "as trained by" not in roofline()[0]


def test_seed_and_learning_rate_make_no_other_step(recorded, roofline):
    recorded(peaks(), kernels(), training(seed=7, learning_rate=0.5))
    assert "as trained by" in roofline()[0]


def test_the_newest_run_counts(recorded, roofline):
    same = {"changes": {"benchmark": "kernels[of=cosmoflow] name=k"}}
    recorded(peaks(), kernels(2, measures={"achieved_flops": 1e9}, **same), kernels(5, **same))
    assert row(roofline()[0], "cosmoflow")[2] == "20.0 GFLOP/s"


def test_peaks_of_larger_matrices_win_over_newer_ones(recorded, roofline):
    large = peaks(1, flops=200e9)
    large.parameters["matrix"] = 8192
    recorded(large, peaks(9))
    assert "fp32 220 GFLOP/s" in roofline()[0]


def test_a_device_without_peaks_has_no_roof_and_a_note(recorded, roofline):
    recorded(kernels())
    text, _ = roofline()
    assert row(text, "cosmoflow")[3:5] == ["-", "-"]
    assert "no peaks are recorded, so there is no roof: run pytest suites/characterisation -k peaks" in text


def test_a_precision_without_a_peak_has_no_roof(recorded, roofline):
    recorded(peaks(), kernels(precision="fp16"))
    assert row(roofline()[0], "cosmoflow")[3:5] == ["-", "-"]


def test_a_record_that_lacks_figures_is_left_out_and_named(recorded, roofline):
    recorded(peaks(), kernels(measures={"step_bytes_modelled": 0.0}))
    text, _ = roofline()
    assert "is left out, its record lacks operations, bytes or time of a step" in text
    assert "cosmoflow smoke" not in text


def test_fields_of_another_version_leave_a_record_out(recorded, roofline):
    odd = kernels()
    odd.parameters["fields"] = {"no_such_field": 1}
    recorded(peaks(), odd)
    assert "its record lacks 'cosmoflow has no field no_such_field'" in roofline()[0]


def test_one_system_can_be_asked_for(recorded, roofline):
    recorded(peaks(), peaks(2, system="archer2"), kernels(3))
    text, _ = roofline("--system", "archer2:standard")
    assert "archer2:standard" in text
    assert "cirrus" not in text
    _, complaint = roofline("--system", "archer3", code=5)
    assert "no peaks and no kernels of archer3 are recorded since" in complaint


def test_nothing_recorded_is_said_and_nothing_is_written(roofline, state_dir, tmp_path):
    page = tmp_path / "page.html"
    _, complaint = roofline("--html", str(page), code=5)
    assert (
        f"nothing is recorded in {state_dir}; run: pytest suites/characterisation --system NAME" in complaint
    )
    assert not page.exists()
    assert not state_dir.exists()


def test_what_is_too_old_is_not_shown(recorded, roofline):
    recorded(peaks(created_ns=1_700_000_000 * 10**9))
    roofline("--since", "30d", code=5)


def test_a_time_that_is_none_is_a_usage_error(recorded, roofline):
    recorded(peaks())
    _, complaint = roofline("--since", "yesterdayish", code=4)
    assert "yesterdayish" in complaint


def test_the_page_asks_for_nothing_and_runs_nothing(recorded, roofline, tmp_path):
    hostile = '<script>alert(1)</script>"\N{GREEK SMALL LETTER ALPHA}'
    recorded(
        peaks(device_model=hostile),
        kernels(changes={"device_model": hostile}),
        training(changes={"device_model": hostile}),
    )
    path = tmp_path / "page.html"
    out, _ = roofline("--html", str(path), "--title", hostile)
    assert f"{path}: 1 devices; open it in a browser" in out
    text = path.read_text(encoding="ascii")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#945;" in text
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert " style=" not in text  # the policy forbids it
    assert (text.count("<circle"), text.count('class="trained c0"')) == (1, 1)
    assert text.count('class="roof"') == 3  # memory, and both precisions


def test_the_page_goes_to_standard_output_alone(recorded, roofline):
    recorded(peaks(), kernels())
    out, _ = roofline("--html", "-")
    assert out.startswith("<!doctype html>")


def test_a_folder_that_cannot_be_written_is_named(recorded, roofline, tmp_path):
    recorded(peaks())
    (tmp_path / "file").write_text("")
    _, complaint = roofline("--html", str(tmp_path / "file" / "page.html"), code=3)
    assert str(tmp_path / "file") in complaint
