"""The page: whole in one file, and safe whatever names it holds."""

import json
import os
import re
from dataclasses import replace

from full_disk import small_disk
from screen_samples import GIB, device, process, reported, samples

from pytest_mlhpc.screen.hook_output import CUT, read_traces
from pytest_mlhpc.screen.report import MOST_CURVES, MOST_POINTS, charts, html_of
from pytest_mlhpc.screen.run import Options, _write_page, not_reported
from pytest_mlhpc.store.locations import replace_file

HOSTILE = "</script><b>&'\" \N{PILE OF POO}"


def looks(count=4, seconds=10):
    def ranks(second):
        return [process(pid, second, name=HOSTILE, rank=pid) for pid in range(count)]

    return samples(ranks, lambda _second: [device()], seconds=seconds)


def test_curves_are_steps_processes_and_devices():
    found = {one.title: one for one in charts(looks(), [reported(step=0.5, wait=0.2)])}
    assert set(found) == {
        "Time of a step", "Wait for data in a step", "Cores busy", "Memory of processes", "Time in which a kernel ran", "Power",
        "Temperature", "Clock", "Device memory",
    }  # fmt: skip
    assert found["Time of a step"].curves[0][0] == "rank 0"
    assert set(found["Time of a step"].curves[0][1]) == {None, 0.5}
    *times, last = found["Cores busy"].times
    assert times == [float(second) for second in range(10)]
    assert last == 14.5  # steps go on after the last look
    assert found["Cores busy"].curves[0][1][0] is None
    assert found["Power"].curves == (("n1 0", (*(500.0,) * 10, None)),)


def test_all_charts_of_a_page_show_the_same_time_also_of_who_came_late_or_ended_early():
    def part(host, begin, seconds, boards=()):
        seen = samples(lambda second: [process(10, second)], lambda _second: boards, seconds, host=host)
        return [replace(one, time_s=one.time_s + begin) for one in seen]

    taken = [*part("late", 20, 41, [device()]), *part("early", 0, 11), *part("whole", 0, 60)]
    found = charts(taken, [reported(step=0.5)])
    titles = [one.title for one in found]
    assert titles[:3] == ["Time of a step", "Wait for data in a step", "Cores busy"]
    assert {(one.times[0], one.times[-1]) for one in found} == {(0.0, 60.0)}
    memory = found[titles.index("Memory of processes")]
    spans = {}
    for name, values in memory.curves:
        times = [time for time, value in zip(memory.times, values, strict=True) if value is not None]
        spans[name.split()[0]] = (times[0], times[-1])
    assert spans == {"late": (20.0, 60.0), "early": (0.0, 10.0), "whole": (0.0, 59.0)}
    assert charts([], ()) == ()


def test_no_curve_loses_its_points_nor_its_peak_to_those_of_another():
    def part(host, begin):
        def peaking(second):
            return [process(10, 0, rss_bytes=GIB * (1 + (second == 7001)))]

        seen = samples(peaking, seconds=9000, host=host)
        return [replace(one, time_s=one.time_s + begin) for one in seen]

    memory = charts([*part("n1", 0.0), *part("n2", 0.5)], ())[-1]
    assert memory.title == "Memory of processes"
    for _, values in memory.curves:
        known = [value for value in values if value is not None]
        assert MOST_POINTS / 2 <= len(known) <= MOST_POINTS
        assert max(known) == 2.0


def test_more_processes_than_can_be_distinguished_are_left_out():
    found = {one.title: one for one in charts(looks(40), ())}
    assert len(found["Cores busy"].curves) == MOST_CURVES
    assert "Time of a step" not in found


def test_the_page_holds_no_name_that_could_end_its_element_and_fetches_nothing():
    text = html_of([f"screened {HOSTILE}", f"1. {HOSTILE}"], charts(looks(), ()))
    assert text.isascii()
    assert text.count("</script>") == 3
    assert "<b>" not in text
    (content,) = re.findall(r'id="content">(.*?)</script>', text, re.DOTALL)
    assert HOSTILE in json.loads(content)[0]["names"][0]
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def test_a_page_on_a_full_disk_leaves_the_old_one_and_a_device_stays_a_device(tmp_path, capsys):
    with small_disk(tmp_path / "small", mounted=True) as disk:
        page = tmp_path / "small/curves.html"
        page.write_text("old")
        with disk.full(left=8192):
            _write_page(page, ["screened x"], looks(), ())
        assert f"mlhpc screen: {page}: cannot be written: {disk.words}\n" in capsys.readouterr().err
        assert page.read_text() == "old"
        assert [one.name for one in page.parent.iterdir()] == ["curves.html"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDWR), "rb"):
        replace_file(pipe, "short")
        assert pipe.is_fifo()


def test_what_a_full_disk_cut_short_is_not_taken_for_no_steps(tmp_path):
    line = json.dumps({"host": "n1", "rank": 0, "ends": [1.0, 2.0], "waits": [0.0, 0.5]}) + "\n"
    for name, text in (("10", line), ("11", line + line[:20]), ("12", "")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    found = read_traces(tmp_path)
    assert [(one.pid, one.ends, one.notes) for one in found] == [
        (10, (1.0, 2.0), ()), (11, (1.0, 2.0), (CUT,)), (12, (), (CUT,)),
    ]  # fmt: skip
    arguments = Options(60.0, 1.0, profile="off")
    assert not_reported(arguments, found) == not_reported(arguments, found[2:]) == [CUT]
