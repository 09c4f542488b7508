"""Figures as OpenMetrics text (https://prometheus.io/docs/specs/om/open_metrics_spec/): GitLab's metrics reports, Prometheus.

Labels hold what makes figures comparable and nothing that differs from run to run, as GitLab finds the earlier figure by
them. Samples have no timestamps: GitLab takes none, and the file says what is so now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_mlhpc.store.record import Record

#: Base units of node/protocol/schema.py as suffixes of names. A unit without a word of its own has none.
_UNITS: Mapping[str, str] = {
    "1": "", "s": "seconds", "B": "bytes", "B/s": "bytes_per_second", "FLOP": "flop", "FLOP/s": "flop_per_second",
    "J": "joules", "W": "watts", "Hz": "hertz", "K": "kelvins", "samples": "samples",
    "samples/s": "samples_per_second", "samples/J": "samples_per_joule", "items": "items",
    "items/s": "items_per_second", "tokens": "tokens", "tokens/s": "tokens_per_second",
}  # fmt: skip
_VERDICTS_HELP = "1 for the verdict of the newest run, by label"


def openmetrics(records: Iterable[Record]) -> str:
    """Return one gauge for each metric, and ``mlhpc_verdict``; of one series measured twice the last counts."""
    families: dict[str, tuple[str, str, dict[str, str]]] = {}
    for record in records:
        labels = {
            "system": record.system,
            "partition": record.partition,
            "environment": record.environment,
            "test": record.node_id,
            "benchmark": record.benchmark,
        }
        verdicts = families.setdefault("mlhpc_verdict", ("", _VERDICTS_HELP, {}))[2]
        verdicts[_labels(labels)] = _labels({**labels, "verdict": record.verdict}) + " 1"
        for metric in record.measurement.metrics if record.measurement else ():
            unit = _UNITS.get(metric.unit, "")
            name = "_".join(word for word in ("mlhpc", metric.name, unit) if word)
            told = f"better: {metric.better}" + ("; judged" if metric.name in record.judged else "")
            samples = families.setdefault(name, (unit, told, {}))[2]
            samples[_labels(labels)] = f"{_labels(labels)} {metric.value!r}"
    lines = []
    for name, (unit, told, samples) in sorted(families.items()):
        lines.append(f"# TYPE {name} gauge")
        if unit:
            lines.append(f"# UNIT {name} {unit}")
        lines.append(f"# HELP {name} {_escaped(told)}")
        lines.extend(f"{name}{sample}" for sample in samples.values())
    return "".join(f"{line}\n" for line in [*lines, "# EOF"])


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    # Half of a character cannot be written at all; a carriage return would end a line for some readers.
    clean = text.encode("utf-8", "replace").decode().replace("\r", "\n")
    return clean.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
