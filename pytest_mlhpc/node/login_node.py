"""The program that a controller elsewhere runs on a login node by ssh: requests arrive on standard input, answers leave on standard output.

It is sent as text and runs alone (``provision/ssh.py``): it imports nothing of this package, and Python 3.6 can read it. A
request, and an answer, is a line of JSON and then ``size`` bytes, whose hash the line has as ``sha256``. Requests are carried
out one after the other. Paths are relative to ``root``, a folder that the nodes see.
"""

import contextlib
import errno
import hashlib
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Dict, List, Optional, Tuple

#: Version of these requests and answers.
VERSION = 1

#: Longest line of a request, and most bytes behind it or behind an answer.
LINE_BYTES, BODY_BYTES = 1 << 20, 1 << 23

#: Most files that one listing tells of: the files of a run are tens.
MOST_FILES = 20000

_FOLDER, _FILE = 0o700, 0o600
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Fields = Dict[str, Any]
Answer = Tuple[Fields, bytes]


class RequestRefused(Exception):  # noqa: N818 - named for what happened
    """A request that cannot be carried out. ``number`` is an errno, 0: none."""

    def __init__(self, text: str, number: int = 0) -> None:
        super().__init__(text)
        self.number = number


def place(root: str, path: str) -> Path:
    """Return the absolute path of *path*, which stays below *root*.

    Raises:
        RequestRefused: it does not, or is no path.
    """
    bad = "\0" in root + path or any(part in ("", ".", "..") for part in path.split("/"))
    if bad or not Path(root).is_absolute():
        raise RequestRefused(f"{path!r} is no path below {root!r}")
    return Path(root, path)


def make_folder(root: str, path: str) -> None:
    """Make the folder *path* and those above it, up to *root*, which is there.

    The first, ``runs``, may be a group's, as *root*; what is below is this user's alone.

    Raises:
        RequestRefused: one is another user's, or a link.
        OSError: one cannot be made.
    """
    folder = Path(root)
    for depth, part in enumerate(place(root, path).relative_to(root).parts):
        folder = folder / part
        with contextlib.suppress(FileExistsError):
            folder.mkdir(_FOLDER)
            if not depth:  # sticky bit and all
                folder.chmod(stat.S_IMODE(Path(root).stat().st_mode))
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise RequestRefused(f"{folder} is no folder")
        if depth and found.st_uid != os.geteuid():
            raise RequestRefused(f"{folder} belongs to user {found.st_uid}, not to this user")
        if depth and stat.S_IMODE(found.st_mode) != _FOLDER:
            folder.chmod(_FOLDER)


