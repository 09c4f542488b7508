"""PAYLOAD. Bounds for network ports: what may happen to them while a node is vetted.

Counters count from the begin of vetting to its end; what stood there before is history that nobody can date.
"""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound

_NVSENTINEL = "NVSentinel, NIC health monitor, link counters"

BOUNDS: Tuple[Bound, ...] = (
    Bound("network.lost", "the port was up and went down or away: 1", "own: what is lost is lost", fail=1),
    Bound(
        "network.not_active",
        "the port has a link and is not active: 1",
        "IBTA volume 1, 14.2.5.6: a port that is not Active carries no data",
        warn=1,
    ),
    Bound(
        "network.narrow", "the port runs on one lane of four: 1", "IBTA volume 2: a link trains down", warn=1
    ),
    Bound("network.half_duplex", "the port runs at half duplex: 1", "IEEE 802.3: negotiation failed", warn=1),
    Bound("network.link_downed", "times that the link went down", f"{_NVSENTINEL}: any is fatal", fail=1),
    Bound(
        "network.lossless",
        "buffer overruns and local link errors",
        f"{_NVSENTINEL}: excessive_buffer_overrun_errors and local_link_integrity_errors, any is fatal",
        fail=1,
    ),
    Bound(
        "network.retries",
        "connections that ended as retries ran out",
        f"{_NVSENTINEL}: rnr_nak_retry_err, req_transport_retries_exceeded end one; here a warning, "
        "as the other side may be to blame",
        warn=1,
    ),
    Bound("network.symbol_errors", "symbol errors", f"{_NVSENTINEL}: 10 a second", warn=10, unit="1/s"),
    Bound("network.link_recovery", "link recoveries", f"{_NVSENTINEL}: 5 a minute", warn=5, unit="1/min"),
    Bound(
        "network.receive_errors", "broken packets", f"{_NVSENTINEL}: as symbol errors", warn=10, unit="1/s"
    ),
    Bound(
        "network.carrier_lost",
        "times that the carrier was lost",
        "ByteRobust: an alert of an adapter must repeat before a node goes",
        warn=1,
    ),
    Bound("network.ethernet_errors", "broken frames", "IEEE 802.3: a good link delivers none", warn=1),
    Bound(
        "network.cxi_uncorrected",
        "uncorrected codewords of a Slingshot port",
        "HPE Slingshot host software, CXI core error messages: a high rate is a sign of poor link quality; "
        "the rate is ours",
        warn=10,
        unit="1/s",
    ),
)
