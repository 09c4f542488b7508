import ast
import errno
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.node import login_node


def ask(do, body=b"", **fields):
    request = {**fields, "do": do, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return login_node.carry_out(request, body)


def put(root, path, body=b"x", at=0, last=True):
    return ask("put", body, root=str(root), path=path, at=at, last=last, mode=0o755)[0]


def run(*argv, **fields):
    wanted = {"directory": "", "limit_s": 30, "keep": [], "drop": [], "set": {}, **fields}
    return ask("run", argv=list(argv), **wanted)


def test_python_3_6_can_read_it_and_it_imports_nothing_of_ours():
    text = Path(login_node.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names) - {"__future__"}


def test_it_serves_until_its_input_ends_and_begins_with_the_mark(tmp_path):
    body = b"content"
    first = {"do": "hello", "id": 1, "size": 0, "sha256": hashlib.sha256().hexdigest(), "mark": "\nmark\n"}
    second = {
        "do": "put", "id": 2, "size": 7, "sha256": hashlib.sha256(body).hexdigest(),
        "root": str(tmp_path), "path": "runs/s/file", "at": 0, "last": True, "mode": 0o644,
    }  # fmt: skip
    given = b"".join(json.dumps(one).encode() + b"\n" for one in (first, second)) + body
    done = subprocess.run([sys.executable, login_node.__file__], input=given, capture_output=True, check=True)
    _, mark, hello, answer, rest = done.stdout.split(b"\n")
    assert (mark, json.loads(hello)["uid"], json.loads(answer)["id"], rest) == (b"mark", os.geteuid(), 2, b"")
    assert (tmp_path / "runs/s/file").read_bytes() == body


@pytest.mark.parametrize(
    "line", [b"no end", b'{"size": 9000000}\n', b""], ids=["cut short", "too large", "none"]
)
def test_a_request_that_is_none_ends_it(line):
    target = io.BytesIO()
    login_node.serve(io.BytesIO(line), target)
    assert target.getvalue() == b""


def test_a_request_that_was_changed_on_its_way_is_not_carried_out(tmp_path):
    request = {
        "do": "put",
        "size": 1,
        "sha256": hashlib.sha256(b"y").hexdigest(),
        "root": str(tmp_path),
        "path": "a/b",
    }
    assert login_node.carry_out(request, b"x")[0]["error"] == "the request came damaged"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../a", "a/../b", "/etc/passwd", "a//b", "", ".", "a/./b", "a\0b"])
def test_no_path_leads_out_of_the_root(tmp_path, path):
    answer = put(tmp_path, path)
    assert "is no path below" in answer["error"]
    assert ask("read", root=str(tmp_path), files=[[path, 0]], most=1)[0]["error"] == answer["error"]
    assert (
        ask("remove", root=str(tmp_path), paths=[path], unless="u", last="l")[0]["error"] == answer["error"]
    )


def test_a_file_takes_its_place_with_its_last_piece(tmp_path):
    assert put(tmp_path, "runs/s/a/file", b"one", last=False) == {}
    assert not (tmp_path / "runs/s/a/file").exists()
    assert put(tmp_path, "runs/s/a/file", b"two", at=3) == {}
    path = tmp_path / "runs/s/a/file"
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"onetwo", 0o700)
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_a_piece_whose_predecessor_is_missing_is_refused(tmp_path):
    assert (
        "has not the 5 bytes that precede this piece" in put(tmp_path, "runs/s/file", b"two", at=5)["error"]
    )


def test_folders_below_runs_are_this_users_alone(tmp_path):
    tmp_path.chmod(0o1777)
    ask("make", root=str(tmp_path), paths=["runs/s/a"])
    modes = [(tmp_path / path).stat().st_mode & 0o7777 for path in ("runs", "runs/s", "runs/s/a")]
    assert modes == [0o1777, 0o700, 0o700]


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/s").symlink_to("/tmp")
    assert (
        ask("make", root=str(tmp_path), paths=["runs/s/a"])[0]["error"] == f"{tmp_path}/runs/s is no folder"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "runs/s").mkdir(parents=True)
    os.chown(tmp_path / "runs/s", 65534, 65534)
    answer = put(tmp_path, "runs/s/file")
    assert answer["error"] == f"{tmp_path}/runs/s belongs to user 65534, not to this user"


