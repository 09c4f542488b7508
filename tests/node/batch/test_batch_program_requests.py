"""The file by which a test asks the batch of the nodes that it holds, written and read from two places at once."""

import json

import pytest
from pods import run_plan

from pytest_mlhpc.node.batch.output import Inbox, append, create
from pytest_mlhpc.node.batch.program_requests import program_environment, request_of


@pytest.fixture
def path(tmp_path):
    """Return a file of requests in which there is none."""
    create(tmp_path / "requests.jsonl")
    return tmp_path / "requests.jsonl"


def write(path, data):
    with path.open("ab") as file:
        file.write(data)


def test_each_line_is_read_once_and_only_when_it_is_whole(path):
    inbox = Inbox(path)
    assert inbox.read() == []
    append(path, {"kind": "run", "id": "1"})
    write(path, b'{"kind": "st')
    assert [inbox.read(), inbox.read()] == [[{"kind": "run", "id": "1"}], []]
    write(path, b'op"}\n')
    assert inbox.read() == [{"kind": "stop"}]


def test_what_is_no_object_is_passed_over(path):
    write(path, b'\n[1]\n"text"\n{"cut\n' + b"[" * 100_000 + b"\n\xff\xfe\n")
    append(path, {"kind": "release"})
    assert Inbox(path).read() == [{"kind": "release"}]


def test_only_this_user_may_read_what_is_asked(path):
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        append(tmp_path / "requests.jsonl", {})
    assert raised.value.filename == str(tmp_path / "requests.jsonl")


GOOD = {
    "id": "1", "argv": ["true"], "nodes": ["a"], "ranks_per_node": 1, "cores_per_rank": 1, "timeout_s": 1.0,
    "env": {}, "cwd": None,
}  # fmt: skip


def test_a_request_that_is_one_is_read():
    assert request_of(json.loads(json.dumps(GOOD))).argv == ("true",)


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": []},
        {"argv": [1]},
        {"argv": ["a\0"]},
        {"env": {"a": 1}},
        {"nodes": None},
        {"cwd": 1},
        {"env": ...},
    ],
)
def test_a_request_is_read_strictly(changes):
    request = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises((KeyError, TypeError, ValueError)):
        request_of(request)


def test_a_program_gets_neither_the_place_of_a_rank_nor_the_channel(monkeypatch):
    for name, value in {"RANK": "3", "MLHPC_CHANNEL": "unix:/x", "PYTHONPATH": "/some/where"}.items():
        monkeypatch.setenv(name, value)
    run = run_plan("r", workload="nodes", variables={"A": "run", "B": "run"})
    found = program_environment(run, {"B": "test"})
    assert not {"RANK", "MLHPC_CHANNEL"} & found.keys()
    assert found.items() >= {"A": "run", "B": "test", "MLHPC_RUN": "r", "PYTHONPATH": "/some/where"}.items()
