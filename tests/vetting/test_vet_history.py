"""What is remembered of vettings: offenders, exclusion for a time, learned figures; torn and foreign files."""

import json
import multiprocessing
import os
import re
import statistics
from dataclasses import replace
from functools import partial

import pytest
from full_disk import Limited

from pytest_mlhpc.cli import main, options
from pytest_mlhpc.cli import vet as history_command
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Exit,
    Finding,
    Fitness,
    NodeReport,
    NodeVerdict,
    Origin,
    PairResult,
    Reading,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.vetting import history as journal
from pytest_mlhpc.vetting.history import (
    FigureEntry,
    JournalQuery,
    NodeEntry,
    StoredVetting,
    append,
    excluded,
    keep,
    learned,
)

HOUR = 3600 * 10**9
NOW = 1_790_000_000 * 10**9  # in September 2026
ENTRY = NodeEntry("v", NOW, "alps", "gpu", "quick", "", "node1", "", "fit")


def bad(host, check="gemm", origin=Origin.NODE, text="15 % slower"):
    finding = Finding(check, Severity.CRITICAL, text, "gpu3", origin=origin)
    return NodeVerdict(host, Fitness.UNFIT, f"[{origin.value}] {text}", (finding,))


def fit(host):
    return NodeVerdict(host, Fitness.FIT)


def unknown(host):
    finding = Finding("kernel_log", Severity.UNKNOWN, "closed")
    return NodeVerdict(host, Fitness.UNKNOWN, "[node_problem] closed", (finding,))


@pytest.fixture
def vetted(state_dir):
    """Keep a vetting that ended so many hours ago."""
    count = iter(range(10_000))

    def vet(*nodes, ago=0.0, report=None, code=Exit.READY, level="quick", system="alps", **settings):
        usable = {Fitness.FIT, Fitness.UNKNOWN} if settings.get("unknown") == "warn" else {Fitness.FIT}
        good = tuple(node.host for node in nodes if node.fitness in usable)
        out = tuple(node.host for node in nodes if node.fitness not in usable)
        verdict = VetVerdict(code, 1, nodes, good, out, level=level)
        told = VetSettings(**settings), system, "gpu", NOW - int(ago * HOUR)
        keep(state_dir, StoredVetting(f"v{next(count)}", verdict, report, *told))

    return vet


def out(state_dir, now=NOW, system="alps", **more):
    return excluded(state_dir, system, "gpu", now, **more)


def only_file(state_dir):
    (path,) = state_dir.glob("vetting/history/*/*.jsonl")
    return path


def figures(state_dir):
    query = JournalQuery(0, NOW, {"kind": "figures"})
    for day in journal.days_since(state_dir, journal.HISTORY, query):
        yield from journal.entries_of_day(state_dir, journal.HISTORY, day, FigureEntry, query)


# --- exclusion


BAD = {"node1": "[node_problem] 15 % slower"}
USERS = Origin.USER


@pytest.mark.parametrize(
    ("later_h", "options", "expected"),
    [
        (0, {}, BAD),
        (23, {}, BAD),
        (25, {}, {}),
        (2, {"exclude_s": 3600.0}, {}),
        (0, {"system": "daint"}, {}),
    ],
    ids=["at once", "within a day", "after a day", "after another time", "on another system"],
)
def test_a_node_found_unfit_is_excluded_for_a_day(vetted, state_dir, later_h, options, expected):
    vetted(bad("node1"), fit("node2"))
    assert out(state_dir, NOW + later_h * HOUR, **options) == expected


@pytest.mark.parametrize(
    ("vettings", "hosts"),
    [
        pytest.param(
            [(3, [bad("node1"), bad("node2")]), (1, [fit("node1"), unknown("node2")])],
            ["node2"],
            id="a later one that passed it ends it",
        ),
        pytest.param([(1, [bad("node1")]), (3, [fit("node1")])], ["node1"], id="time counts, not order"),
        pytest.param([(0, [bad("node1", origin=USERS), unknown("node2")])], [], id="of users, or unknown"),
        pytest.param([(0, [bad("job-0 (node gpu7)")])], ["gpu7"], id="a pod's node by its own name"),
    ],
)
def test_the_latest_that_was_found_of_a_node_counts(vetted, state_dir, vettings, hosts):
    for ago, nodes in vettings:
        vetted(*nodes, ago=ago)
    assert list(out(state_dir)) == hosts


