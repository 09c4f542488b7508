"""A pod's log becomes worker lines and files, whatever was repeated, lost, cut, or printed in between."""

import hashlib
import json

import pytest
from allocation_worlds import run_plan
from hypothesis import given
from hypothesis import strategies as st
from local_allocations import RATE

from pytest_mlhpc.node.batch.pod_stream import RS, output_lines, pod_line
from pytest_mlhpc.node.protocol.lines import Decoder, Message, encode
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.command import Conversation
from pytest_mlhpc.provision.kubernetes.log_parser import AgentOutput, unescape

PRINTED = b"rate: 7\nloss \xff\x1e\\ 3\n" + b"long " * 3000 + b"\nend"
RUN = "run-0001"
COMMAND = run_plan(RUN, workload="command", metrics=RATE)


def summary(printed, **changes):
    """Return the line that says what the run printed in all."""
    announced = {"bytes": len(printed), "dropped": 0, "sha256": hashlib.sha256(printed).hexdigest()}
    return pod_line("output", {"run": RUN, "nonce": "nonce", "stream": "0", **announced, **changes})


def worker_lines(*messages):
    """Return the protocol lines of *messages*; progress takes no number."""
    lines: list[bytes] = []
    number = 0
    for kind, body in messages:
        new = encode(Message(RUN, "nonce", kind, body), number)
        number += 0 if kind == "progress" else len(new)
        lines += [RS + line for line in new]
    return lines


STARTED = ("started", {"protocol": 1, "payload_sha256": ""})
PROGRESS = ("progress", {"step": 1, "steps": 2, "samples_per_s": 3.0})
END = ("end", {"exit": [0], "started_ns": 1, "ended_ns": 2, "host": "h"})
MEASURED = ("measurement", {"figures": ["x" * 100] * 200})
FAILED = ("failed", {"outcome": "worker_exit", "text": "t", "log": "run-0001/rank0.log"})


def a_log():
    """Return the log of one good run, as an agent prints it."""
    started, progress, end = worker_lines(STARTED, PROGRESS, END)
    shown = output_lines(RUN, "0", 0, PRINTED).splitlines(keepends=True)
    again = [started, summary(PRINTED), end, pod_line("over", {"exit": 0})]
    return [started, progress, *shown, summary(PRINTED), end, *again]


LOG = a_log()
#: The same without the first line that the program printed.
LOST = [*LOG[:2], *LOG[3:]]
CAME = f"of the {len(PRINTED)} bytes of rank0.log {len(PRINTED) - 8} came"


class Pod:
    """A pod's stream into a folder, and what it becomes."""

    def __init__(self, folder, run=COMMAND, *prefix):
        self.plan = Plan("a", "", str(folder), 1, 60.0, (run,))
        self.stream = AgentOutput(self.plan, *prefix)
        self.folder = folder / RUN
        self.found = []

    def read(self, lines, *, finish=True):
        """Take lines of the log; return the kinds of messages, or names of faults."""
        data = b"".join(self.stream.feed(line) for line in lines) + (self.stream.finish() if finish else b"")
        self.found = Decoder({RUN: "nonce", "run-0002": "nonce"}).feed(data)
        return [item.kind if isinstance(item, Message) else item.outcome for item in self.found]

    def failure(self):
        (body,) = [item.body for item in self.found if isinstance(item, Message) and item.kind == "failed"]
        return body

    def output(self):
        return (self.folder / "rank0.log").read_bytes()


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


@pytest.fixture
def worker_pod(tmp_path):
    return Pod(tmp_path, run_plan(RUN))


def test_a_whole_log_gives_its_lines_and_the_programs_output(pod):
    assert (pod.read(LOG), pod.output()) == (["started", "progress", "end"], PRINTED)
    assert (pod.stream.exit_code, pod.stream.missing) == (0, "")


def test_metrics_are_found_in_what_was_rebuilt(pod, tmp_path):
    talk = Conversation(pod.plan, tmp_path / "log")
    found = [message for line in LOG for message in talk.take(pod.stream.feed(line))]
    assert [message.kind for message in found] == ["started", "progress", "measurement", "end"]
    assert found[2].body["metrics"][0]["value"] == 7.0


def test_a_log_read_twice_says_nothing_new(pod):
    pod.read(LOG)
    assert (pod.read([*LOG, *LOG[3:]]), pod.output()) == ([], PRINTED)


def test_results_that_were_lost_are_found_at_the_logs_end(tmp_path):
    pod = Pod(tmp_path, run_plan(RUN, workload="command"))
    log = [line for number, line in enumerate(LOG) if number not in (0, 8, 9, 10)]
    assert pod.read(log) == ["started", "end"]


def test_output_that_was_lost_may_be_read_again_and_until_then_the_run_has_not_ended(pod):
    assert (pod.read(LOST, finish=False), pod.stream.missing) == (["started", "progress"], CAME)
    assert pod.stream.feed(LOG[2]).endswith(LOG[-2][8:])  # the end of the run follows upon what was missing
    assert (pod.output(), pod.stream.missing) == (PRINTED, "")


