"""The file by which a test asks the batch of the nodes that it holds, written and read from two places at once."""

from __future__ import annotations

import json

import pytest

from pytest_mlhpc.batch.held import program_environment, request_of
from pytest_mlhpc.batch.mail import Inbox, append, create
from pytest_mlhpc.batch.plan import RunPlan


def test_each_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "requests.jsonl"
    create(path)
    inbox = Inbox(path)
    assert inbox.read() == []
    append(path, {"kind": "run", "id": "1"})
    with path.open("ab") as file:
        file.write(b'{"kind": "st')
    assert inbox.read() == [{"kind": "run", "id": "1"}]
    assert inbox.read() == []
    with path.open("ab") as file:
        file.write(b'op"}\n')
    assert inbox.read() == [{"kind": "stop"}]


def test_what_is_no_object_is_passed_over(tmp_path):
    path = tmp_path / "requests.jsonl"
    create(path)
    with path.open("ab") as file:
        file.write(b'\n[1]\n"text"\n{"cut\n' + b"[" * 100_000 + b"\n\xff\xfe\n")
    append(path, {"kind": "release"})
    assert Inbox(path).read() == [{"kind": "release"}]


def test_only_this_user_may_read_what_is_asked(tmp_path):
    create(tmp_path / "requests.jsonl")
    assert (tmp_path / "requests.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_gone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        append(tmp_path / "requests.jsonl", {})
    assert raised.value.filename == str(tmp_path / "requests.jsonl")


GOOD = {
    "id": "1", "argv": ["true"], "nodes": ["a"], "ranks_per_node": 1, "cores_per_rank": 1, "timeout_s": 1.0,
    "env": {}, "cwd": None,
}  # fmt: skip


def test_a_request_is_read_strictly():
    assert request_of(json.loads(json.dumps(GOOD))).argv == ("true",)
    for change in (
        {"argv": []},
        {"argv": [1]},
        {"argv": ["a\0"]},
        {"env": {"a": 1}},
        {"nodes": None},
        {"cwd": 1},
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            request_of({**GOOD, **change})
    with pytest.raises(KeyError):
        request_of({name: value for name, value in GOOD.items() if name != "env"})


def test_a_program_gets_neither_the_place_of_a_rank_nor_the_channel(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MLHPC_CHANNEL", "unix:/x")
    monkeypatch.setenv("PYTHONPATH", "/some/where")
    run = RunPlan(
        run_id="r", nonce="n", attempt=0, workload="nodes", parameters={}, nodes=1, ranks=1, cores_per_rank=1,
        device_type="cpu", launcher="plain", time_limit_s=1.0, steps=0, warmup_steps=0,
        variables={"A": "run", "B": "run"},
    )  # fmt: skip
    found = program_environment(run, {"B": "test"})
    assert "RANK" not in found
    assert "MLHPC_CHANNEL" not in found
    assert (found["A"], found["B"], found["MLHPC_RUN"], found["PYTHONPATH"]) == (
        "run",
        "test",
        "r",
        "/some/where",
    )
