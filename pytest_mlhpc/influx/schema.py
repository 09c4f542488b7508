"""What lies in InfluxDB: three measurements with fixed tags and fields, and records and events as line protocol."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pytest_mlhpc.history.events import Event, JournalEntry
from pytest_mlhpc.history.series import Night, night_of
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.definition import digest
from pytest_mlhpc.store.record import Record

#: Version of what is defined here; field ``schema`` of ``mlhpc_run``. Readers take this one.
SCHEMA = 2

#: Version of the form of lines: which points a record becomes, with which tags and time. What is sent again in the same form
#: replaces itself; in another form it would be there twice. Cursors say in which form a file was sent. A test pins the lines.
FORM = 1

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Tag:
    """One tag: always a text, always there."""

    name: str
    text: str  #: what it says


@dataclass(frozen=True)
class InfluxField:
    """One field. ``kind`` is float, integer, boolean, text, or json (a text that holds JSON). ``always``: in every point."""

    name: str
    kind: str
    text: str
    unit: str = ""
    always: bool = True


@dataclass(frozen=True)
class MeasurementDefinition:
    """One measurement; tags and fields in the order in which they are written."""

    name: str
    text: str
    tags: tuple[Tag, ...]
    fields: tuple[InfluxField, ...]

    def field(self, name: str) -> InfluxField:
        """Return the field of that name.

        Raises:
            KeyError: there is none.
        """
        return {field.name: field for field in self.fields}[name]

    @property
    def tag_names(self) -> tuple[str, ...]:
        """Names of the tags."""
        return tuple(tag.name for tag in self.tags)


def _measurements() -> tuple[MeasurementDefinition, ...]:
    """Return what ``measurements.json`` defines."""
    text = resources.files(__package__).joinpath("measurements.json").read_text(encoding="utf-8")
    return tuple(
        MeasurementDefinition(
            name,
            found["text"],
            tuple(Tag(**tag) for tag in found["tags"]),
            tuple(InfluxField(**field) for field in found["fields"]),
        )
        for name, found in json.loads(text).items()
    )


#: One attempt of one run; one metric of it; one event.
RUN, METRIC, EVENT = MEASUREMENTS = _measurements()
#: The series, as in store.record.SeriesKey without the metric.
SERIES_TAGS = RUN.tags[:5]


def time_of(record_id: str, created_ns: int) -> int:
    """Return the time of a record's points: its second, and nanoseconds within it that the id determines."""
    digest = hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return created_ns // SECOND_NS * SECOND_NS + int.from_bytes(digest, "big") % SECOND_NS


#: InfluxDB takes no longer text as a field (docs.influxdata.com, "Line protocol", data type string: 64 KB); the rest is cut.
MAX_TEXT_BYTES = 60_000
#: JSON that would be longer is packed, behind this word.
_PACKED = "zlib:"

#: Control characters, half a surrogate pair, and the backslash, with which line protocol escapes but which it cannot escape.
_HARD = r"\x00-\x1f\x7f\u0085\u2028\u2029\\\ud800-\udfff"
_HARD_IN_TAG = re.compile(rf"[{_HARD}]|%(?=[0-9A-F]{{2}}|u[0-9A-F]{{4}})")
_HARD_IN_FIELD = re.compile(rf"[{_HARD}\u240a]|%(?=[0-9A-F]{{2}}|u[0-9A-F]{{4}})")
_CODED = re.compile("%(?:u([0-9A-F]{4})|([0-9A-F]{2}))")
_DASHES = re.compile("-+")


def tag_of(text: str) -> str:
    """Return how a text is a tag value: ``-`` if empty, one more ``-`` where it is nothing but those, hard characters as ``%0A``."""
    if not text or _DASHES.fullmatch(text):
        return f"{text}-"
    return _HARD_IN_TAG.sub(_code, text)


def from_tag(value: str) -> str:
    """Return the text that a tag value stands for."""
    if _DASHES.fullmatch(value):
        return value[1:]
    return _CODED.sub(_decode, value) if "%" in value else value


