"""Statistics of figures that can be compared: peers, their middle and spread, and floors where there are too few peers."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from typing import (
    Dict,
    FrozenSet,
    Generic,
    Hashable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from pytest_mlhpc.node.vet.finding import Finding, NodeReport, Reading, Report, Severity
from pytest_mlhpc.node.vet.policy import Bound, Policy

#: A normal distribution's standard deviation is this many median absolute deviations.
MAD_TO_SIGMA = 1.4826

#: The same for its better half alone: the MAD of a half-normal distribution is 0.40 standard deviations.
HALF_MAD_TO_SIGMA = 2.5

Who = TypeVar("Who", bound=Hashable)


@dataclass(frozen=True)
class Peers(Generic[Who]):
    """``median`` and ``mad`` (1.4826 x MAD) of those who are not ``low``; all in the figures' unit. ``better`` as in readings."""

    median: float
    mad: float
    low: FrozenSet[Who]
    better: str = "higher"

    def share(self, value: float) -> float:
        """Return by which share of the median *value* is worse than it; negative if better. The median must not be 0."""
        return shortfall(value, self.median, self.better)


def shortfall(value: float, middle: float, better: str) -> float:
    """Return by which share of *middle*, not 0, *value* is worse; negative if better."""
    change = (value - middle) / abs(middle)
    return change if better == "lower" else -change


def mad(values: Sequence[float], middle: float) -> float:
    """Return 1.4826 x the median absolute deviation of *values*, at least one, from *middle*."""
    return MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def find_low(values: Mapping[Who, float], better: str, policy: Policy, check: str = "") -> FrozenSet[Who]:
    """Return who is far below the median of the better half: by ``peers.low_share`` and ``peers.low_mads`` of its spreads."""
    share = bound_of(policy, "peers.low_share", check).fail
    spreads = bound_of(policy, "peers.low_mads", check).fail
    if share is None or spreads is None:
        return frozenset()
    ranked = sorted(values.values(), reverse=better == "higher")
    half = ranked[: (len(ranked) + 1) // 2]
    middle = statistics.median(half)
    if not middle:
        return frozenset()
    spread = HALF_MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in half) / abs(middle)
    limit = max(share, spreads * spread)
    return frozenset(who for who, value in values.items() if shortfall(value, middle, better) > limit)


def find_peers(values: Mapping[Who, float], better: str, policy: Policy, check: str = "") -> Peers[Who]:
    """Return what *values*, at least one, are like without those that are low."""
    low = find_low(values, better, policy, check)
    kept = [value for who, value in values.items() if who not in low]
    middle = statistics.median(kept)
    return Peers(middle, mad(kept, middle), low, better)


def stage(peers: Peers[Who], value: float, policy: Policy, rule: str = "peers", check: str = "") -> Severity:
    """Return CRITICAL, WARNING or PASS: beyond which bound (:func:`limit_of`) *value* is."""
    worse = peers.share(value)
    for severity in (Severity.CRITICAL, Severity.WARNING):
        limit = limit_of(peers, policy, severity, rule, check)
        if limit is not None and worse > limit:
            return severity
    return Severity.PASS


def limit_of(
    peers: Peers[Who], policy: Policy, severity: Severity, rule: str = "peers", check: str = ""
) -> Optional[float]:
    """Return the bound of CRITICAL or WARNING as a share of the median; None: a site's policy has taken this stage out.

    It is the larger of ``<rule>.mads`` and ``<rule>.share``, but not more than ``<rule>.most`` where there is one.
    """
    mads, share = bound_of(policy, f"{rule}.mads", check), bound_of(policy, f"{rule}.share", check)
    most = policy.bounds.get(f"{rule}.most")
    critical = severity is Severity.CRITICAL
    factor, least = (mads.fail, share.fail) if critical else (mads.warn, share.warn)
    if factor is None or least is None:
        return None
    limit = max(factor * peers.mad / abs(peers.median), least)
    return limit if most is None or most.fail is None else min(limit, most.fail)


def bound_of(policy: Policy, key: str, check: str = "") -> Bound:
    """Return a bound of comparison: ``<key>.<check>`` where a check has its own, else ``<key>``."""
    return policy.bounds.get(f"{key}.{check}") or policy[key]


#: A device: host, and the device's name on it, empty for the node as a whole.
Place = Tuple[str, str]

