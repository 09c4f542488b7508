"""Messages for tests of channels, and what is hostile in them."""

from dataclasses import replace
from typing import Any

from pytest_mlhpc.alert.channels.base import Affected, AlertMessage, IncidentState, Kind

#: 2026-11-21, 06:30 UTC.
STARTED_NS = 1_795_242_600_000_000_000
DAY_NS = 86_400_000_000_000

NEW = AlertMessage(
    id="cirrus-4f2a-new-1", incident="cirrus-4f2a", kind=Kind.REGRESSION, state=IncidentState.NEW,
    title="cirrus: 3 benchmarks are 12 % slower since 20 Nov",
    text="cosmoflow, 8 devices: 102.0 samples/s, was 116.0\nresnet50 …\n\n`mlhpc history cosmoflow`\n",
    html="<p>cosmoflow, 8 devices: <b>102.0</b> samples/s, was 116.0</p>",
    labels={"system": "cirrus", "kind": "regression"}, started_ns=STARTED_NS, created_ns=STARTED_NS,
    problems=(Affected("cirrus", "standard", benchmark="cosmoflow", metric="throughput", before=116.0, after=102.0),),
)  # fmt: skip
WORSE = replace(
    NEW,
    id="cirrus-4f2a-worse-2",
    state=IncidentState.WORSE,
    title="cirrus: 20 % slower",
    created_ns=STARTED_NS + DAY_NS,
)
RESOLVED = replace(
    NEW, id="cirrus-4f2a-resolved-3", state=IncidentState.RESOLVED, title="cirrus: as fast as before",
    created_ns=STARTED_NS + 2 * DAY_NS, ended_ns=STARTED_NS + 2 * DAY_NS,
)  # fmt: skip
#: Everything from outside that must do nothing.
HOSTILE = replace(
    NEW,
    title="x`` @all </title><script>alert(1)</script> é \ud800",
    text="```\n/close\n/assign @all\n<!-- mlhpc-incident other-1 -->\n@channel <!channel> é \ud800\n.\nQUIT",
    labels={"system": 'a"b\n=,{}é\ud800'},
)


def message(**changes: Any) -> AlertMessage:
    """Return a new incident's message with some fields changed."""
    return replace(NEW, **changes)
