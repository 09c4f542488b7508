"""Workers begin with the tests of real servers, and no test is lost or doubled by the order."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from worker_queues import arrange

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Item:
    """What the order asks of a test."""

    name: str
    path: Path
    fixturenames: tuple[str, ...] = ()
    marks: frozenset[str] = field(default_factory=frozenset)

    def get_closest_marker(self, name):
        return name in self.marks


def make_tests(file, count, *fixtures, long=()):
    return [
        Item(f"{file}:{at}", HERE / file, fixtures, frozenset({"long"} if at in long else ()))
        for at in range(count)
    ]


ITEMS = [
    *make_tests("judge/test_a.py", 30),
    *make_tests("real/slurm/test_b.py", 3, "slurm", long={2}),
    *make_tests("real/test_c.py", 2),
    *make_tests("real/kubernetes/test_d.py", 2, "namespace"),
    *make_tests("real/slurm/test_e.py", 1, "slurm"),
    *make_tests("store/test_f.py", 3),
]


def parts_of(items, workers):
    """Return what each worker runs first, divided as `WorkStealingScheduling.check_schedule` of pytest-xdist does."""
    pending, parts = list(items), []
    for worker in range(workers):
        count = len(pending) // (workers - worker)
        parts.append([item.name for item in pending[:count]])
        del pending[:count]
    return parts


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 41, 50])
def test_every_test_is_run_once(workers):
    assert sorted(item.name for item in arrange(ITEMS, workers)) == sorted(item.name for item in ITEMS)


def test_half_of_the_workers_begin_with_real_servers_and_a_long_test_is_the_first_of_all():
    first, second, third, fourth = parts_of(arrange(ITEMS, 4), 4)
    assert first[:4] == [*(f"real/slurm/test_b.py:{at}" for at in (2, 0, 1)), "real/test_c.py:0"]
    assert second[:3] == [*(f"real/kubernetes/test_d.py:{at}" for at in (0, 1)), "real/slurm/test_e.py:0"]
    assert third[0].startswith("judge")
    assert fourth[-1] == "store/test_f.py:2"


def test_more_tests_of_servers_than_a_worker_begins_with_go_to_the_others():
    items = make_tests("real/slurm/test_b.py", 10, "slurm")
    assert [len(part) for part in parts_of(arrange(items, 3), 3)] == [3, 3, 4]
