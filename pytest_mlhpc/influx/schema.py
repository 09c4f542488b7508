"""What lies in InfluxDB: two measurements with fixed tags and fields. docs/influxdb.md and the dashboards are made of this.

``mlhpc_run`` has one point for each record, ``mlhpc_metric`` one for each metric of a record that measured something; both
points of a record have the same time and the same ``id``. All that a :class:`~pytest_mlhpc.history.series.Night` says is in
``mlhpc_run``, so that the history can be read back without the store.

The rules, which hold for InfluxDB 1.8, 2.x and 3 Core alike:

* Every point has every tag of its measurement, as 3 Core takes no tag that its table did not have from the start. A text
  that is empty is the tag value ``-`` (see :mod:`.texts`). No tag has the name of a field.
* InfluxDB keeps one point for equal measurement, tags and time. The time is the record's second, and within it nanoseconds
  that its id determines (:func:`time_of`): two records never share a point, the same record sent twice is one point. The
  record's own time is the field ``created_ns``.
* Few tags: ids, commits, nodes and texts are fields. The number of series is that of benchmarks and metrics, times purposes
  and attempts, and does not grow with the nights; only another definition or device model adds some. A definition is a tag by
  its digest, its text a field.

A later version may add fields; it never adds a tag, changes a type, or gives a name another meaning.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

#: Version of what is defined here; field ``schema`` of ``mlhpc_run``. Readers take this one.
SCHEMA = 2

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Tag:
    """One tag: always a text, always there."""

    name: str
    text: str  #: what it says


@dataclass(frozen=True)
class Field:
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
    fields: tuple[Field, ...]

    def field(self, name: str) -> Field:
        """Return the field of that name.

        Raises:
            KeyError: there is none.
        """
        return {field.name: field for field in self.fields}[name]

    @property
    def tag_names(self) -> tuple[str, ...]:
        """Names of the tags."""
        return tuple(tag.name for tag in self.tags)


#: The series, as in results.record.SeriesKey without the metric.
SERIES_TAGS = (
    Tag("system", "system of systems.yaml"),
    Tag("partition", "its partition"),
    Tag("environment", "software environment of the partition"),
    Tag("fingerprint", "the machine itself, on `local` only; else `-`"),
    Tag("benchmark", "identity of the test: its `name=`, else its node id without the target"),
)
#: What must be equal, too, for figures to be comparable, as in results.record.Epoch.
EPOCH_TAGS = (
    Tag("definition", "digest of all that changes what is computed; `mlhpc_run` has the text"),
    Tag("device_model", "model of the accelerator or CPU; `-` where nothing was measured"),
)
_ORIGIN_TAGS = (
    Tag("purpose", "nightly, change or manual"),
    Tag("attempt", "0 for the first run, 1 and up for re-runs"),
)
_ID = Field("id", "text", "id of the record (UUIDv7)")
_BRANCH = Field("branch", "text", "git branch of the benchmarks")
_COMMIT = Field("commit", "text", "git commit of the benchmarks")

RUN = MeasurementDefinition(
    "mlhpc_run",
    "one attempt of one run, measured or failed",
    (
        *SERIES_TAGS,
        *EPOCH_TAGS,
        *_ORIGIN_TAGS,
        Tag("verdict", "verdict of the judge, or the name of the failure"),
    ),
    (
        Field("schema", "integer", "version of this schema"),
        _ID,
        Field("created_ns", "integer", "when the record was made, UTC", "ns"),
        Field("session", "text", "id of the session that made the record"),
        Field("node_id", "text", "the test, as pytest names it"),
        Field("definition_text", "text", "all that changes what is computed, as `k=v` text"),
        _BRANCH,
        _COMMIT,
        Field("preset", "text", "preset of model and input size"),
        Field("account", "text", "system and account that is charged"),
        Field("job_id", "text", "the scheduler's own id of the allocation"),
        Field("failure", "text", "what went wrong, in words; empty if nothing did"),
        Field("nodes", "json", "list of the nodes of the run"),
        Field("unfit", "json", "nodes that vetting left out: host to reason"),
        Field("judged", "json", "list of the metrics by which the test fails"),
        Field("changes", "json", "environment of the run (driver, kernel, image ...): name to value"),
        Field("node_hours", "float", "node-hours charged", "h"),
        Field("queue_s", "float", "time in the queue", "s"),
        Field("run_s", "float", "from the first process to the last", "s"),
        Field("node_count", "integer", "number of nodes"),
        Field("unfit_count", "integer", "number of nodes that vetting left out"),
        Field("energy_j", "float", "energy as the scheduler accounts it", "J", always=False),
        Field("calibration", "float", "rate of the calibration kernel around the run", "1/s", always=False),
    ),
)

METRIC = MeasurementDefinition(
    "mlhpc_metric",
    "one metric of one run",
    (
        *SERIES_TAGS,
        *EPOCH_TAGS,
        *_ORIGIN_TAGS,
        Tag("metric", "its name, without the unit"),
        Tag("unit", "its unit"),
        Tag("better", "higher, lower or none"),
    ),
    (
        Field("value", "float", "the figure, in the metric's unit"),
        Field("judged", "boolean", "whether the test fails by it"),
        _ID,
        Field("verdict", "text", "verdict of the run"),
        _BRANCH,
        _COMMIT,
        Field("nodes", "text", "nodes of the run, separated by commas; the first ones if there are many"),
        Field("first", "float", "first observation of the run (loss ...)", always=False),
        Field("last", "float", "last observation of the run", always=False),
    ),
)

MEASUREMENTS = (RUN, METRIC)


def time_of(record_id: str, created_ns: int) -> int:
    """Return the time of a record's points: its second, and nanoseconds within it that the id determines."""
    digest = hashlib.blake2b(record_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return created_ns // SECOND_NS * SECOND_NS + int.from_bytes(digest, "big") % SECOND_NS