_PREFIXES: Mapping[float, str] = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass
class FigureGroup:
    """Figures of one quantity on devices of one model: ``sample`` is any of them, ``rounds`` all, by round and place."""

    sample: Reading
    rounds: Dict[int, Dict[Place, float]] = field(default_factory=dict)
    seconds: Dict[Place, float] = field(default_factory=dict)

    def add(self, host: str, reading: Reading) -> None:
        """Take a reading in; of two for one device in one round, the later counts."""
        place = (host, reading.device)
        self.rounds.setdefault(reading.round, {})[place] = reading.value
        self.seconds[place] = self.seconds.get(place, 0.0) + reading.seconds

    @property
    def repeated(self) -> bool:
        """Whether any node has repeated it."""
        return any(number > 0 for number in self.rounds)

    def means(self) -> Dict[Place, float]:
        """Return each device's mean over the rounds that it took part in."""
        found: Dict[Place, List[float]] = {}
        for values in self.rounds.values():
            for place, value in values.items():
                found.setdefault(place, []).append(value)
        return {place: sum(values) / len(values) for place, values in found.items()}


def make_groups(report: Report) -> List[FigureGroup]:
    """Return all comparable figures in the order in which they are first met; those without model stand alone."""
    groups: Dict[Tuple[str, ...], FigureGroup] = {}
    for host, reading in _readings(report):
        if not is_figure(reading):
            continue
        alone = () if reading.model else (host, reading.device)
        key: Tuple[str, ...] = (reading.key, reading.model, reading.better, reading.unit, *alone)
        groups.setdefault(key, FigureGroup(reading)).add(host, reading)
    return list(groups.values())


def is_figure(reading: Reading) -> bool:
    """Return whether a reading's value can be compared at all: rates, times and counts are finite and not negative."""
    return math.isfinite(reading.value) and reading.value >= 0


def not_figures(report: Report) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for readings that are no figures."""
    for host, reading in _readings(report):
        if not is_figure(reading):
            where = f" of {reading.device}" if reading.device else ""
            reason = f"{reading.metric}{where} was measured as {reading.value}, which is no figure; vet again"
            yield host, blank(reading, Severity.UNKNOWN, reason, device=reading.device)


def absent_figures(report: Report, groups: List[FigureGroup]) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for nodes that say nothing of a quantity that others measured on the same model.

    A node that has hung is named for that alone; one whose check says itself that it could not tell, by that.
    """
    told = {node.host: _troubled_checks(node) for node in report.nodes}
    for group in groups:
        model, check = group.sample.model, group.sample.check
        if not model:
            continue
        places = {place for values in group.rounds.values() for place in values}
        everywhere = _on_each_device(report, model, places)
        for node in report.nodes:
            expected = node.models.get(model, 0)
            wanted = expected if everywhere else min(expected, 1)
            got = sum(place[0] == node.host for place in places)
            if got >= wanted or node.missing or check in told[node.host]:
                continue
            reason = (
                f"{group.sample.metric} was measured on {got} of {wanted} devices of model {model}; vet again"
            )
            yield node.host, blank(group.sample, Severity.UNKNOWN, reason)


def blank(reading: Reading, severity: Severity, reason: str, device: str = "") -> Finding:
    """Return a finding on a quantity, without a value."""
    return Finding(
        check=reading.check,
        severity=severity,
        reason=reason,
        device=device,
        rule="measured",
        metric=reading.metric,
        unit=reading.unit,
    )


def _readings(report: Report) -> Iterator[Tuple[str, Reading]]:
    for node in report.nodes:
        for outcome in node.outcomes:
            for reading in outcome.readings:
                yield node.host, reading


def _troubled_checks(node: NodeReport) -> FrozenSet[str]:
    findings = (finding for outcome in node.outcomes for finding in outcome.findings)
    return frozenset(
        finding.check for finding in findings if finding.severity in {Severity.CRITICAL, Severity.UNKNOWN}
    )


def _on_each_device(report: Report, model: str, places: Set[Place]) -> bool:
    """Return whether some node with several such devices measured all: else the check looks at one of them only."""
    several = [node for node in report.nodes if node.models.get(model, 0) > 1]
    return any(sum(place[0] == node.host for place in places) >= node.models[model] for node in several)


def spell(value: float, unit: str) -> str:
    """Return a figure for people: ``612.3 TFLOP/s``, ``0.41 s``, ``12 pages``."""
    if unit in {"FLOP/s", "B/s", "B", "Hz", "1/s"}:
        for factor, prefix in _PREFIXES.items():
            if value >= factor:
                return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


