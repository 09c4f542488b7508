"""A pod's log becomes worker lines and files: whatever came twice, was lost, was cut, or stands in between."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_mlhpc.batch.plan import MetricPattern, Plan, RunPlan
from pytest_mlhpc.batch.pod_text import RS, output_lines, pod_line
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.kubernetes.podoutput import unescape
from pytest_mlhpc.provision.kubernetes.podstream import PodStream
from pytest_mlhpc.results.lines import Decoder, Fault, Message, encode

PRINTED = b"rate: 7\nloss \xff\x1e\\ 3\n" + b"long " * 3000 + b"\nend"
METRICS = {"rate": MetricPattern("items/s", "higher", r"rate: (\S+)")}


def run_plan(name: str = "run-0001", **changes) -> RunPlan:
    fields = {
        "run_id": name, "nonce": "nonce", "attempt": 0, "workload": "command", "parameters": {}, "nodes": 1, "ranks": 1,
        "cores_per_rank": 1, "device_type": "cpu", "launcher": "plain", "time_limit_s": 60.0, "steps": 1,
        "warmup_steps": 0, "metrics": METRICS,
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def plan(folder: Path, *runs: RunPlan) -> Plan:
    return Plan("a", "", str(folder), 1, 60.0, runs or (run_plan(),))


def summary(printed: bytes, run: str = "run-0001", **changes) -> bytes:
    told = {"bytes": len(printed), "dropped": 0, "sha256": hashlib.sha256(printed).hexdigest()}
    return pod_line("output", {"run": run, "nonce": "nonce", "stream": "0", **told, **changes})


def said(*messages: tuple[str, dict], run: str = "run-0001", first: int = 0) -> list[bytes]:
    """Return the protocol lines of *messages*; progress takes no number."""
    lines: list[bytes] = []
    number = first
    for kind, body in messages:
        new = encode(Message(run, "nonce", kind, body), number)
        number += 0 if kind == "progress" else len(new)
        lines += [RS + line for line in new]
    return lines


STARTED = ("started", {"protocol": 1, "payload_sha256": ""})
PROGRESS = ("progress", {"step": 1, "steps": 2, "samples_per_s": 3.0})
END = ("end", {"exit": [0], "started_ns": 1, "ended_ns": 2, "host": "h"})
MEASURED = ("measurement", {"figures": ["x" * 100] * 200})


def a_log() -> list[bytes]:
    """Return the log of one good run, as an agent prints it."""
    started, progress, end = said(STARTED, PROGRESS, END)
    shown = output_lines("run-0001", "0", 0, PRINTED).splitlines(keepends=True)
    again = [started, summary(PRINTED), end, pod_line("over", {"exit": 0})]
    return [started, progress, *shown, summary(PRINTED), end, *again]


def heard(stream: PodStream, lines: list[bytes], *, finish: bool = True) -> list[Message | Fault]:
    data = b"".join(stream.feed(line) for line in lines) + (stream.finish() if finish else b"")
    return Decoder({"run-0001": "nonce", "run-0002": "nonce"}).feed(data)


def kinds(found: list[Message | Fault]) -> list[str]:
    return [item.kind if isinstance(item, Message) else item.outcome for item in found]


def test_a_whole_log_gives_its_lines_and_the_programs_output(tmp_path):
    stream = PodStream(plan(tmp_path))
    assert kinds(heard(stream, a_log())) == ["started", "progress", "end"]
    assert (tmp_path / "run-0001" / "rank0.log").read_bytes() == PRINTED
    assert (stream.over, stream.missing) == (0, "")


def test_metrics_are_found_in_what_was_rebuilt(tmp_path):
    talk = Conversation(plan(tmp_path), tmp_path / "log")
    stream = PodStream(plan(tmp_path))
    found = [message for line in a_log() for message in talk.take(stream.feed(line))]
    assert [message.kind for message in found] == ["started", "progress", "measurement", "end"]
    assert found[2].body["metrics"][0]["value"] == 7.0


def test_a_log_read_twice_says_nothing_new(tmp_path):
    stream = PodStream(plan(tmp_path))
    heard(stream, a_log())
    assert heard(stream, [*a_log(), *a_log()[3:]]) == []
    assert (tmp_path / "run-0001" / "rank0.log").read_bytes() == PRINTED


def test_results_that_were_lost_are_found_at_the_logs_end(tmp_path):
    run = run_plan(metrics={})
    stream = PodStream(plan(tmp_path, run))
    log = [line for number, line in enumerate(a_log()) if number not in (0, 8, 9, 10)]
    assert kinds(heard(stream, log)) == ["started", "end"]


def test_output_that_was_lost_may_be_read_again_and_until_then_the_run_has_not_ended(tmp_path):
    stream = PodStream(plan(tmp_path))
    log = a_log()
    assert kinds(heard(stream, [*log[:2], *log[3:]], finish=False)) == ["started", "progress"]
    assert stream.missing == (f"of the {len(PRINTED)} bytes of rank0.log {len(PRINTED) - 8} came")
    assert stream.feed(log[2]).endswith(log[-2][8:])  # the end of the run follows upon what was missing
    assert (tmp_path / "run-0001" / "rank0.log").read_bytes() == PRINTED
    assert stream.missing == ""


def test_a_command_whose_output_stays_incomplete_is_no_result(tmp_path):
    stream = PodStream(plan(tmp_path))
    log = a_log()
    found = heard(stream, [*log[:2], *log[3:]])
    assert kinds(found) == ["started", "progress", "failed", "end"]
    assert isinstance(found[2], Message)
    assert found[2].body["outcome"] == "truncated_result"
    assert f"of the {len(PRINTED)} bytes of rank0.log {len(PRINTED) - 8} came" in found[2].body["text"]


def test_a_command_that_printed_too_much_is_told_that_whatever_came_of_it(tmp_path):
    stream = PodStream(plan(tmp_path))
    log = [line.replace(b'"dropped":0', b'"dropped":77') for line in a_log()]
    found = heard(stream, [*log[:2], *log[3:]])
    assert isinstance(found[2], Message)
    assert found[2].body["outcome"] == "output_limit"
    assert f"the program printed {len(PRINTED) + 77} bytes" in found[2].body["text"]


def test_output_of_which_the_end_is_unknown_is_no_result(tmp_path):
    found = heard(PodStream(plan(tmp_path)), said(STARTED, END))
    assert kinds(found) == ["started", "failed", "end"]
    assert "nothing of the program's output came" in found[1].body["text"]


def test_a_run_that_failed_is_not_failed_once_more_for_its_output(tmp_path):
    failed = ("failed", {"outcome": "worker_exit", "text": "t", "log": "run-0001/rank0.log"})
    found = heard(PodStream(plan(tmp_path)), said(STARTED, failed, END))
    assert kinds(found) == ["started", "failed", "end"]
    assert found[1].body["log"] == str(tmp_path / "run-0001" / "rank0.log")


def test_a_line_that_is_lost_for_ever_is_told(tmp_path):
    lines = said(STARTED, MEASURED, END)
    found = heard(PodStream(plan(tmp_path, run_plan(workload="tiny"))), lines[:3] + lines[4:])
    assert "truncated_result" in kinds(found)
    assert kinds(found)[-1] == "end"


def test_a_long_message_in_any_order_comes_out_whole(tmp_path):
    lines = said(STARTED, MEASURED, END)
    lines = lines[::-1]
    found = heard(PodStream(plan(tmp_path, run_plan(workload="tiny"))), lines)
    assert kinds(found) == ["started", "measurement", "end"]


def test_words_of_others_are_left_alone_and_remembered(tmp_path):
    stream = PodStream(plan(tmp_path))
    log = a_log()
    noise = [
        b"[run-0001 0 x] no\n",
        b"\n",
        b"\xff\xfe\n",
        b"[other 0 3] no\n",
        b'\x1e{"n":\n',
        b"\x1e[]\n",
        b"\x1e7\n",
    ]
    noise += [
        b'\x1e{"n":1,"kind":[]}\n',
        b'\x1e{"pod":"over","exit":"x"}\n',
        b'\x1e{"pod":"output"}\n',
        b"last \x07word\n",
    ]
    log[0] = b"half a line of somebody " + log[0]
    assert kinds(heard(stream, [*noise, *[item for line in log for item in (line, *noise)]]))[-1] == "end"
    assert (tmp_path / "run-0001" / "rank0.log").read_bytes() == PRINTED
    assert stream.last_words().splitlines()[-1] == "last \N{REPLACEMENT CHARACTER}word"


def test_a_foreign_result_is_told(tmp_path):
    lines = [line.replace(b"nonce", b"other", 2) for line in said(STARTED)]
    foreign = [lines[0].replace(b'"nonce":"nonce"', b'"nonce":"other"').replace(b'"other":"', b'"nonce":"')]
    assert kinds(heard(PodStream(plan(tmp_path)), foreign)) == ["foreign_result"]


@pytest.mark.parametrize("offset", [(16 << 20) - 1, 10**9])
def test_an_offset_beyond_the_cap_writes_nothing(tmp_path, offset):
    stream = PodStream(plan(tmp_path))
    stream.feed(b"[run-0001 0 %d] far away\n" % offset)
    stream.close()
    assert not (tmp_path / "run-0001" / "rank0.log").exists()


def test_output_that_is_another_than_was_printed_is_no_result(tmp_path):
    log = [line.replace(b"rate: 7", b"rate: 8") for line in a_log()]
    found = heard(PodStream(plan(tmp_path)), log)
    assert "its SHA-256 is another" in next(item for item in found if item.kind == "failed").body["text"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "run-0001").touch()
    found = heard(PodStream(plan(tmp_path)), a_log())
    assert "cannot write" in next(item for item in found if item.kind == "failed").body["text"]


def test_what_was_not_kept_is_told_in_the_file(tmp_path):
    log = [b"[run-0001 0 0] x\n", summary(b"x\n", dropped=9)]
    heard(PodStream(plan(tmp_path)), log)
    assert (tmp_path / "run-0001" / "rank0.log").read_text() == "x\n\n[9 more bytes were not kept]\n"


def test_other_pods_have_files_of_their_own(tmp_path):
    stream = PodStream(plan(tmp_path), "p-1")
    heard(stream, [b"[run-0001 pod1 0] W: x\n", b"[run-0001 launcher 0] y\n", b"[run-0001 12 0] z\n"])
    assert sorted(path.name for path in (tmp_path / "run-0001").iterdir()) == [
        "launcher.log",
        "pod1.log",
        "rank12.log",
    ]


@pytest.mark.parametrize("text", [rb"\u0041\u1234", rb"\x4", rb"\N{DASH}"])
def test_what_is_not_of_our_form_is_no_output(text):
    assert unescape(text) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.binary(max_size=40))
@settings(max_examples=60)
def test_any_pieces_of_any_log_never_raise_and_end_at_most_once(tmp_path_factory, cuts, noise):
    stream = PodStream(plan(tmp_path_factory.mktemp("pieces")))
    log = a_log()
    lines = [line for start, length in cuts for line in [*log[start : start + length], noise + b"\n"]]
    found = heard(stream, [*lines, *(line[: len(line) // 2] for line in lines[:3])])
    assert kinds(found).count("end") <= 1
    assert json.dumps(stream.missing)