@pytest.mark.parametrize(
    ("failed", "passed", "ends"),
    [
        ({"level": "deep"}, {"level": "quick"}, False),
        ({"level": "quick"}, {"level": "deep"}, True),
        ({}, {"no_load": True}, False),
        ({}, {"single": True}, False),
        ({"no_load": True}, {}, True),
        ({"level": "deep", "no_load": True}, {"level": "quick"}, True),
    ],
)
def test_only_a_vetting_that_looked_as_closely_ends_it(vetted, state_dir, failed, passed, ends):
    vetted(bad("node1"), ago=2, **failed)
    vetted(fit("node1"), ago=1, **passed)
    assert (out(state_dir) == {}) is ends


@pytest.mark.parametrize(("check", "ends"), [("inventory", True), ("pci", True), ("cpu_throttle", False)])
def test_what_any_vetting_looks_at_is_ended_by_one_without_load(vetted, state_dir, check, ends):
    vetted(bad("node1", check), ago=2)
    vetted(fit("node1"), ago=1, no_load=True)
    assert (out(state_dir) == {}) is ends


def test_a_fault_of_the_node_counts_also_beside_a_worse_one_of_its_user(vetted, state_dir):
    both = (*bad("node1", origin=USERS, text="no space").findings, *bad("node1").findings)
    vetted(NodeVerdict("node1", Fitness.UNFIT, "[user_problem] no space", both))
    assert out(state_dir) == BAD


@pytest.mark.parametrize("code", [Exit.INTERNAL, Exit.USAGE])
def test_a_vetting_that_broke_says_nothing_of_nodes(vetted, state_dir, code):
    vetted(bad("node1"), code=code)
    assert (out(state_dir), state_dir.exists()) == ({}, False)


def test_a_time_that_has_not_come_is_not_believed(vetted, state_dir):
    vetted(bad("node1"), ago=-2)
    told = []
    assert out(state_dir, on_problem=told.append) == {}
    assert "is of a time that has not come yet" in told[0]


# --- learned figures


def report(value, hosts=("node1", "node2"), model="H100"):
    readings = tuple(
        Reading("gemm", "gemm", "gemm/bf16", model, value, "FLOP/s", device=f"gpu{index}")
        for index in range(2)
    )
    return Report(
        tuple(NodeReport(host, "boot", {model: 2}, (CheckOutcome(readings=readings),)) for host in hosts)
    )


@pytest.fixture
def teach(vetted):
    """Keep so many vettings, an hour apart."""

    def several(count, *nodes, since=0.0, **more):
        for index in range(count):
            vetted(*nodes, ago=since + index, **more)

    return several


def test_figures_of_good_nodes_become_median_spread_and_count(vetted, state_dir):
    for index, value in enumerate([100.0, 101.0, 102.0, 103.0, 200.0]):
        vetted(fit("node1"), fit("node2"), report=report(value), ago=index)
    assert learned(state_dir, "alps", "gpu", NOW) == (Learned("gemm/bf16", "H100", 102.0, 1.4826, 20),)


def test_few_figures_teach_what_a_node_itself_has_reached(vetted, state_dir):
    vetted(fit("node1"), fit("node2"), report=report(100.0))
    found = learned(state_dir, "alps", "gpu", NOW, hosts=["node1", "node3"])
    assert found == (Learned("gemm/bf16", "H100", 100.0, 0.0, 2, "node1"),)


def test_four_vettings_or_nineteen_figures_teach_nothing(vetted, teach, state_dir):
    for index in range(4):
        vetted(*map(fit, "abcdefgh"), report=report(100.0 + index, tuple("abcdefgh")), ago=index)
    teach(9, fit("node1"), report=report(5.0, ("node1",), "A100"))
    assert learned(state_dir, "alps", "gpu", NOW) == ()