#: Quantities that have floors. ``all_reduce/N``: bus bandwidth over N devices of one
#: node. ``host_copy``: one direction. ``memory/device``: read and written together.
NAMES = (
    "gemm/fp64", "gemm/fp32", "gemm/fp16", "gemm/bf16", "gemm/fp8",
    "memory/device", "host_copy", "all_reduce/2", "all_reduce/4", "all_reduce/8",
    "storage/write", "storage/read", "storage/create", "storage/stat",
)  # fmt: skip

#: Share of a measured figure that healthy devices reach: C allows 10 % below its own, Z fails at 10 % below the best of E.
USUAL = 0.90

#: Matrix products of random numbers run up to 18 % slower than of easy ones (R, MI300X fp16: 639 random, 523
#: trigonometric). Where a source does not say what it multiplied, the figure is taken as of easy ones.
RANDOM = 0.82

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Floor:
    """What devices whose model matches ``model`` reach; ``fail`` and ``warn`` in ``unit``. ``confidence`` is high, medium or low."""

    name: str
    hardware: str
    model: str
    fail: float
    source: str
    confidence: str
    unit: str = "FLOP/s"
    warn: Optional[float] = None

    def matches(self, name: str, model: str) -> bool:
        """Return whether this is the floor of *name* for a device called *model* by its driver."""
        return self.name == name and re.search(self.model, model, re.IGNORECASE) is not None


# What drivers call the devices. Cards of the same name in other forms (PCIe, NVL) reach less and have no floor.
_V100 = ("V100 SXM2", r"\bV100-SXM2\b")
_A100_40 = ("A100 SXM 40 GB", r"\bA100-SXM4?-40GB\b")
_A100_80 = ("A100 SXM 80 GB", r"\bA100-SXM4?-80GB\b")
_A100 = ("A100 SXM", r"\bA100-SXM4?-(40|80)GB\b")
_H100 = ("H100 SXM", r"\bH100 80GB HBM3\b|\bH100[ -]SXM")
_H200 = ("H200 SXM", r"\bH200\b(?! NVL)")
_GH200 = ("GH200", r"\bGH200\b")
_MI210 = ("MI210", r"\bMI210\b")
_MI250X = ("MI250X, one GCD", r"\bMI250X\b")
_MI300X = ("MI300X", r"\bMI300X\b")

# File systems, as Linux names their kinds (checks/storage.py); nobody knows more of their hardware.
_FILES = (
    "a file system",
    r"^(unknown|ext[234]|xfs|btrfs|zfs|f2fs|overlay|tmpfs|ramfs|nfs4?|lustre|gpfs|beegfs|ceph|9p|fuse.*|\w+fs)$",
)


def _flops(name: str, device: Tuple[str, str], tera: float, source: str, confidence: str) -> Floor:
    return Floor(f"gemm/{name}", *device, fail=tera * _T, source=source, confidence=confidence)


def _bytes(name: str, device: Tuple[str, str], giga: float, source: str, confidence: str) -> Floor:
    return Floor(name, *device, fail=giga * _G, source=source, confidence=confidence, unit="B/s")


