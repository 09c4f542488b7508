"""In a screened program: writes down when steps end, how long they waited for data, and a profile of a few of them.

A step ends with the first optimizer's ``step()`` (torch >= 2.1 calls hooks after it). Waiting is time in ``next()`` of a
DataLoader in the main thread. torch's profiler runs from one step's end to a later one's and writes a trace. All of it goes to
``$MLHPC_SCREEN/<pid>.jsonl`` and ``<pid>.trace.json``; times are seconds of CLOCK_MONOTONIC. Standard library and whatever torch
the program has; Python >= 3.8. Nothing that goes wrong here gets into the program: it only stops being reported.
"""
# pathlib is not imported: every Python that the program starts has this, and it would take longer than all else here.

import atexit
import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

#: Seconds from one line to the next, and the most steps that are reported.
TELL_S, MOST_STEPS = 0.5, 200_000


class HookRecord:
    """What one process tells; ``profile`` is the first step that is profiled, and how many are."""

    def __init__(self, folder: str, profile: Tuple[int, int]) -> None:
        self.folder = folder
        self.first, self.count = profile
        self.begin()

    def begin(self) -> None:
        """Begin anew: at the start, and in a process that was forked (a launcher forks its ranks)."""
        self.pid = os.getpid()
        self.path = os.path.join(self.folder, str(self.pid))
        self.steps = 0
        self.ends: List[float] = []
        self.waits: List[float] = []
        self.wait_s = 0.0
        self.written_s = time.monotonic()
        self.optimizer: Optional[int] = None
        self.profiler: Any = None
        self.off = False

    def own(self) -> bool:
        """Say whether this is the thread that trains."""
        return not self.off and threading.current_thread() is threading.main_thread()

    def step(self, optimizer: Any) -> None:
        """Note that an optimizer has done its step."""
        if self.optimizer is None:
            self.optimizer = id(optimizer)
        if id(optimizer) != self.optimizer or self.steps >= MOST_STEPS:
            return
        now = time.monotonic()
        self.steps += 1
        self.ends.append(round(now, 6))
        self.waits.append(round(self.wait_s, 6))
        self.wait_s = 0.0
        if now - self.written_s > TELL_S:
            self.tell()
        if self.count and self.steps == self.first:
            self.begin_profile()
        elif self.profiler is not None and self.steps == self.first + self.count:
            self.end_profile()

    def tell(self, **more: Any) -> None:
        """Append a line."""
        line: Dict[str, Any] = {
            "host": socket.gethostname(),
            "rank": rank(),
            "ends": self.ends,
            "waits": self.waits,
        }
        line.update(more)
        self.ends, self.waits = [], []
        self.written_s = time.monotonic()
        try:
            with open(self.path + ".jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:  # a full disk, or screening is over and its folder is gone
            self.off = True

    def begin_profile(self) -> None:
        """Start torch's profiler, unless the program has its own on."""
        import torch

        try:
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # noqa: SLF001 - no public way to ask
                self.tell(profile="torch's profiler (the program had its own on)")
                return
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        except Exception as error:  # noqa: BLE001 - see above
            self.profiler = None
            self.tell(profile=f"torch's profiler (it did not start: {error})"[:200])

    def end_profile(self) -> None:
        """Stop it and write the trace."""
        profiler, self.profiler = self.profiler, None
        began = time.monotonic()
        try:
            profiler.stop()
            profiler.export_chrome_trace(self.path + ".part")
            os.replace(self.path + ".part", self.path + ".trace.json")
        except Exception as error:  # noqa: BLE001 - see above
            self.tell(profile=f"torch's profiler (it wrote nothing: {error})"[:200])
            return
        self.tell(profiled=[self.first, self.count], profile_cost_s=round(time.monotonic() - began, 6))

    def last(self) -> None:
        """Tell the rest at the process's end."""
        if self.own() and self.ends:
            self.tell()


def rank() -> Optional[int]:
    """Return this process's rank, or None."""
    said = os.environ.get("RANK", "")
    if said.isdigit():
        return int(said)
    with contextlib.suppress(Exception):
        found: Any = sys.modules["torch.distributed"]
        return int(found.get_rank()) if found.is_available() and found.is_initialized() else None
    return None


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """Let nothing out of *function*."""

    def call(*arguments: Any) -> None:
        with contextlib.suppress(Exception):
            function(*arguments)

    return call


def hook_optimizers(record: HookRecord, module: Any) -> None:
    """Report every optimizer's step."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        record.tell(lacks="steps (this torch calls no hooks after them; torch 2.1 and newer do)")
        return

    def after(optimizer: Any, _arguments: Any, _named: Any) -> None:
        if record.own():
            record.step(optimizer)

    register(guarded(after))


def hook_loaders(record: HookRecord, module: Any) -> None:
    """Have waiting in DataLoaders added up."""
    kind = module._BaseDataLoaderIter  # noqa: SLF001 - all iterators of DataLoaders are made of it
    original = kind.__next__

    def timed(self: Any) -> Any:
        if not record.own():
            return original(self)
        began = time.monotonic()
        try:
            return original(self)
        finally:
            record.wait_s += time.monotonic() - began

    kind.__next__ = timed


class Finder:
    """Calls something after a module was imported, and is no part of importing otherwise."""

    def __init__(self, then: Dict[str, Callable[..., None]]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find *name* as if this finder were not there, and add what comes after."""
        del path, target
        if name not in self.then:
            return None
        then = self.then.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def start() -> None:
    """Wait for torch's modules to be imported; a program that never does pays nothing."""
    folder = os.environ.get("MLHPC_SCREEN", "")
    if not os.path.isdir(folder):
        return
    first, _, count = os.environ.get("MLHPC_SCREEN_PROFILE", "").partition(":")
    record = HookRecord(folder, (int(first), int(count)) if first.isdigit() and count.isdigit() else (0, 0))
    then = {
        "torch.optim.optimizer": guarded(lambda module: hook_optimizers(record, module)),
        "torch.utils.data.dataloader": guarded(lambda module: hook_loaders(record, module)),
    }
    sys.meta_path.insert(0, Finder(then))
    atexit.register(guarded(record.last))
    os.register_at_fork(after_in_child=guarded(record.begin))