def test_unfit_and_unknown_nodes_teach_nothing(teach, state_dir):
    teach(20, fit("node1"), bad("node2"), report=report(100.0))
    teach(20, unknown("node1"), bad("node2"), report=report(50.0, model="V100"))
    assert [(one.model, one.count) for one in learned(state_dir, "alps", "gpu", NOW)] == [("H100", 40)]


def test_unknown_nodes_that_a_site_uses_all_the_same_teach(teach, state_dir):
    teach(5, unknown("node1"), unknown("node2"), report=report(100.0), unknown="warn")
    assert [(one.count, one.median) for one in learned(state_dir, "alps", "gpu", NOW)] == [(20, 100.0)]


def test_a_device_of_two_rounds_counts_with_its_mean(vetted, state_dir):
    reading = Reading("gemm", "gemm", "k", "H100", 90.0, "FLOP/s", device="gpu0")
    rounds = (reading, replace(reading, value=110.0, round=1))
    vetted(fit("node1"), report=Report((NodeReport("node1", "boot", {}, (CheckOutcome(readings=rounds),)),)))
    assert [entry.values for entry in figures(state_dir)] == [{"node1": (100.0,)}]


def test_exchanges_teach_each_nodes_best_of_the_first_rounds(vetted, state_dir):
    of_key = partial(PairResult, key="gloo/1MiB")
    pairs = (
        of_key(0, "node1", "node2", 10.0),
        of_key(1, "node1", "node3", 12.0),
        of_key(2, "node2", "node3", None, trouble="no answer"),
        of_key(3, "node1", "node2", 99.0),
        of_key(0, "node1", "node2", 98.0, stage="confirm"),
    )
    nodes = tuple(NodeReport(f"node{index}", "boot") for index in (1, 2, 3))
    vetted(fit("node1"), fit("node2"), bad("node3"), report=Report(nodes, pairs))
    (entry,) = figures(state_dir)
    assert (entry.key, entry.model, entry.unit) == ("gloo/1MiB", "", "B/s")
    assert entry.values == {"node1": (12.0,), "node2": (10.0,)}


def test_only_the_latest_thirty_vettings_of_ninety_days_count(vetted, state_dir):
    for index in range(40):
        vetted(fit("node1"), fit("node2"), report=report(float(index)), ago=index)
    (found,) = learned(state_dir, "alps", "gpu", NOW)
    assert (found.count, found.median) == (120, statistics.median(range(30)))
    assert learned(state_dir, "alps", "gpu", NOW + 91 * 24 * HOUR) == ()


def test_forgotten_figures_teach_nothing_and_later_ones_do(vetted, teach, state_dir, history):
    teach(10, fit("node1"), fit("node2"), report=report(100.0), since=24)
    told = history("--forget-figures", "new driver", "--system", "alps:gpu")
    assert told == "figures of alps:gpu are learned anew from 2026-09-21 14:13 UTC on\n"
    assert learned(state_dir, "alps", "gpu", NOW) == ()
    for index in range(1, 6):
        vetted(fit("node1"), fit("node2"), report=report(50.0), ago=-index / 6)
    (found,) = learned(state_dir, "alps", "gpu", NOW + HOUR)
    assert (found.median, found.count) == (50.0, 20)


def test_forgotten_figures_of_one_partition_are_not_those_of_another(teach, state_dir, history):
    teach(5, fit("node1"), fit("node2"), report=report(100.0))
    history("--forget-figures", "new driver", "--system", "alps:cpu")
    assert len(learned(state_dir, "alps", "gpu", NOW)) == 1


@pytest.mark.parametrize(
    "words", [("--system", "alps"), (), ("--system", "alps:gpu", "--forget-figures", "  ")]
)
def test_figures_are_forgotten_only_of_a_named_partition_with_a_reason(mlhpc, words):
    err = mlhpc("vet", "history", "--forget-figures", "new driver", *words, code=2).err
    assert "--forget-figures needs a reason, and --system NAME:PARTITION" in err


