"""A record as line protocol: pure, and driven by the definitions in :mod:`.schema`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pytest_mlhpc.history.nights import night_of
from pytest_mlhpc.history.series import Night
from pytest_mlhpc.influx import schema
from pytest_mlhpc.influx.schema import Field, MeasurementDefinition
from pytest_mlhpc.influx.texts import field_of, json_of, tag_of
from pytest_mlhpc.node.protocol.schema import Metric
from pytest_mlhpc.store.definition import digest
from pytest_mlhpc.store.record import Record

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
    moment = schema.time_of(night.id, night.created_ns)
    series = {tag.name: str(getattr(night, tag.name)) for tag in schema.SERIES_TAGS}
    series |= {"definition": digest(night.definition), "device_model": night.device_model}
    origin = {"purpose": night.purpose, "attempt": str(night.attempt)}
    tags = {**series, **origin, "verdict": night.verdict}
    lines = [f"{_key(schema.RUN, tags)} {_fields(schema.RUN, _run_values(record, night))} {moment}"]
    metrics = record.measurement.metrics if record.measurement else ()
    if metrics:
        common = _fields_of_every_metric(night)
        # What is the same in all of them is escaped once: a record has some two dozen metrics.
        start = _key(schema.METRIC, {**series, **origin}, only=len(series) + len(origin))
        lines += [
            f"{start},metric={_tag(one.name)},unit={_tag(one.unit)},better={_tag(one.better)} "
            f"{_fields(schema.METRIC, {**common, **_metric_values(one, night)})} {moment}"
            for one in metrics
        ]
    return lines


def _run_values(record: Record, night: Night) -> Mapping[str, object]:
    return {
        "schema": schema.SCHEMA,
        "id": night.id,
        "created_ns": night.created_ns,
        "session": night.session,
        "node_id": night.node_id,
        "definition_text": night.definition,
        "branch": night.branch,
        "commit": night.commit,
        "preset": record.preset,
        "account": record.account,
        "job_id": record.job_id,
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


def _fields_of_every_metric(night: Night) -> dict[str, object]:
    nodes = ",".join(night.nodes)
    if len(nodes) > NODES_CHARACTERS:
        nodes = f"{nodes[:NODES_CHARACTERS]}…"
    return {
        "id": night.id, "verdict": night.verdict, "branch": night.branch, "commit": night.commit, "nodes": nodes,
    }  # fmt: skip


def _metric_values(metric: Metric, night: Night) -> Mapping[str, object]:
    judged = metric.name in night.judged
    return {"value": metric.value, "judged": judged, "first": metric.first, "last": metric.last}


def _key(definition: MeasurementDefinition, values: Mapping[str, str], only: int | None = None) -> str:
    return definition.name + "".join(f",{name}={_tag(values[name])}" for name in definition.tag_names[:only])


def _tag(text: str) -> str:
    return tag_of(text).translate(_TAG_ESCAPES)


def _fields(definition: MeasurementDefinition, values: Mapping[str, object]) -> str:
    found = ((field.name, _written(field, values[field.name])) for field in definition.fields)
    return ",".join(f"{name}={text}" for name, text in found if text)


def _written(field: Field, value: object) -> str:
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
