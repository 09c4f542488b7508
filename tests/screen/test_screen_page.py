"""The page: whole in one file, and safe whatever names it holds."""

from __future__ import annotations

import json
import re

from screen_samples import device, process, samples, told

from pytest_mlhpc.screen.charts import MOST_CURVES, charts
from pytest_mlhpc.screen.page import html_of

HOSTILE = "</script><b>&'\" \N{PILE OF POO}"


def looks(count=4, seconds=10):
    return samples(lambda second: [process(pid, second, name=HOSTILE, rank=pid) for pid in range(count)],
                   lambda _second: [device()], seconds=seconds)  # fmt: skip


def test_curves_are_steps_processes_and_devices():
    found = {one.title: one for one in charts(looks(), [told(step=0.5, wait=0.2)])}
    assert set(found) == {
        "Time of a step", "Wait for data in a step", "Cores busy", "Memory of processes", "Time in which a kernel ran", "Power",
        "Temperature", "Clock", "Device memory",
    }  # fmt: skip
    assert found["Time of a step"].curves[0][0] == "rank 0"
    assert set(found["Time of a step"].curves[0][1]) == {0.5}
    assert found["Cores busy"].times == tuple(float(second) for second in range(1, 10))
    assert found["Power"].curves == (("n1 0", (500.0,) * 10),)


def test_more_processes_than_can_be_told_apart_are_left_out():
    found = {one.title: one for one in charts(looks(40), ())}
    assert len(found["Cores busy"].curves) == MOST_CURVES
    assert "Time of a step" not in found


def test_the_page_holds_no_name_that_could_end_its_element_and_fetches_nothing():
    text = html_of([f"screened {HOSTILE}", f"1. {HOSTILE}"], charts(looks(), ()))
    assert text.isascii()
    assert text.count("</script>") == 3
    assert "<b>" not in text
    content = re.search(r'id="content">(.*?)</script>', text, re.DOTALL)
    assert content is not None
    assert HOSTILE in json.loads(content[1])[0]["names"][0]
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