# --- the files


def test_a_process_appends_to_one_file_of_its_own(state_dir):
    for number in range(2):
        append(state_dir, journal.HISTORY, "session", NOW, [replace(ENTRY, vetting=f"v{number}")])
    path = only_file(state_dir)
    assert path.relative_to(state_dir).as_posix() == "vetting/history/2026-09-21/session.jsonl"
    assert [json.loads(line)["vetting"] for line in path.read_text().splitlines()] == ["v0", "v1"]


def test_damage_is_named_and_skipped_and_the_rest_is_read(vetted, state_dir):
    vetted(bad("node1"), ago=1)
    path = only_file(state_dir)
    line = json.loads(path.read_text())
    newer, wrong, torn = (
        json.dumps({**line, **change}, separators=(",", ":"))
        for change in ({"schema": 99}, {"fitness": 3}, {"host": "node2"})
    )
    with path.open("a") as file:
        file.write("\n".join(("nonsense", "[]", "[" * 50_000, newer, wrong, torn[:-5])))
    told = []
    assert list(out(state_dir, on_problem=told.append)) == ["node1"]
    assert [text.startswith(f"{path}: byte ") for text in told] == [True] * 6
    assert (f"newer than {journal.SCHEMA}" in told[3], "unfinished last line" in told[-1]) == (True, True)


def test_a_line_after_a_torn_one_is_whole(state_dir):
    path = append(state_dir, journal.HISTORY, "session", NOW, [ENTRY])
    with path.open("a") as file:
        file.write('{"torn')
    append(state_dir, journal.HISTORY, "session", NOW, [ENTRY])
    assert len(list(journal.node_entries_since(state_dir, JournalQuery(0, NOW)))) == 2


def test_a_file_that_cannot_be_read_is_named(vetted, state_dir):
    vetted(bad("node1"))
    folder, told = only_file(state_dir).parent, []
    (folder / "other.jsonl").symlink_to("gone")
    (folder / "looped.jsonl").symlink_to("looped.jsonl")
    assert list(out(state_dir, on_problem=told.append)) == ["node1"]
    assert len(told) == 2


def test_a_full_disk_leaves_the_file_as_it_was(state_dir):
    path = append(state_dir, journal.HISTORY, "session", NOW, [ENTRY])
    before = path.read_bytes()
    full, refused = (
        Limited().full(len(before) + 100),
        pytest.raises(StoreError, match="cannot be written: File too large"),
    )
    with full, refused:
        append(state_dir, journal.HISTORY, "session", NOW, [ENTRY] * 3)
    assert path.read_bytes() == before


def test_a_state_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "state").touch()
    with pytest.raises(StoreError, match=r"state/vetting/.*cannot be written"):
        append(tmp_path / "state", journal.HISTORY, "session", NOW, [ENTRY])


@pytest.mark.parametrize("writer", ["../x", "", ".hidden", "a/b", "x" * 101])
def test_a_writer_cannot_leave_the_folder(state_dir, writer):
    with pytest.raises(StoreError, match="cannot be a file name"):
        append(state_dir, journal.HISTORY, writer, NOW, [ENTRY])


def test_users_of_one_group_share_what_is_kept(vetted, state_dir, request):
    state_dir.mkdir()
    state_dir.chmod(0o2775)
    request.addfinalizer(partial(os.umask, os.umask(0o077)))
    vetted(bad("node1"))
    path = only_file(state_dir)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o7777) == (0o664, 0o2775)


def test_of_a_quantity_that_was_measured_often_older_days_are_not_read(vetted, state_dir):
    for index in range(30):
        vetted(fit("node1"), fit("node2"), report=report(1.0), ago=index / 60)
    vetted(fit("node1"), fit("node2"), report=report(9.0), ago=48)
    (old,) = state_dir.glob("vetting/history/2026-09-19/*.jsonl")
    old.write_text(old.read_text().replace('"unit":"FLOP/s"', '"unit":7'))
    told = []
    (found,) = learned(state_dir, "alps", "gpu", NOW, on_problem=told.append)
    assert (found.count, found.median, told) == (120, 1.0, [])


