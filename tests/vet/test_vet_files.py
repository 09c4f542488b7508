"""The verdict's files: whole, quoted, of this vetting and of no earlier one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import resources

import jsonschema
import pytest
from full_disk import Limited

from pytest_mlhpc.results.schema import from_json
from pytest_mlhpc.vet import files
from pytest_mlhpc.vet.files import FILES, MARK, FilesError, affinity, prepare, read
from pytest_mlhpc.vet.finding import Finding, Origin, Outcome, Reading, Severity
from pytest_mlhpc.vet.judge import judge
from pytest_mlhpc.vet.policy import built_in
from pytest_mlhpc.vet.report import NodeReport, PairResult, Report
from pytest_mlhpc.vet.settings import Settings
from pytest_mlhpc.vet.text import last_line
from pytest_mlhpc.vet.verdict import Exit, Fitness, LinkVerdict, NodeVerdict, Verdict

GOOD = Finding("edac", Severity.PASS, "no memory faults", seconds=0.01)
SLOW = Finding(
    "gemm", Severity.CRITICAL, "15 % slower than its peers", device="gpu3", rule="peers", metric="gemm",
    value=6.0e14, unit="FLOP/s", peer_median=7.1e14, mad=1e12, floor=5.5e14, seconds=3.0,
)  # fmt: skip


def verdict(**changes):
    """Three nodes, of which the first is unfit."""
    given = {
        "exit": Exit.READY,
        "need": 2,
        "nodes": (
            NodeVerdict("node1", Fitness.UNFIT, "[node_problem] 15 % slower", (SLOW, GOOD)),
            NodeVerdict("node2", Fitness.FIT, findings=(GOOD,)),
            NodeVerdict("node3", Fitness.FIT, findings=(GOOD,)),
        ),
        "good": ("node2", "node3"),
        "exclude": ("node1",),
        "links": (LinkVerdict("node2", "node3", "half the speed of its peers", 5e9, 1e10),),
        "seconds": 41.2,
    }
    return Verdict(**{**given, **changes})


def written(out, *arguments, **changes):
    prepare(out).write(verdict(**changes), *arguments)
    return out


def parsed(out):
    return ET.fromstring((out / "junit.xml").read_bytes())  # noqa: S314 - our own file


def schema():
    return json.loads((resources.files("pytest_mlhpc.vet") / "verdict.schema.json").read_text())


def complaints(data):
    validator = jsonschema.Draft202012Validator(schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]


ODD = "\x00\x1b[2Jred\ud800\ufffe <&>]]> \"'\n\u202e"


def odd():
    """Everything that can be odd at once: no figure is finite, no text is harmless."""
    finding = Finding(
        ODD, Severity.UNKNOWN, ODD, ODD, ODD, Origin.USER, ODD, float("nan"), ODD, float("inf"), float("-inf"), None, float("nan"),
    )  # fmt: skip
    return verdict(
        exit=Exit.INTERNAL, text=ODD, nodes=(NodeVerdict("node1", Fitness.UNKNOWN, ODD, (finding,)),),
        good=(), links=(LinkVerdict("node1", "node2", ODD, float("nan"), float("inf")),), seconds=float("nan"),
    )  # fmt: skip


def test_the_schema_is_itself_valid_and_closed():
    jsonschema.Draft202012Validator.check_schema(schema())
    objects = [schema(), *(schema()["$defs"][name] for name in ("node", "finding", "link"))]
    assert all(one["additionalProperties"] is False for one in objects)
    assert all(set(one["required"]) == set(one["properties"]) for one in objects)


@pytest.mark.parametrize("given", [verdict(), odd(), verdict(nodes=(), good=(), exclude=(), links=())])
def test_what_is_written_is_what_the_schema_says(tmp_path, given):
    prepare(tmp_path).write(given)
    data = json.loads((tmp_path / "verdict.json").read_text())
    assert complaints(data) == []


@pytest.mark.parametrize("field", ["severity", "peer_median", "device"])
def test_the_schema_refuses_a_finding_that_lacks_a_field_of_the_contract(tmp_path, field):
    data = json.loads((written(tmp_path) / "verdict.json").read_text())
    del data["nodes"][0]["findings"][0][field]
    assert complaints(data) == [f"$.nodes[0].findings[0]: '{field}' is a required property"]


def test_every_finding_has_all_fields_and_null_where_one_does_not_apply(tmp_path):
    slow, good = json.loads((written(tmp_path) / "verdict.json").read_text())["nodes"][0]["findings"]
    assert slow == {
        "check": "gemm", "severity": "CRITICAL", "reason": "15 % slower than its peers", "device": "gpu3", "rule": "peers",
        "origin": "node_problem", "metric": "gemm", "value": 6.0e14, "unit": "FLOP/s", "peer_median": 7.1e14, "mad": 1e12,
        "floor": 5.5e14, "seconds": 3.0,
    }  # fmt: skip
    assert (good["value"], good["peer_median"], good["mad"], good["floor"]) == (None, None, None, None)


def test_a_verdict_is_read_as_it_was_written(tmp_path):
    folder = prepare(tmp_path)
    folder.write(verdict(), now_ns=7)
    kept = read(tmp_path)
    assert (kept.id, kept.created_ns, kept.verdict) == (folder.id, 7, verdict())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no verdict"),
        ('{"schema": 2}', "schema 2 is newer than 1"),
        ('{"schema": true}', "schema is True, not an integer"),
        ("[]", "expected an object"),
        ('{"schema": 1, "id": "x"}', "created_ns is missing"),
        ('{"schema": 1, "id": "x", "created_ns": 1, "exit": 9}', "9 is not one of"),
        ("[" * 100_000, "is no verdict"),
    ],
)
def test_a_damaged_verdict_is_named(tmp_path, content, said):
    (tmp_path / "verdict.json").write_text(content)
    with pytest.raises(FilesError, match=said) as caught:
        read(tmp_path)
    assert str(tmp_path / "verdict.json") in str(caught.value)


def test_a_verdict_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FilesError, match=r"verdict\.json: cannot be read: No such file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("exclude", "good", "lists"),
    [
        (("node1",), ("node2", "node3"), ("node1\n", "node2\nnode3\n")),
        (("node1",), (), ("node1\n", "")),
        (("job-0 (node gpu7)",), ("job-1 (node gpu8)", "job-2"), ("gpu7\n", "gpu8\njob-2\n")),
    ],
    ids=["nodes", "without a good one", "pods by their nodes"],
)
def test_lists_have_one_host_a_line(tmp_path, exclude, good, lists):
    written(tmp_path, exclude=exclude, good=good)
    assert ((tmp_path / "exclude.txt").read_text(), (tmp_path / "nodelist.txt").read_text()) == lists


@pytest.mark.parametrize(
    ("good", "address", "nodes"),
    [(("node1", "node2", "node3"), "node2", "node2,node3"), ((), "", "")],
    ids=["the first good node, never an excluded one", "none without a good node"],
)
def test_a_shell_reads_the_rendezvous(tmp_path, good, address, nodes):
    argv = ["sh", "-c", '. "$1"/env.sh; env | grep ^MLHPC_[NEM] | sort', "sh", written(tmp_path, good=good)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    variables = ["MLHPC_EXCLUDE=node1", f"MLHPC_MASTER_ADDR={address}", f"MLHPC_NODELIST={nodes}"]
    assert done.stdout.splitlines() == variables


@pytest.mark.parametrize("host", ["a;rm -rf $HOME", "a,b", "a\nb", "-x", "", "node[1-2]", "no de", "ä"])
def test_a_name_that_means_more_than_a_node_stands_in_no_list(tmp_path, host):
    with pytest.raises(FilesError, match="cannot be the name of a node") as caught:
        written(tmp_path, exclude=(host,))
    assert all(name in str(caught.value) for name in FILES[:4])
    assert names_in(tmp_path) == {MARK, "junit.xml", "verdict.json"}


def test_the_affinity_keeps_pods_off_the_excluded_nodes():
    found = affinity(["node1", "-not-a-label", "n" * 64])["nodeAffinity"]
    (term,) = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node1"]}
    assert term == {"matchExpressions": [rule]}


def test_the_affinity_of_no_exclusion_is_empty_since_an_empty_list_would_be_refused(tmp_path):
    assert json.loads((written(tmp_path, exclude=()) / "k8s-affinity.json").read_text()) == {}


def test_the_affinity_is_one_by_the_clients_own_model():
    from manifest_schemas import by_model

    assert by_model(affinity(["node1", "node2"]), "V1Affinity") == []


def test_what_was_measured_is_kept_beside_the_verdict(tmp_path):
    reading = Reading("gemm", "gemm", "gemm/bf16", "H100", 7e14, "FLOP/s")
    report = Report(
        (NodeReport("node1", "boot", {"H100": 4}, (Outcome((SLOW,), (reading,)),)),),
        (PairResult(0, "node1", "node2", 1e9),),
    )
    written(tmp_path, report)
    assert from_json(Report, json.loads((tmp_path / "report.json").read_text())) == report


# --- junit.xml


def test_junit_is_well_formed_whatever_the_texts(tmp_path):
    prepare(tmp_path).write(odd())
    root = parsed(tmp_path)
    texts = [error.get("message") for error in root.iter("error")]
    assert len(texts) == 2
    assert all("\ufffd[2Jred" in text and '<&>]]> "' in text for text in texts)


def test_junit_counts_failures_by_node_check_and_device(tmp_path):
    (suite,) = parsed(written(tmp_path))
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["6", "2", "0"]
    case = [suite[0].get(name) for name in ("classname", "name", "time")]
    assert case == ["node1", "gemm.gemm[gpu3]", "3.000"]
    assert suite[0][0].get("message") == "[node_problem] 15 % slower than its peers"


@pytest.mark.parametrize(
    ("code", "kind"), [(Exit.TOO_FEW, "failure"), (Exit.UNKNOWN, "error"), (Exit.INTERNAL, "error")]
)
def test_junit_fails_as_a_whole_where_the_verdict_does(tmp_path, code, kind):
    (suite,) = parsed(written(tmp_path, exit=code, text="why"))
    assert (suite[-1].get("name"), suite[-1][0].tag, suite[-1][0].text) == ("verdict", kind, "why")


def test_a_node_that_never_came_is_a_failed_case_of_its_own(tmp_path):
    gone = NodeVerdict("node1", Fitness.UNFIT, "[node_problem] never came")
    (suite,) = parsed(written(tmp_path, nodes=(gone,), links=()))
    assert (suite[0].get("classname"), suite[0][0].get("message")) == ("node1", "[node_problem] never came")


# --- an earlier vetting, and folders that cannot be used


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_a_missing_folder_is_made_with_its_parents(tmp_path):
    assert names_in(written(tmp_path / "a" / "b")) == {MARK, *FILES} - {"report.json"}


def test_nothing_of_an_earlier_vetting_is_left_and_all_else_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    written(tmp_path, Report(()))
    (tmp_path / f"{MARK}-0123-verdict.json").write_text("{")  # of a writer that was killed
    prepare(tmp_path)  # and then nothing: this process died
    assert names_in(tmp_path) == {MARK, "notes.txt"}


def test_files_that_no_vetting_has_written_are_never_taken_away(tmp_path):
    (tmp_path / "env.sh").write_text("export MINE=1\n")
    words = r"holds env\.sh, which no vetting has written: choose another --out"
    with pytest.raises(FilesError, match=words):
        prepare(tmp_path)
    assert (tmp_path / "env.sh").read_text() == "export MINE=1\n"


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    out = written(tmp_path / "out")
    (tmp_path / "other").write_text("mine")
    (out / "exclude.txt").unlink()
    (out / "exclude.txt").symlink_to(tmp_path / "other")
    written(out)
    assert (tmp_path / "other").read_text() == "mine"
    assert not (out / "exclude.txt").is_symlink()


def test_two_vettings_in_one_folder_do_not_mix(tmp_path):
    first, second = prepare(tmp_path), prepare(tmp_path)
    with pytest.raises(FilesError, match="another vetting has begun there"):
        first.write(verdict())
    assert names_in(tmp_path) == {MARK}
    second.write(verdict())
    assert read(tmp_path).id == second.id


def test_a_folder_that_went_away_meanwhile_is_named(tmp_path):
    folder = prepare(tmp_path / "out")
    (tmp_path / "out" / MARK).unlink()
    (tmp_path / "out").rmdir()
    with pytest.raises(FilesError, match=r"out/\.mlhpc-vet: cannot be read any more"):
        folder.write(verdict())


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(FilesError, match=r"--out .*/out: cannot be used: .*File exists; choose a folder"):
        prepare(tmp_path / "out")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    written(tmp_path)
    (tmp_path / "junit.xml").unlink()
    (tmp_path / "junit.xml").mkdir()
    with pytest.raises(FilesError, match=r"cannot be used: .*/junit\.xml"):
        prepare(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not write")
def test_a_folder_that_is_not_writable_is_named(tmp_path):
    tmp_path.chmod(0o755)
    code = f"""
