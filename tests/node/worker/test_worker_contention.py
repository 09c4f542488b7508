import os

import pytest
from file_trees import write_tree
from hypothesis import given
from hypothesis import strategies as st
from rank_helpers import HERE, ROOT

from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.telemetry.contention import Snapshot
from pytest_mlhpc.node.worker import environment

PRESSURE = (
    "some avg10=12.50 avg60=0.32 avg300=0.07 total=4000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
)
STAT = "cpu  100 10 50 800 20 5 15 40 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


@pytest.mark.parametrize(
    ("parser", "text", "found"),
    [
        ("load", "0.52 0.58 0.59 1/389 12345\n", 0.52),
        ("pressure", PRESSURE, (0.125, 4_000_000.0)),
        ("stat", STAT, (180, 40, 1040)),
        ("throttled", "usage_usec 9\nnr_throttled 2\nthrottled_usec 1500\n", 1500.0),
        ("throttled", "nr_periods 1\nthrottled_time 3000000\n", 3000.0),
        ("own", "7 (a (b) c) S 1 7 7 0 -1 0 0 0 0 0 120 30 0 0 20", 150),
        ("cgroup", "0::/user.slice\n", "/user.slice"),
        ("cgroup", "4:memory:/m\n3:cpu,cpuacct:/slurm/job_1\n", "/slurm/job_1"),
    ],
)
def test_the_kernel_s_files_are_read_as_documented(parser, text, found):
    assert getattr(contention, f"parse_{parser}")(text) == found


@given(st.sampled_from(["load", "pressure", "stat", "throttled", "own", "cgroup"]), st.text())
def test_no_text_makes_a_parser_raise(parser, text):
    getattr(contention, f"parse_{parser}")(text)


def test_a_node_that_offers_nothing_yields_nothing(tmp_path):
    assert contention.difference(contention.snapshot(tmp_path), contention.snapshot(tmp_path)) == {}


def test_a_node_is_read_below_its_root(tmp_path):
    files = {
        "proc/loadavg": "1.50 1 1 1/1 1", "proc/stat": STAT, "proc/pressure/cpu": PRESSURE,
        "proc/self/stat": "1 (rank) R" + " 0" * 10 + " 7 3 0", f"proc/self/task/{os.getpid()}/children": "42 43 ",
        "proc/42/stat": "42 (loader) R" + " 0" * 10 + " 1 1 0", "proc/42/task/42/children": "44",
        "proc/44/stat": "44 (its own child) R" + " 0" * 10 + " 5 0 0", "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/cpu.stat": "throttled_usec 5",
    }  # fmt: skip
    found = contention.snapshot(write_tree(tmp_path, files))
    figures = (found.load1, found.jiffies, found.own_jiffies, found.throttled_us, found.pressure_avg10)
    assert figures == (1.5, (180, 40, 1040), 17, 5.0, {"cpu": 0.125})


def test_what_happened_is_the_difference_of_two_moments():
    before = Snapshot(10.0, 0.5, {"cpu": 0.0}, {"cpu": 0.25}, (100, 0, 1000), 0.0, 50)
    after = Snapshot(20.0, 4.0, {"cpu": 1e6}, {"cpu": 0.9}, (1900, 200, 3000), 5e6, 1050)

    expected = {
        "load1_before": 0.5, "cpu_pressure_before": 0.25, "cpu_pressure": 0.1, "busy_cores": 1.8, "steal": 0.1,
        "own_cores": 1.0, "throttled": 0.5,
    }  # fmt: skip
    assert contention.difference(before, after, ticks_per_s=100) == pytest.approx(expected)


def figures_when(elapsed_s, usual_s):
    """Return what a rank says after *elapsed_s*: two processors, of which it had half of one and others the rest."""
    ticks = os.sysconf("SC_CLK_TCK")
    before = Snapshot(0.0, jiffies=(0, 0, 0), own_jiffies=0)
    after = Snapshot(10.0, jiffies=(19 * ticks, 0, 20 * ticks), own_jiffies=5 * ticks)
    return contention.late_figures(before, elapsed_s, usual_s, lambda: after)


@pytest.mark.parametrize(("elapsed_s", "usual_s"), [(10.0, 2.0), (0.1, 2.0), (1e9, None)])
def test_a_run_is_not_late_within_five_times_its_usual_time_or_where_that_is_unknown(elapsed_s, usual_s):
    assert figures_when(elapsed_s, usual_s) is None


def test_a_late_run_says_what_its_node_did_and_how_many_processors_it_has():
    expected = {
        "busy_cores": 1.9,
        "own_cores": 0.5,
        "steal": 0.0,
        "cores": 2.0,
        "elapsed_s": 10.0,
        "usual_s": 1.9,
    }
    assert figures_when(10.0, 1.9) == pytest.approx(expected)


def test_a_late_run_on_a_node_that_offers_nothing_is_not_crowded_out(tmp_path):
    late = contention.late_figures(Snapshot(0.0), 10.0, 1.0, lambda: contention.snapshot(tmp_path))
    assert contention.crowding([late]) == ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([(2.0, 0.9, 0.0)], "other programs used 1.1 cores beside the run's 0.9"),
        ([(2.0, 0.7, 0.0), (1.9, 0.7, 0.0)], "other programs used 0.6 cores beside the run's 1.4"),
        ([(1.0, 1.0, 0.5)], "the hypervisor gave 50.0% of the processor time to others"),
        ([(2.0, 0.9, 0.0), (2.0, 0.9, 0.0)], ""),
        ([(2.0, 1.6, 0.0)], ""),
        ([(1.5, 0.5, 0.0)], ""),
        ([(0.1, 0.1, 0.0)], ""),
        ([], ""),
    ],
    ids=[
        "a busy loop", "beside two ranks", "stolen", "the other rank", "a few percent", "half a core idle", "waits for a disk",
        "no rank",
    ],
)  # fmt: skip
def test_ranks_are_crowded_out_where_others_have_the_processors_and_none_is_idle(ranks, text):
    said = [
        {"busy_cores": busy, "own_cores": own, "steal": steal, "cores": 2.0} for busy, own, steal in ranks
    ]
    assert contention.crowding(said) == text


def test_counters_that_went_back_are_no_negative_shares():
    before = Snapshot(0.0, None, {"io": 5e6}, {}, (10, 10, 100), 10.0, 10)
    after = Snapshot(1.0, None, {"io": 0.0}, {}, (0, 0, 90), 0.0, 0)

    assert all(value == 0.0 for value in contention.difference(before, after).values())


def test_only_variables_that_matter_are_recorded_and_never_a_secret():
    found = environment.variables({"OMP_NUM_THREADS": "4", "HOME": "/root", "FI_OPX_PASSWORD": "x"})
    assert found == {"env_OMP_NUM_THREADS": "4"}


def test_an_environment_names_what_it_knows_and_leaves_out_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("MLHPC_IMAGE_DIGEST", "sha256:" + "a" * 300)

    found = environment.describe("2.13.0", "H100", {"driver": "570", "nccl": ""}, str(tmp_path))

    assert (found["torch"], found["device_model"], found["driver"]) == ("2.13.0", "H100", "570")
    assert len(found["image"]) == 200
    assert not {"nccl", "commit"} & set(found)


def test_the_commit_of_a_checkout_is_found_from_a_folder_inside_it():
    found = environment.commit(HERE)
    assert len(found.get("commit", "")) == (40 if (ROOT / ".git").exists() else 0)