def test_an_empty_state_directory_knows_nothing(state_dir):
    assert (out(state_dir), learned(state_dir, "alps", "gpu", NOW)) == ({}, ())


# --- mlhpc vet history


@pytest.fixture
def history(state_dir, monkeypatch, capsys):
    for module in (history_command, options):
        monkeypatch.setattr(module.time, "time_ns", lambda: NOW)

    def run(*words):
        code = main(["vet", "history", *words])
        told = capsys.readouterr()
        assert (code, told.err) == (0, "")
        return told.out

    return run


def test_repeated_offenders_come_first(vetted, history):
    for ago in (50, 40, 30):
        vetted(bad("node7", text=f"{ago} % slower"), fit("node8"), fit("node9"), ago=ago)
    vetted(bad("node8", "memory"), fit("node7"), fit("node9"), ago=1)
    since, head, node7, node8, *last = history().splitlines()
    assert since.startswith("since 2026-")
    assert head.split() == ["node", "system", "unfit", "last", "now", "checks", "last", "reason"]
    assert re.search(
        r"node7  alps:gpu  3 of 4(?!.*kept out).*gemm gpu3 3x    \[node_problem\] 30 % slower$", node7
    )
    assert re.search("node8  alps:gpu  1 of 4.*kept out", node8)
    kept_out = "kept out: of later runs, for 24 h unless the partition's exclude_for says otherwise"
    assert last == [kept_out, "1 other node was never unfit"]


def test_where_nobody_is_kept_out_it_is_not_explained(vetted, history):
    vetted(bad("node7"), ago=48)
    assert "kept out" not in history()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--system", "daint"), "node2"),
        (("--system", "alps", "--since", "1d"), "no node was vetted since"),
        (("--system", "alps:gpu"), "node1"),
        (("--system", "alps:cpu"), "no node was vetted since"),
    ],
)
def test_it_can_be_asked_for_one_system_and_a_time(vetted, history, words, told):
    vetted(bad("node1"), ago=48)
    vetted(bad("node2"), system="daint")
    assert re.findall("node1|node2|no node was vetted since", history(*words)) == [told]


def test_programs_get_everything(vetted, history):
    vetted(bad("node1"), fit("node2"), ago=1)
    found = json.loads(history("--json"))
    assert (found["since"], found["never_unfit"]) == ("2026-08-22T14:13:20Z", 1)
    assert found["nodes"] == [
        {
            "node": "node1", "system": "alps", "partition": "gpu", "vettings": 1, "unfit": 1, "unknown": 0,
            "checks": {"gemm gpu3": 1}, "last": "2026-09-21T13:13:20Z", "last_reason": "[node_problem] 15 % slower", "kept_out": True,
        }
    ]  # fmt: skip


def test_nothing_that_a_terminal_would_obey_is_printed(vetted, history):
    vetted(bad("node1", "a\x1b[2J", text="b\x1b]0;x\x07"))
    assert not {"\x1b", "\x07"} & set(history())


def test_where_all_were_fit_or_nothing_was_vetted_that_is_said(vetted, history):
    assert history() == "no node was vetted since 2026-08-22 14:13 UTC\n"
    vetted(fit("node1"), fit("node2"))
    assert re.fullmatch("2 nodes were vetted since .*, none was unfit\n", history())


def test_a_wrong_time_is_a_usage_error(mlhpc):
    assert "--since 'soon'" in mlhpc("vet", "history", "--since", "soon", code=2).err


def write_fifty(state_dir, number):
    for _ in range(50):
        entry = replace(ENTRY, host=f"node{number}")
        append(state_dir, journal.HISTORY, f"writer{number}", NOW, [entry])


def test_two_processes_write_at_the_same_time_and_nothing_is_lost(state_dir):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_fifty, args=(state_dir, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    told = []
    found = list(journal.node_entries_since(state_dir, JournalQuery(0, NOW, on_problem=told.append)))
    assert (len(found), told) == (100, [])