def test_a_root_that_is_not_there_is_named(tmp_path):
    answer = put(tmp_path / "none", "runs/s/file")
    assert (answer["errno"], answer["path"]) == (errno.ENOENT, f"{tmp_path}/none/runs")


def test_a_listing_has_regular_files_alone_and_not_what_is_left_out(tmp_path):
    for name in ("a/file", "a/b/deep", "a/data/set", "a/files-1/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, ns=(5, 5))
    (tmp_path / "a/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "a/pipe")
    body = ask("tree", root=str(tmp_path), path="a", leave=["data", "files-"])[1]
    assert json.loads(body) == [["b/deep", 1, 5], ["file", 1, 5]]
    assert ask("tree", root=str(tmp_path), path="none", leave=[]) == ({}, b"[]")


def test_a_listing_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(login_node, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / name).touch()
    answer = ask("tree", root=str(tmp_path.parent), path=tmp_path.name, leave=[])[0]
    assert answer["error"] == f"{tmp_path} has more than 2 files"


def test_several_files_are_read_at_once_as_far_as_they_fit(tmp_path):
    for name, content in (("one", b"12345"), ("two", b"abcde")):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(7, 7))
    answer, body = ask("read", root=str(tmp_path), files=[["one", 2], ["none", 0], ["two", 0]], most=5)
    assert (answer["found"], body) == ([[3, 5, 7], None, [2, 5, 7]], b"345ab")


def test_no_link_is_read(tmp_path):
    (tmp_path / "link").symlink_to("/etc/passwd")
    answer, body = ask("read", root=str(tmp_path), files=[["link", 0]], most=5)
    assert (answer["errno"], body) == (errno.ELOOP, b"")


def test_a_command_gets_the_logins_environment_without_what_would_change_it(monkeypatch, tmp_path):
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "OTHER"):
        monkeypatch.setenv(name, "here")
    answer, body = run(
        "env", drop=["SLURM_"], keep=["SLURM_CONF"], set={"LC_ALL": "C"}, directory=str(tmp_path)
    )
    lines = body[: answer["out"]].decode().splitlines()
    found = {
        line for line in lines if line.partition("=")[0] in {"SLURM_CONF", "SLURM_JOB_ID", "OTHER", "LC_ALL"}
    }
    assert (answer["code"], found) == (0, {"SLURM_CONF=here", "OTHER=here", "LC_ALL=C"})


def test_no_argument_is_read_by_a_shell():
    answer, body = run("printf", "%s|", "$(id)", "; exit 3", "a'b\"c\n")
    assert (answer["code"], body) == (0, b"$(id)|; exit 3|a'b\"c\n|")


def test_output_and_errors_of_a_command_come_apart_with_its_exit_code():
    answer, body = run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (answer["code"], body[: answer["out"]], body[answer["out"] :]) == (3, b"out\n", b"err\n")


def test_a_command_that_is_not_there_is_named():
    answer = run("no-such-command", set={"PATH": "/bin"})[0]
    assert (answer["errno"], answer["error"]) == (
        errno.ENOENT,
        "the command 'no-such-command' is not on PATH (/bin)",
    )


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    answer = run("sh", "-c", f"(sleep 600; touch {tmp_path}/late) & sleep 600", limit_s=0.2)[0]
    assert answer["error"] == "no answer from sh within 0.2 s"
    assert answer["errno"] == errno.ETIMEDOUT


def test_a_flood_of_output_is_refused(monkeypatch):
    monkeypatch.setattr(login_node, "BODY_BYTES", 100)
    assert run("printf", "%060d", "1")[0]["error"] == "printf printed 60 bytes, more than 50"


def test_what_is_removed_is_gone_and_a_sessions_folder_goes_with_its_last_allocation(tmp_path):
    for name in ("s/a/file", "s/lines/a.up", "s/lines/b.up", "s/payload/zip", "s/b/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for one in "ab":
        ask("remove", root=str(tmp_path), paths=[f"s/{one}", f"s/lines/{one}.up"], unless="s/lines", last="s")
        assert (tmp_path / "s").exists() == (one == "a")