@pytest.mark.parametrize(
    ("lines", "outcome", "text"),
    [
        pytest.param(LOST, "truncated_result", CAME, id="it stays incomplete"),
        pytest.param(
            [line.replace(b'"dropped":0', b'"dropped":77') for line in LOST], "output_limit",
            f"the program printed {len(PRINTED) + 77} bytes", id="it was too much",
        ),
        pytest.param(
            worker_lines(STARTED, END), "truncated_result", "nothing of the program's output came", id="its end is unknown"
        ),
        pytest.param(
            [line.replace(b"rate: 7", b"rate: 8") for line in LOG], "truncated_result", "its SHA-256 is another",
            id="it is another than was printed",
        ),
    ],
)  # fmt: skip
def test_a_command_without_all_its_output_is_no_result(pod, lines, outcome, text):
    kinds = [kind for kind in pod.read(lines) if kind != "progress"]
    assert (kinds, pod.failure()["outcome"]) == (["started", "failed", "end"], outcome)
    assert text in pod.failure()["text"]


def test_a_run_that_failed_is_not_failed_once_more_for_its_output(pod):
    assert pod.read(worker_lines(STARTED, FAILED, END)) == ["started", "failed", "end"]
    assert pod.failure()["log"] == str(pod.folder / "rank0.log")


def test_a_line_that_is_lost_for_ever_is_reported(worker_pod):
    lines = worker_lines(STARTED, MEASURED, END)
    kinds = worker_pod.read(lines[:3] + lines[4:])
    assert ("truncated_result" in kinds, kinds[-1]) == (True, "end")


def test_a_long_message_in_any_order_comes_out_whole(worker_pod):
    kinds = worker_pod.read(worker_lines(STARTED, MEASURED, END)[::-1])
    assert kinds == ["started", "measurement", "end"]


NOISE = [
    b"[run-0001 0 x] no\n", b"\n", b"\xff\xfe\n", b"[other 0 3] no\n", b'\x1e{"n":\n', b"\x1e[]\n", b"\x1e7\n",
    b'\x1e{"n":1,"kind":[]}\n', b'\x1e{"pod":"over","exit":"x"}\n', b'\x1e{"pod":"output"}\n', b"last \x07word\n",
]  # fmt: skip


def test_words_of_others_are_left_alone_and_remembered(pod):
    log = [b"half a line of somebody " + LOG[0], *LOG[1:]]
    assert pod.read([*NOISE, *[item for line in log for item in (line, *NOISE)]])[-1] == "end"
    assert pod.output() == PRINTED
    assert pod.stream.last_lines().splitlines()[-1] == "last \N{REPLACEMENT CHARACTER}word"


def test_a_foreign_result_is_reported(pod):
    (line,) = worker_lines(STARTED)
    assert pod.read([line.replace(b'"nonce":"nonce"', b'"nonce":"other"')]) == ["foreign_result"]


@pytest.mark.parametrize("offset", [(16 << 20) - 1, 10**9])
def test_an_offset_beyond_the_cap_writes_nothing(pod, offset):
    pod.stream.feed(b"[run-0001 0 %d] far away\n" % offset)
    pod.stream.close()
    assert not (pod.folder / "rank0.log").exists()


def test_a_folder_that_cannot_be_written_is_reported(pod):
    pod.folder.touch()
    pod.read(LOG)
    assert "cannot write" in pod.failure()["text"]


def test_the_file_says_how_much_was_dropped(pod):
    pod.read([b"[run-0001 0 0] x\n", summary(b"x\n", dropped=9)])
    assert pod.output() == b"x\n\n[9 more bytes were dropped]\n"


def test_other_pods_have_files_of_their_own(tmp_path):
    pod = Pod(tmp_path, COMMAND, "p-1")
    pod.read([b"[run-0001 pod1 0] W: x\n", b"[run-0001 launcher 0] y\n", b"[run-0001 12 0] z\n"])
    assert sorted(path.name for path in pod.folder.iterdir()) == ["launcher.log", "pod1.log", "rank12.log"]


@pytest.mark.parametrize("text", [rb"\u0041\u1234", rb"\x4", rb"\N{DASH}"])
def test_what_is_not_of_our_form_is_no_output(text):
    assert unescape(text) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8), st.binary(max_size=40))
def test_any_pieces_of_any_log_never_raise_and_end_at_most_once(tmp_path_factory, cuts, noise):
    pod = Pod(tmp_path_factory.mktemp("pieces"))
    lines = [line for start, length in cuts for line in [*LOG[start : start + length], noise + b"\n"]]
    assert pod.read([*lines, *(line[: len(line) // 2] for line in lines[:3])]).count("end") <= 1
    assert json.dumps(pod.stream.missing)
