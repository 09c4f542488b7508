"""The verdict's files: whole, quoted, of this vetting and of no earlier one."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import resources

import jsonschema
import pytest
from full_disk import Limited
from manifest_schemas import by_model

from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Exit,
    Finding,
    Fitness,
    LinkVerdict,
    NodeReport,
    NodeVerdict,
    PairResult,
    Reading,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.output import last_line
from pytest_mlhpc.node.vet.verdict_files import (
    FILES,
    MARK,
    FilesError,
    WrittenVerdict,
    affinity,
    prepare,
    read,
)

GOOD = Finding("edac", Severity.PASS, "no memory faults", seconds=0.01)
SLOW = Finding(
    "gemm", Severity.CRITICAL, "15 % slower than its peers", device="gpu3", rule="peers", metric="gemm",
    value=6.0e14, unit="FLOP/s", peer_median=7.1e14, mad=1e12, floor=5.5e14, seconds=3.0,
)  # fmt: skip


def verdict(**changes):
    """Three nodes, of which the first is unfit."""
    slow = NodeVerdict("node1", Fitness.UNFIT, "[node_problem] 15 % slower", (SLOW, GOOD))
    given = {
        "exit": Exit.READY, "need": 2, "good": ("node2", "node3"), "exclude": ("node1",), "seconds": 41.2,
        "nodes": (slow, *(NodeVerdict(host, Fitness.FIT, findings=(GOOD,)) for host in ("node2", "node3"))),
        "links": (LinkVerdict("node2", "node3", "half the speed of its peers", 5e9, 1e10),),
    }  # fmt: skip
    return VetVerdict(**{**given, **changes})


def written(out, *arguments, **changes):
    prepare(out).write(verdict(**changes), *arguments)
    return out


def parsed(out):
    return ET.fromstring((out / "junit.xml").read_bytes())  # noqa: S314 - our own file


SCHEMA = json.loads((resources.files("pytest_mlhpc.node.vet") / "verdict.schema.json").read_text())


def complaints(data):
    return [
        f"{one.json_path}: {one.message}" for one in jsonschema.Draft202012Validator(SCHEMA).iter_errors(data)
    ]


def test_the_schema_is_itself_valid_and_closed():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for one in (SCHEMA, *(SCHEMA["$defs"][name] for name in ("node", "finding", "link"))):
        assert (one["additionalProperties"], set(one["required"])) == (False, set(one["properties"]))


@pytest.mark.parametrize("given", [verdict(), verdict(nodes=(), good=(), exclude=(), links=())])
def test_what_is_written_is_what_the_schema_says(tmp_path, given):
    prepare(tmp_path).write(given)
    assert complaints(json.loads((tmp_path / "verdict.json").read_text())) == []


@pytest.mark.parametrize("field", ["severity", "peer_median", "device"])
def test_the_schema_refuses_a_finding_that_lacks_a_field_of_the_contract(tmp_path, field):
    data = json.loads((written(tmp_path) / "verdict.json").read_text())
    del data["nodes"][0]["findings"][0][field]
    assert complaints(data) == [f"$.nodes[0].findings[0]: '{field}' is a required property"]


def test_every_finding_has_all_fields_and_null_where_one_does_not_apply(tmp_path):
    slow, good = json.loads((written(tmp_path) / "verdict.json").read_text())["nodes"][0]["findings"]
    assert slow == {**dataclasses.asdict(SLOW), "severity": "CRITICAL", "origin": "node_problem"}
    assert [good[name] for name in ("value", "peer_median", "mad", "floor")] == [None] * 4


def test_a_verdict_is_read_as_it_was_written(tmp_path):
    folder = prepare(tmp_path)
    folder.write(verdict(), now_ns=7)
    assert read(tmp_path) == WrittenVerdict(folder.id, 7, verdict())


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
    assert [name for name in FILES[:4] if name not in str(caught.value)] == []
    assert names_in(tmp_path) == {MARK, "junit.xml", "verdict.json"}


def test_the_affinity_keeps_pods_off_the_excluded_nodes():
    found = affinity(["node1", "-not-a-label", "n" * 64])["nodeAffinity"]
    (term,) = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (rule,) = term["matchExpressions"]
    assert rule == {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node1"]}


def test_the_affinity_of_no_exclusion_is_empty_since_an_empty_list_would_be_refused(tmp_path):
    assert json.loads((written(tmp_path, exclude=()) / "k8s-affinity.json").read_text()) == {}


def test_the_affinity_is_one_by_the_clients_own_model():
    assert by_model(affinity(["node1", "node2"]), "V1Affinity") == []


def test_what_was_measured_is_stored_next_to_the_verdict(tmp_path):
    outcome = CheckOutcome((SLOW,), (Reading("gemm", "gemm", "gemm/bf16", "H100", 7e14, "FLOP/s"),))
    node = NodeReport("node1", "boot", {"H100": 4}, (outcome,))
    report = Report((node,), (PairResult(0, "node1", "node2", 1e9),))
    written(tmp_path, report)
    assert from_json(Report, json.loads((tmp_path / "report.json").read_text())) == report


# --- junit.xml


def test_junit_counts_failures_by_node_check_and_device(tmp_path):
    (suite,) = parsed(written(tmp_path))
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["6", "2", "0"]
    case = [suite[0].get(name) for name in ("classname", "name", "time")]
    assert case == ["node1", "gemm.gemm[gpu3]", "3.000"]
    assert suite[0][0].get("message") == "[node_problem] 15 % slower than its peers"


def test_junit_marks_what_xml_cannot_hold(tmp_path):
    (suite,) = parsed(written(tmp_path, exit=Exit.INTERNAL, text='\x1b[2Jred\ud800 <&>]]> "'))
    assert suite[-1][0].text == '\ufffd[2Jred\ufffd <&>]]> "'


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
    (tmp_path / "env.sh").write_text("mine")
    with pytest.raises(
        FilesError, match=r"holds env\.sh, which no vetting has written: choose another --output"
    ):
        prepare(tmp_path)
    assert (tmp_path / "env.sh").read_text() == "mine"


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    other, link = tmp_path / "other", written(tmp_path / "out") / "exclude.txt"
    other.write_text("mine")
    link.unlink()
    link.symlink_to(other)
    written(tmp_path / "out")
    assert (other.read_text(), link.is_symlink()) == ("mine", False)


def test_two_vettings_in_one_folder_do_not_mix(tmp_path):
    first, second = prepare(tmp_path), prepare(tmp_path)
    with pytest.raises(FilesError, match="another vetting has begun there"):
        first.write(verdict())
    assert names_in(tmp_path) == {MARK}
    second.write(verdict())
    assert read(tmp_path).id == second.id


def test_a_folder_that_went_away_meanwhile_is_named(tmp_path):
    folder = prepare(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(FilesError, match=r"out/\.mlhpc-vet: cannot be read any more"):
        folder.write(verdict())


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(FilesError, match=r"--output .*/out: cannot be used: .*File exists; choose a folder"):
        prepare(tmp_path / "out")


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    written(tmp_path)
    (tmp_path / "junit.xml").unlink()
    (tmp_path / "junit.xml").mkdir()
    with pytest.raises(FilesError, match=r"cannot be used: .*/junit\.xml"):
        prepare(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody who may not write")
def test_a_folder_that_is_not_writable_is_named(tmp_path, capfd):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            prepare(tmp_path)
        except FilesError as error:
            os.write(1, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    reported = capfd.readouterr().out
    assert "cannot be used" in reported
    assert "Permission denied; choose a folder that can be written" in reported


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path):
    folder, words = prepare(tmp_path), os.strerror(errno.EFBIG)
    many = tuple(NodeVerdict(f"node{i}", Fitness.FIT, findings=(GOOD,)) for i in range(200))
    with Limited().full(4096), pytest.raises(FilesError) as caught:
        folder.write(verdict(nodes=many))
    assert str(caught.value).endswith(f"cannot be written: verdict.json: {words}; junit.xml: {words}")
    assert names_in(tmp_path) == {MARK, "exclude.txt", "nodelist.txt", "env.sh", "k8s-affinity.json"}


def test_everybody_may_read_what_is_written_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        out = written(tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}


def test_a_verdict_has_a_line_for_each_node(tmp_path):
    lines = (written(tmp_path) / "verdict.json").read_text().splitlines()
    assert [line[10:15] for line in lines if line.startswith('{"host": "')] == ["node1", "node2", "node3"]


# --- real verdicts


@pytest.mark.servers
def test_what_the_command_writes_of_this_machine_fits_the_schema_and_its_last_line(tmp_path):
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.cli",
        "vet",
        "--no-load",
        "--unknown",
        "warn",
        "--output",
        "out",
    ]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    out, kept = tmp_path / "out", read(tmp_path / "out")
    assert complaints(json.loads((out / "verdict.json").read_text())) == []
    assert kept.verdict.exit == done.returncode in {Exit.READY, Exit.TOO_FEW}, done.stderr
    assert done.stdout.splitlines()[-1] == last_line(kept.verdict)
    assert names_in(out) == {MARK, *FILES}