FLOORS: Tuple[Floor, ...] = (
    _flops("fp64", _V100, 5.25 * USUAL, "C: 5.25 TFLOP/s -10 %", "high"),
    _bytes("memory/device", _V100, 777 * USUAL, "C: 777 GB/s -10 % (D: at least 607)", "high"),
    _bytes("host_copy", _V100, 12.0 * USUAL, "C: 12.0 to 13.2 GB/s -10 %", "high"),
    _bytes("all_reduce/8", _V100, 110, "A: at least 110 GB/s", "medium"),
    _flops("bf16", _A100, 271 * USUAL * RANDOM, "E: 271 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _flops("fp64", _A100, 16.6 * USUAL, "C: 16.6 TFLOP/s -10 %", "high"),
    _bytes("memory/device", _A100_40, 1322 * USUAL, "C: 1322 GB/s -10 % (D: at least 1173)", "medium"),
    _bytes("memory/device", _A100_80, 1900 * USUAL, "C: 1900 GB/s -10 %", "medium"),
    _bytes("host_copy", _A100, 21, "A: fails below 21 GB/s (C: 25.5)", "high"),
    _bytes("all_reduce/8", _A100, 228, "A: at least 228 GB/s", "high"),
    Floor("gemm/bf16", *_H100, fail=715 * RANDOM * _T, warn=742 * RANDOM * _T, confidence="medium",
          source="Z: warns below 742, fails below 715 TFLOP/s; -18 % for random data"),
    _flops("fp8", _H100, 1403 * USUAL * RANDOM, "E: 1403 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _bytes("memory/device", _H100, 1905, "D: at least 1905 GB/s, loose (the data sheet says 3350)", "low"),
    _bytes("host_copy", _H100, 48, "A: fails below 48 GB/s of 52", "high"),
    Floor("all_reduce/8", *_H100, fail=300 * _G, warn=400 * _G, confidence="high", unit="B/s",
          source="Z: expects 450, warns below 400, fails below 300 GB/s"),
    Floor("gemm/bf16", *_H200, fail=715 * RANDOM * _T, warn=742 * RANDOM * _T, confidence="medium",
          source="E: computes as an H100; Z: fails below 715 TFLOP/s; -18 % for random data"),
    _flops("fp8", _H200, 1453 * USUAL * RANDOM, "E: 1453 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _bytes("memory/device", _H200, 2212, "D: at least 2212 GB/s, loose (the data sheet says 4800)", "low"),
    _bytes("host_copy", _H200, 55.1 * USUAL, "E: 55.4 and 55.1 GB/s, -10 %", "high"),
    _bytes("all_reduce/8", _H200, 366 * USUAL, "E: 366 GB/s without NVLS, -10 % (with it 473 to 482)", "medium"),
    _bytes("all_reduce/4", _H200, 363 * USUAL, "E: 363 GB/s, -10 %", "high"),
    _flops("bf16", _GH200, 829 * USUAL * RANDOM, "E: 829 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _flops("fp16", _GH200, 548 * USUAL, "C: 548 to 600 TFLOP/s, -10 %", "high"),
    _flops("fp32", _GH200, 48 * USUAL, "C: 48 to 52 TFLOP/s, -10 %", "high"),
    _flops("fp64", _GH200, 40 * USUAL, "C: 40 to 52 TFLOP/s, -10 %", "high"),
    _bytes("memory/device", _GH200, 3700 * USUAL, "C: 3700 GB/s -10 %", "high"),
    _bytes("host_copy", _GH200, 300, "guess: E has 359 and 377 GB/s on GB300, the data sheet 450", "low"),
    _bytes("all_reduce/4", _GH200, 250, "V: at least 250 GB/s", "medium"),
    _flops("fp16", _MI210, 150 * 0.93, "R: 150 TFLOP/s -7 %", "medium"),
    _flops("fp64", _MI210, 30 * 0.93, "R: 30 TFLOP/s -7 %", "medium"),
    _flops("bf16", _MI210, 41 * 0.93, "R: 41 TFLOP/s, a loose target, -7 %", "low"),
    _flops("fp16", _MI250X, 87 * USUAL, "C: 87 to 120 TFLOP/s, -10 %", "medium"),
    _flops("fp32", _MI250X, 29 * USUAL, "C: 29 to 33 TFLOP/s, -10 %", "medium"),
    _flops("fp64", _MI250X, 19 * USUAL, "C: 19 to 27 TFLOP/s, -10 %", "medium"),
    _bytes("host_copy", _MI250X, 12, "A: at least 12 GB/s", "medium"),
    _flops("bf16", _MI300X, 552 * 0.93, "R: 581 TFLOP/s random, 552 trigonometric, -7 %", "high"),
    _flops("fp16", _MI300X, 523 * 0.93, "R: 639 TFLOP/s random, 523 trigonometric, -7 %", "high"),
    _flops("fp8", _MI300X, 981 * 0.93, "R: 1215 TFLOP/s random, 981 trigonometric, -7 %", "high"),
    _flops("fp32", _MI300X, 100 * 0.93, "R: 100 TFLOP/s, -7 %", "high"),
    _bytes("host_copy", _MI300X, 48, "A: at least 48 GB/s", "high"),
    _bytes("all_reduce/8", _MI300X, 313, "A: at least 314 GB/s, elsewhere 313", "high"),
    _bytes("all_reduce/2", _MI300X, 47.7 * USUAL, "E: 47.7 GB/s, -10 %", "high"),
    _bytes("storage/write", _FILES, 0.005, "guess: a disk that many share, or that is failing", "low"),
    _bytes("storage/read", _FILES, 0.005, "guess: a disk that many share, or that is failing", "low"),
    Floor("storage/create", *_FILES, fail=5, confidence="low", unit="1/s", source="guess: 200 ms for a file"),
    Floor("storage/stat", *_FILES, fail=10, confidence="low", unit="1/s", source="guess: 100 ms for a file"),
)  # fmt: skip


def find(name: str, model: str) -> Optional[Floor]:
    """Return the floor of *name* for devices called *model*, or None where we know none."""
    if not name:
        return None
    return next((floor for floor in FLOORS if floor.matches(name, model)), None)
