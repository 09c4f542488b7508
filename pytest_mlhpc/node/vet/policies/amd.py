"""PAYLOAD. Bounds for AMD devices."""

from __future__ import annotations

from pytest_mlhpc.node.vet.policy import Bound

_DESCRIPTION = "the partition's description"
_VIOLATIONS = "AMD SMI documentation, conceptual/gpu-violations: more than 0 % of the time is a violation"
_PAGES = "Linux Documentation/gpu/amdgpu/ras.rst, gpu_vram_bad_pages interface"
_PCIE = "PCI Express base specification: lanes and rates are halves of what is next above"

BOUNDS = (
    Bound("amd.devices_missing", "devices fewer than described", _DESCRIPTION, fail=1),
    Bound("amd.devices_extra", "devices more than described", _DESCRIPTION, warn=1),
    Bound(
        "amd.not_initialised",
        "devices on the PCI bus that no driver has taken",
        "Linux commit 68daadf3d673: amdgpu does not initialise a device with too many bad pages",
        fail=1,
    ),
    Bound("amd.model", "devices of another model than described", _DESCRIPTION, fail=1),
    Bound(
        "amd.expectation",
        "driver, firmware or partition modes that are not those expected",
        _DESCRIPTION,
        fail=1,
    ),
    Bound(
        "amd.busy",
        "how much a device computes before we ask it to",
        "ours: an idle device shows a few per cent at most",
        warn=50,
        unit="%",
    ),
    Bound(
        "amd.ecc_uncorrectable",
        "uncorrectable memory errors since the driver was loaded",
        "AMD GPU Operator documentation, metrics/ecc-error-injection: the threshold is 0",
        fail=1,
    ),
    Bound(
        "amd.ecc_deferred",
        "uncorrectable memory errors that no program has met yet",
        "AMD SMI, amdsmi_error_count_t.deferred_count",
        warn=1,
    ),
    Bound(
        "amd.ecc_corrected",
        "corrected memory errors since the driver was loaded",
        "Azure/azurehpc-health-checks: corrected SRAM errors of NVIDIA devices; AMD publishes no figure",
        warn=10_000,
    ),
    Bound(
        "amd.ras_disabled",
        "memory controllers whose error detection is off, so that errors are not counted",
        "Linux drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c",
        warn=1,
    ),
    Bound(
        "amd.bad_pages_unreservable",
        "bad pages that cannot be taken out of use",
        _PAGES,
        fail=1,
    ),
    Bound("amd.bad_pages_pending", "bad pages that are still in use", _PAGES, warn=1),
    Bound(
        "amd.bad_pages_share",
        "bad pages, as a share of those after which the driver asks for a replacement",
        "Linux commits 8483fdfea778 (warns at 90 %) and e0d11bdb294c (asks at 100 %)",
        warn=0.9,
        fail=1.0,
    ),
    Bound(
        "amd.throttle_thermal",
        "share of the load's time in which heat slowed the device down",
        f"{_VIOLATIONS}; that half of the time is too much is ours",
        warn=0.01,
        fail=0.5,
    ),
    Bound(
        "amd.throttle_prochot",
        "share of the load's time in which PROCHOT or VRHOT, signals from outside, slowed the device down",
        f"{_VIOLATIONS}; that a tenth of the time is too much is ours",
        warn=0.01,
        fail=0.1,
    ),
    Bound(
        "amd.xgmi_down",
        "links to other devices that are down",
        "AMD SMI, amdsmi_get_gpu_xgmi_link_status",
        fail=1,
    ),
    Bound(
        "amd.pcie_width",
        "PCIe lanes, as a share of those that there could be",
        f"{_PCIE}; Azure/azurehpc-health-checks conf/nd96isr_mi300x_v5.conf: 48 GB/s, more than half",
        fail=0.5,
        better="higher",
    ),
    Bound(
        "amd.pcie_speed",
        "the highest PCIe rate under load, as a share of what could be",
        f"{_PCIE}; Azure/azurehpc-health-checks conf/nd96isr_mi300x_v5.conf: 48 GB/s, which PCIe 4 cannot reach",
        fail=0.5,
        better="higher",
    ),
    Bound(
        "amd.rvs",
        "tests of the ROCm Validation Suite that failed",
        "ROCm Validation Suite, user guide",
        fail=1,
    ),
)