import os, sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from pytest_mlhpc.vet.files import FilesError, prepare
os.setuid(65534)
try:
    prepare(Path({str(tmp_path)!r}))
except FilesError as error:
    print(error)
"""
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be used" in done.stdout
    assert "Permission denied; choose a folder that can be written" in done.stdout


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path):
    folder = prepare(tmp_path)
    many = tuple(NodeVerdict(f"node{i}", Fitness.FIT, findings=(GOOD,)) for i in range(200))
    with Limited().full(4096), pytest.raises(FilesError) as caught:
        folder.write(verdict(nodes=many))
    words = os.strerror(errno.EFBIG)
    assert str(caught.value).endswith(f"cannot be written: verdict.json: {words}; junit.xml: {words}")
    assert names_in(tmp_path) == {MARK, "exclude.txt", "nodelist.txt", "env.sh", "k8s-affinity.json"}


def test_everybody_may_read_what_is_written_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        out = written(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}


def test_lists_and_verdict_do_not_wait_for_what_is_large():
    assert files.FILES[-2:] == ("junit.xml", "report.json")


def test_a_verdict_has_a_line_for_each_node(tmp_path):
    lines = (written(tmp_path) / "verdict.json").read_text().splitlines()
    hosts = [line[10:15] for line in lines if line.startswith('{"host": "')]
    assert hosts == ["node1", "node2", "node3"]


# --- real verdicts


def test_what_the_judge_says_of_every_kind_of_trouble_fits_the_schema(tmp_path):
    nodes = [NodeReport("gone", missing="it never came"), NodeReport("silent")]
    for index, value in enumerate((7e14, 7e14, 7e14, 5e14)):
        reading = Reading("gemm", "gemm", "k", "H100", value, "FLOP/s", device="gpu0")
        nodes.append(NodeReport(f"node{index}", "boot", {"H100": 1}, (Outcome(readings=(reading,)),)))
    pairs = (
        PairResult(0, "node0", "node1", 1e9, key="k"),
        PairResult(0, "node2", "node3", trouble="no answer"),
    )
    report = Report(tuple(nodes), pairs, seconds=12.0)
    said = judge(report, Settings(need=3), built_in())
    prepare(tmp_path).write(said, report)
    data = json.loads((tmp_path / "verdict.json").read_text())
    assert complaints(data) == []
    assert read(tmp_path).verdict == said
    assert {"gone", "silent", "node3"} <= set(data["exclude"])
    ET.fromstring((tmp_path / "junit.xml").read_bytes())  # noqa: S314 - our own file


@pytest.mark.servers
def test_what_the_command_writes_of_this_machine_fits_the_schema_and_its_last_line(tmp_path):
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "vet", "--no-load", "--unknown", "warn", "--out", "out"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in {Exit.READY, Exit.TOO_FEW}, done.stderr
    out = tmp_path / "out"
    assert complaints(json.loads((out / "verdict.json").read_text())) == []
    kept = read(out)
    assert kept.verdict.exit == done.returncode
    assert done.stdout.splitlines()[-1] == last_line(kept.verdict)
    assert names_in(out) == {MARK, *FILES}
