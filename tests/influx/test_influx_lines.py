"""Line protocol and the texts in it: pure, so that hypothesis may try anything."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import measurement, record

from pytest_mlhpc.history.events import Event, JournalEntry
from pytest_mlhpc.influx import schema
from pytest_mlhpc.influx.schema import line_of_entry, line_of_event, lines_of
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import JudgedBy, RecordedFence, RecordedVetting

ANY_TEXT = st.text(st.characters(categories=["L", "N", "P", "S", "Z", "C"]), max_size=30)


WAYS = {
    "tag": (schema.tag_of, schema.from_tag),
    "field": (schema.field_of, schema.from_field),
    "JSON": (
        lambda text: schema.json_of({text: text}),
        lambda field: next(iter(schema.from_json(field).values())),
    ),
}


@pytest.mark.parametrize(("write", "read"), WAYS.values(), ids=WAYS)
@given(ANY_TEXT)
def test_a_text_comes_back_from(write, read, text):
    written = write(text)
    assert read(written) == text
    assert not re.search(r"[\x00-\x1f\\]", written)
    written.encode()  # no half surrogate pair is left


def test_no_tag_is_empty():
    assert schema.tag_of("")


def test_the_nodes_of_a_whole_machine_fit_into_one_field():
    nodes = [f"nid{number:06d}" for number in range(9000)]
    field = schema.json_of(nodes)
    assert len(field) < schema.MAX_TEXT_BYTES
    assert schema.from_json(field) == nodes


@pytest.mark.parametrize("field", ["zlib:", "zlib:!!!", "zlib:AAAA", "[", ""])
def test_damaged_json_is_an_error_and_no_crash(field):
    with pytest.raises(ValueError, match=r".*"):
        schema.from_json(field)


def test_a_very_long_text_is_cut_and_says_so():
    field = schema.field_of("ä" * 100_000)
    assert len(field.encode()) < 65_536
    assert field.endswith("… (cut)")


def test_a_record_is_one_point_and_one_for_each_metric_all_at_one_time():
    made = record(
        1, measurement=measurement(more=(MetricValue("loss", 1.5, "1", "lower", first=2.0, last=1.0),))
    )
    run, *metrics = lines_of(made)
    assert run.startswith("mlhpc_run,")
    assert [line.partition(",")[0] for line in metrics] == ["mlhpc_metric"] * 2
    assert len({line.rpartition(" ")[2] for line in (run, *metrics)}) == 1
    assert lines_of(made) == [run, *metrics]


def test_the_time_is_the_records_second_and_its_id():
    moment = schema.time_of("a", 1_800_000_000_123_456_789)
    assert moment // schema.SECOND_NS == 1_800_000_000
    assert moment == schema.time_of("a", 1_800_000_000_999_999_999)
    assert moment != schema.time_of("b", 1_800_000_000_123_456_789)


@pytest.mark.parametrize(
    ("definition", "number"), [(schema.RUN, 0), (schema.METRIC, 1)], ids=["mlhpc_run", "mlhpc_metric"]
)
def test_points_have_the_tags_and_fields_of_the_schema(definition, number):
    made = record(1, energy_j=1.0, measurement=measurement(calibration_before=1.0))
    line = lines_of(made)[number]
    key, fields = re.split(r"(?<!\\) ", line, maxsplit=1)
    assert re.findall(r"(?<!\\),([a-z_]+)=", key) == list(definition.tag_names)
    always = [field.name for field in definition.fields if field.always]
    written = re.findall(r"(?:^|,)([a-z_]+)=", re.sub(r'"(?:[^"\\]|\\.)*"', '""', fields))
    assert [name for name in written if name in always] == always
    assert set(written) <= {field.name for field in definition.fields}


def test_no_tag_has_the_name_of_a_field():
    """InfluxDB 3 refuses such a table."""
    for definition in schema.MEASUREMENTS:
        fields = {field.name for field in definition.fields}
        assert not fields & set(definition.tag_names)
        assert "time" not in fields


#: Points of one record in form 1. Another text here needs another FORM: what is sent again must replace itself.
FORM_1 = (
    (
        "mlhpc_run,system=a\\ b,partition=standard,environment=default,fingerprint=-,"
        "benchmark=suites/test_a.py::test_a,definition=4e70cbab9d5a,device_model=EPYC,purpose=nightly,attempt=0,"
        'verdict=passed schema=2i,id="01890000-0000-7000-8000-000000000001",created_ns=1800000001000000000i,'
        'session="01890000-0000-7000-8000-aaaaaaaaaaaa",node_id="suites/test_a.py::test_a[cirrus:standard]",'
        'definition_text="resnet50 devices=1 nodes=1 preset=smoke steps=10",branch="main",commit="c0ffee",'
        'preset="smoke",account="cirrus:z01",job_id="7",pipeline="31",owner="ada, bob",partition_owner="@hpc/ops",failure="one␊two",nodes="[\\"n1\\",\\"n2\\"]",'
        'unfit="{\\"n3\\":\\"slow\\"}",judged="[\\"rate\\"]",changes="{\\"driver\\":\\"570\\"}",node_hours=0.5,queue_s=0.0,'
        "run_s=0.0,node_count=2i,unfit_count=1i,energy_j=5.0,calibration=3.0 1800000001094598008"
    ),
    (
        "mlhpc_metric,system=a\\ b,partition=standard,environment=default,fingerprint=-,"
        "benchmark=suites/test_a.py::test_a,definition=4e70cbab9d5a,device_model=EPYC,purpose=nightly,attempt=0,"
        "metric=rate,unit=samples/s,better=higher value=100.0,judged=true,"
        'id="01890000-0000-7000-8000-000000000001",verdict="passed",branch="main",commit="c0ffee",nodes="n1,'
        'n2" 1800000001094598008'
    ),
    (
        "mlhpc_metric,system=a\\ b,partition=standard,environment=default,fingerprint=-,"
        "benchmark=suites/test_a.py::test_a,definition=4e70cbab9d5a,device_model=EPYC,purpose=nightly,attempt=0,"
        'metric=loss,unit=1,better=lower value=1.5,judged=false,id="01890000-0000-7000-8000-000000000001",'
        'verdict="passed",branch="main",commit="c0ffee",nodes="n1,n2",first=2.0,last=1.0 1800000001094598008'
    ),
)


def test_the_lines_of_a_record_are_pinned_by_the_version_of_their_form():
    metric = MetricValue("loss", 1.5, "1", "lower", first=2.0, last=1.0)
    measured = measurement(more=(metric,), environment={"driver": "570"}, calibration_before=3.0)
    made = record(
        1, system="a b", commit="c0ffee", failure="one\ntwo", nodes=("n1", "n2"), energy_j=5.0, node_hours=0.5, measurement=measured,
        vetting=RecordedVetting("quick", 1.0, unfit={"n3": "slow"}), account="cirrus:z01", job_id="7", preset="smoke", pipeline="31", owner="ada, bob", partition_owner="@hpc/ops",
    )  # fmt: skip
    assert schema.FORM == 1
    assert lines_of(made) == list(FORM_1)


#: The same of an event, and of an entry of the journal.
EVENTS_1 = (
    (
        'mlhpc_event,system=a\\ b,partition=-,kind=maintenance id="0badcafe",text="new disks",at_ns=1800000001000000000i,'
        'made_ns=1700000000000000000i,until_ns=1800000002000000000i,by="ada",owner="",benchmarks="[]",removed=true '
        "1800000001117655074"
    ),
    (
        'mlhpc_event,system=cirrus,partition=gpu,kind=alert_opened id="regr-cirrus",text="rate 8 % slower",'
        'at_ns=1800000001000000000i,made_ns=1800000001000000000i,until_ns=0i,by="",owner="bob",'
        'benchmarks="[\\"cirrus:gpu:a\\"]",removed=false 1800000001314938935'
    ),
)


def test_the_lines_of_events_are_pinned_by_the_version_of_their_form():
    at_ns = 1_800_000_001 * schema.SECOND_NS
    event = Event("0badcafe", "a b", "new disks", at_ns, "", "ada", 17 * 10**17, at_ns + schema.SECOND_NS)
    entry = JournalEntry(
        "regr-cirrus", "alert_opened", "cirrus", "rate 8 % slower", at_ns, "gpu", owner="bob", benchmarks=("cirrus:gpu:a",)
    )  # fmt: skip
    assert schema.FORM == 1
    assert [line_of_event(event, removed=True), line_of_entry(entry)] == list(EVENTS_1)


def test_entries_of_one_alert_and_system_have_points_of_their_own():
    kinds = ("alert_opened", "alert_closed")
    entries = [
        JournalEntry("regr", kind, "a", "t", at_ns) for kind in kinds for at_ns in (10**18, 10**18 + 1)
    ]
    points = {re.sub(r" id=.* ", " ", line_of_entry(entry)) for entry in entries}
    assert len(points) == 4


@pytest.mark.parametrize(
    ("value", "better", "fields"),
    [
        (90.0, "higher", "accepted=100.0,fence_low=95.0,fence_high=105.0,fence_used=2.0,reference=80.0"),
        (90.0, "lower", "accepted=100.0,fence_low=95.0,fence_high=105.0,fence_used=-2.0,reference=80.0"),
    ],
)
def test_a_metric_that_was_judged_has_its_fence_and_reference(value, better, fields):
    loss = MetricValue("loss", value, "1", better)
    by = JudgedBy(
        {}, {}, "main", "fail", local=False, nightly=True, series=1, reruns_allowed=0, reruns_broken=0, references={"loss": 80.0}
    )  # fmt: skip
    made = record(
        1, measurement=measurement(more=(loss,)), fences={"loss": RecordedFence(100.0, 0.05)}, judged_by=by
    )
    _, rate, line = lines_of(made)
    assert line.rpartition(" ")[0].endswith(f",{fields}")
    assert "accepted" not in rate
    assert "reference" not in rate