def hello(_request: Fields, _body: bytes) -> Answer:
    """Tell whose login this is, and what time it is."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    about = {"version": VERSION, "uid": uid, "user": user, "host": socket.gethostname()}
    return dict(about, python=sys.version.split()[0]), b""


def run(request: Fields, _body: bytes) -> Answer:
    """Run a command to its end, at most ``limit_s`` seconds; its output is the body, standard output first.

    It gets this login's environment without the variables that begin with one of ``drop``, but for those in ``keep``, and
    with those of ``set``.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name in request["keep"] or not name.startswith(tuple(request["drop"]))
    }
    environ.update(request["set"])
    argv, path = request["argv"], environ.get("PATH", os.defpath)
    program = shutil.which(argv[0], path=path)
    if program is None:
        raise RequestRefused(f"the command {argv[0]!r} is not on PATH ({path})", errno.ENOENT)
    process = subprocess.Popen(
        [program, *argv[1:]], env=environ, cwd=request["directory"] or "/", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=request["limit_s"])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RequestRefused(
            f"no answer from {argv[0]} within {request['limit_s']:g} s", errno.ETIMEDOUT
        ) from None
    if len(out) > BODY_BYTES // 2:
        raise RequestRefused(f"{argv[0]} printed {len(out)} bytes, more than {BODY_BYTES // 2}", errno.EFBIG)
    return {"code": process.returncode, "out": len(out)}, out + err[: BODY_BYTES // 4]


def put(request: Fields, body: bytes) -> Answer:
    """Write a piece of a file beside its place; with the last piece it takes its place. Its folders are made."""
    path = place(request["root"], request["path"])
    make_folder(request["root"], request["path"].rpartition("/")[0])
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(str(part), _WRITE | (0 if request["at"] else os.O_TRUNC), _FILE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if os.fstat(descriptor).st_size != request["at"]:
                raise RequestRefused(f"{part} has not the {request['at']} bytes that precede this piece")
            file.seek(request["at"])
            file.write(body)
            file.flush()
            if request["last"]:
                os.fchmod(descriptor, request["mode"] & 0o700)
                os.fsync(descriptor)
        if request["last"]:
            part.rename(path)
    except OSError as error:
        error.filename = str(path)
        part.unlink()  # a full disk gets its room back
        raise
    return {}, b""


def make(request: Fields, _body: bytes) -> Answer:
    """Make folders."""
    for path in request["paths"]:
        make_folder(request["root"], path)
    return {}, b""


def tree(request: Fields, _body: bytes) -> Answer:
    """Tell path, size and time of change (ns) of each regular file below a folder, without what lies below ``leave``. No link is followed."""
    top = place(request["root"], request["path"])
    found: List[List[Any]] = []
    folders = [""]
    while folders:
        inside = folders.pop()
        for entry in _entries(top / inside):
            name = f"{inside}/{entry.name}" if inside else entry.name
            if entry.is_dir(follow_symlinks=False) and not name.startswith(tuple(request["leave"])):
                folders.append(name)
            elif entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                found.append([name, about.st_size, about.st_mtime_ns])
            if len(found) + len(folders) > MOST_FILES:
                raise RequestRefused(f"{top} has more than {MOST_FILES} files", errno.EFBIG)
    return {}, json.dumps(sorted(found)).encode("ascii")


def _entries(folder: Path) -> "List[os.DirEntry[str]]":
    """Return what is in *folder*: nothing if it is not made yet, or gone."""
    try:
        with os.scandir(str(folder)) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def read(request: Fields, _body: bytes) -> Answer:
    """Tell what the files (path, offset) hold from there on, up to ``most`` bytes together.

    ``found`` has of each how many bytes follow in the body, its size, and its time of change (ns); None: it is not there.
    """
    found: List[Optional[List[int]]] = []
    data = b""
    for path, offset in request["files"]:
        one, piece = _piece(
            place(request["root"], path), offset, min(request["most"], BODY_BYTES) - len(data)
        )
        found.append(one)
        data += piece
    return {"found": found}, data


def _piece(path: Path, offset: int, most: int) -> Tuple[Optional[List[int]], bytes]:
    try:
        descriptor = os.open(str(path), _READ)
    except FileNotFoundError:
        return None, b""
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise RequestRefused(f"{path} is no regular file")
        piece = os.pread(descriptor, max(0, most), offset)
    finally:
        os.close(descriptor)
    return [len(piece), about.st_size, about.st_mtime_ns], piece


def remove(request: Fields, _body: bytes) -> Answer:
    """Remove files and folders with all that is in them; what is not there is no error. ``last`` is removed once ``unless`` is empty."""
    for path in request["paths"]:
        _remove(place(request["root"], path))
    with contextlib.suppress(OSError):  # others are in use
        place(request["root"], request["unless"]).rmdir()
        _remove(place(request["root"], request["last"]))
    return {}, b""


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(str(path))
        else:
            path.unlink()


REQUESTS = {
    "hello": hello,
    "run": run,
    "put": put,
    "make": make,
    "tree": tree,
    "read": read,
    "remove": remove,
}


def carry_out(request: Fields, body: bytes) -> Answer:
    """Return the answer to a request; an error is an answer."""
    if len(body) != request["size"] or hashlib.sha256(body).hexdigest() != request["sha256"]:
        return {"error": "the request came damaged", "errno": 0, "path": ""}, b""
    try:
        return _bounded(*REQUESTS[request["do"]](request, body))
    except RequestRefused as error:
        return {"error": str(error), "errno": error.number, "path": ""}, b""
    except OSError as error:
        path = str(error.filename or request.get("path", ""))
        return {"error": error.strerror or str(error), "errno": error.errno or 0, "path": path}, b""


def _bounded(answer: Fields, body: bytes) -> Answer:
    if len(body) > BODY_BYTES:
        raise RequestRefused(f"the answer has {len(body)} bytes, more than {BODY_BYTES}", errno.EFBIG)
    return answer, body


def serve(source: IO[bytes], target: IO[bytes]) -> None:
    """Answer requests until *source* ends: then the controller is gone, or wants no more."""
    while True:
        line = source.readline(LINE_BYTES)
        if not line.endswith(b"\n"):
            return
        request = json.loads(line.decode("ascii"))
        if request["size"] > BODY_BYTES:
            return
        answer, body = carry_out(request, source.read(request["size"]))
        head = dict(answer, id=request["id"], size=len(body), sha256=hashlib.sha256(body).hexdigest())
        # A mark before the first answer: login scripts may have printed something.
        mark = request.get("mark", "")
        target.write(mark.encode("ascii") + json.dumps(head).encode("ascii") + b"\n" + body)
        target.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    serve(sys.stdin.buffer, sys.stdout.buffer)