def field_of(text: str) -> str:
    """Return how a text is a field: line ends as ``␊`` (U+240A), so that a point is one line; other hard characters as ``%00``.

    What is beyond :data:`MAX_TEXT_BYTES` is cut.
    """
    if _HARD_IN_FIELD.search(text):
        text = _HARD_IN_FIELD.sub(lambda found: "␊" if found[0] == "\n" else _code(found), text)
    if len(text) * 4 > MAX_TEXT_BYTES and len(encoded := text.encode()) > MAX_TEXT_BYTES:
        text = encoded[:MAX_TEXT_BYTES].decode("utf-8", "ignore") + "… (cut)"
    return text


def from_field(value: str) -> str:
    """Return the text that a field stands for."""
    value = value.replace("␊", "\n")
    return _CODED.sub(_decode, value) if "%" in value else value


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"%{number:02X}" if number < 256 else f"%u{number:04X}"


def _decode(found: re.Match[str]) -> str:
    return chr(int(found[1] or found[2], 16))


def json_of(value: Mapping[str, str] | Sequence[str]) -> str:
    """Return names as a field that holds JSON; packed where that would be too long, such as the nodes of a whole machine."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if _HARD_IN_FIELD.search(text):
        text = _HARD_IN_FIELD.sub(_code, text)
    if len(text) * 4 > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        text = _PACKED + base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")
    return text


def from_json(value: str) -> Any:
    """Return what a field of :func:`json_of` holds.

    Raises:
        ValueError: it is damaged.
    """
    if value.startswith(_PACKED):
        try:
            value = zlib.decompress(base64.b64decode(value[len(_PACKED) :], validate=True)).decode()
        except zlib.error as error:
            raise ValueError(str(error)) from error
    return json.loads(_CODED.sub(_decode, value))


#: So many characters of node names stand in each metric, for dashboards; `mlhpc_run` has all.
NODES_CHARACTERS = 200
#: Integers of InfluxDB have 64 bits.
_LARGEST = (1 << 63) - 1

_TAG_ESCAPES = str.maketrans({",": "\\,", "=": "\\=", " ": "\\ "})


def lines_of(record: Record) -> list[str]:
    """Return the points of a record, one a line without its end: first the run's, then one for each metric.

    The same record gives the same lines, whoever asks and whenever.
    """
    night = night_of(record)
    moment = time_of(night.id, night.created_ns)
    series = {tag.name: str(getattr(night, tag.name)) for tag in SERIES_TAGS}
    series |= {"definition": digest(night.definition), "device_model": night.device_model}
    origin = {"purpose": night.purpose, "attempt": str(night.attempt)}
    tags = {**series, **origin, "verdict": night.verdict}
    lines = [f"{_key(RUN, tags)} {_fields(RUN, _run_values(record, night))} {moment}"]
    metrics = record.measurement.metrics if record.measurement else ()
    if metrics:
        common = _written_of_every_metric(night)
        # What is the same in all of them is escaped once: a record has some two dozen metrics.
        start = _key(METRIC, {**series, **origin}, only=len(series) + len(origin))
        lines += [
            f"{start},metric={_tag(one.name)},unit={_tag(one.unit)},better={_tag(one.better)} "
            f"{_fields(METRIC, _metric_values(one, night, record), common)} {moment}"
            for one in metrics
        ]
    return lines


def line_of_event(event: Event, *, removed: bool) -> str:
    """Return the point of an event; that of the same event with another end, or removed, takes its place."""
    return _event_line(
        {
            "system": event.system,
            "partition": event.partition,
            "kind": "maintenance" if event.is_maintenance else "change",
        },
        {
            "id": event.id, "text": event.text, "at_ns": event.at_ns, "made_ns": event.made_ns, "until_ns": event.until_ns,
            "by": event.by, "owner": "", "benchmarks": [], "removed": removed,
        },
        time_of(event.id, event.at_ns),
    )  # fmt: skip


def line_of_entry(entry: JournalEntry) -> str:
    """Return the point of an entry of the journal."""
    return _event_line(
        {"system": entry.system, "partition": entry.partition, "kind": entry.kind},
        {
            "id": entry.id, "text": entry.text, "at_ns": entry.at_ns, "made_ns": entry.at_ns, "until_ns": entry.until_ns,
            "by": entry.by, "owner": entry.owner, "benchmarks": list(entry.benchmarks), "removed": False,
        },
        time_of(f"{entry.id} {entry.at_ns}", entry.at_ns),
    )  # fmt: skip


def _event_line(tags: Mapping[str, str], values: Mapping[str, object], moment: int) -> str:
    return f"{_key(EVENT, tags)} {_fields(EVENT, values)} {moment}"


def _run_values(record: Record, night: Night) -> Mapping[str, object]:
    return {
        "schema": SCHEMA,
        "id": night.id,
        "created_ns": night.created_ns,
        "session": night.session,
        "node_id": night.node_id,
        "definition_text": night.definition,
        "branch": night.branch,
        "commit": night.commit,
        "preset": record.preset,
        "account": record.account,
        "job_id": night.job_id,
        "pipeline": night.pipeline,
        "owner": night.owner,
        "partition_owner": night.partition_owner,
        "failure": night.failure,
        "nodes": list(night.nodes),
        "unfit": dict(night.unfit),
        "judged": list(night.judged),
        "changes": dict(night.changes),
        "node_hours": night.node_hours,
        "queue_s": record.queue_s,
        "run_s": record.run_s,
        "node_count": len(night.nodes),
        "unfit_count": len(night.unfit),
        "energy_j": record.energy_j,
        "calibration": night.calibration,
    }


def _written_of_every_metric(night: Night) -> dict[str, str]:
    nodes = ",".join(night.nodes)
    if len(nodes) > NODES_CHARACTERS:
        nodes = f"{nodes[:NODES_CHARACTERS]}…"
    values = {
        "id": night.id, "verdict": night.verdict, "branch": night.branch, "commit": night.commit, "nodes": nodes,
    }  # fmt: skip
    return {name: _written(METRIC.field(name), value) for name, value in values.items()}


def _metric_values(metric: MetricValue, night: Night, record: Record) -> Mapping[str, object]:
    judged = metric.name in night.judged
    values = dict.fromkeys(field.name for field in METRIC.fields if not field.always)
    values |= {"value": metric.value, "judged": judged, "first": metric.first, "last": metric.last}
    if record.judged_by is not None:
        values["reference"] = record.judged_by.references.get(metric.name)
    if (fence := record.fences.get(metric.name)) is not None:
        reach = abs(fence.accepted) * fence.width
        values |= {
            "accepted": fence.accepted,
            "fence_low": fence.accepted - reach,
            "fence_high": fence.accepted + reach,
            "fence_used": drop(metric.value, fence.accepted, metric.better) / fence.width if reach else None,
        }
    return values


def _key(definition: MeasurementDefinition, values: Mapping[str, str], only: int | None = None) -> str:
    return definition.name + "".join(f",{name}={_tag(values[name])}" for name in definition.tag_names[:only])


@functools.lru_cache(maxsize=4096)  # the same names stand in every night
def _tag(text: str) -> str:
    return tag_of(text).translate(_TAG_ESCAPES)


def _fields(
    definition: MeasurementDefinition, values: Mapping[str, object], written: Mapping[str, str] | None = None
) -> str:
    """Return the fields of a point; those of *written* are line protocol already."""
    ready = written or {}
    found = (
        (field.name, ready[field.name] if field.name in ready else _written(field, values[field.name]))
        for field in definition.fields
    )
    return ",".join(f"{name}={text}" for name, text in found if text)


def _written(field: InfluxField, value: object) -> str:
    """Return a field's value as line protocol has it; an empty text for what is left out: None, and what is not a number."""
    if value is None:
        return ""
    match field.kind:
        case "float":
            number = float(value)  # type: ignore[arg-type]  # the definition says that it is one
            return repr(number) if math.isfinite(number) else ""
        case "integer":
            return f"{value}i" if -_LARGEST <= value <= _LARGEST else ""  # type: ignore[operator]  # as above
        case "boolean":
            return "true" if value else "false"
        case "json":
            return _quoted(json_of(value))  # type: ignore[arg-type]  # as above
        case _:
            return _quoted(field_of(str(value)))


def _quoted(text: str) -> str:
    """Return a text in quotes; it holds no backslash and no line end (:mod:`.texts`)."""
    return '"' + text.replace('"', '\\"') + '"'
