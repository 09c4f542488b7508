"""Bounds for accelerators: NVIDIA, AMD, Graphcore, Cerebras."""

from __future__ import annotations

from pytest_mlhpc.node.vet.policy import Bound

_DESCRIPTION = "the partition's description"
_VIOLATIONS = "AMD SMI documentation, conceptual/gpu-violations: more than 0 % of the time is a violation"
_PAGES = "Linux Documentation/gpu/amdgpu/ras.rst, gpu_vram_bad_pages interface"
_PCIE = "PCI Express base specification: lanes and rates are halves of what is next above"


_INVENTORY = (
    Bound(
        "nvidia.driver",
        "The partition wants CUDA, and the driver or its library does not answer",
        "NVML: DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH: nothing can compute",
        fail=1,
    ),
    Bound(
        "nvidia.driver_unasked",
        "Accelerators on the PCI bus without a driver, where no accelerator is described",
        "ours: a node that may be used without them",
        warn=1,
    ),
    Bound(
        "nvidia.devices_missing",
        "Devices that the partition has and NVML does not show",
        "gcm check-nvidia-smi gpu_num: CRITICAL",
        fail=1,
        unit="devices",
    ),
    Bound(
        "nvidia.lost",
        "A device that is lost, needs a reset, or has no power or interrupts",
        "NVML: GPU_IS_LOST, RESET_REQUIRED, INSUFFICIENT_POWER, IRQ_ISSUE",
        fail=1,
    ),
    Bound(
        "nvidia.model",
        "A device of another model than the partition's",
        "the partition's nodes.device_model",
        fail=1,
    ),
    Bound(
        "nvidia.mixed_models",
        "Further models beside the most frequent one, where none is asked for",
        "ours: figures of several models cannot be compared",
        warn=1,
        unit="models",
    ),
    Bound(
        "nvidia.uuid",
        "A device with the UUID of another one",
        "NVML, nvmlDeviceGetUUID: globally unique",
        fail=1,
    ),
    Bound(
        "nvidia.expected",
        "A property that is not as the partition's expect: says",
        "the partition's expect:",
        fail=1,
    ),
)

_MODES = (
    Bound(
        "nvidia.ecc_off",
        "ECC is off, and expect: does not say so: wrong bits are not seen",
        "Memory (R450): ECC is enabled by default; switching it off is not supported on A100",
        fail=1,
    ),
    Bound(
        "nvidia.mig",
        "A device is split by MIG, and neither expect: nor CUDA_VISIBLE_DEVICES says so",
        "NVIDIA MIG user guide: an instance has a share of the device, and no NVLink",
        fail=1,
    ),
    Bound(
        "nvidia.pending_mode",
        "ECC or MIG will be another after the next reset",
        "NVML, nvmlDeviceGetEccMode and nvmlDeviceGetMigMode: pending modes",
        warn=1,
    ),
    Bound(
        "nvidia.persistence",
        "Persistence mode is off: the driver starts anew with every process",
        "DCGM, dcgmi diag level 1, Persistence Mode: a warning about the configuration",
        warn=1,
    ),
)

_LINKS = (
    Bound(
        "nvidia.nvlinks_down",
        "NVLinks of a device that are down, from Ampere on",
        "Health, nvlink_active: CRITICAL when inactive_count > 0; nvlink_bandwidth_count_speed: all links are there",
        fail=1,
        unit="links",
    ),
    Bound(
        "nvidia.nvlinks_partly",
        "NVLinks of a V100 that are down while others are up",
        "ours: down by right where a job has part of a node",
        warn=1,
        unit="links",
    ),
    Bound(
        "nvidia.fabric",
        "A device that is not registered with the NVLink fabric: CUDA does not start",
        "NVML, nvmlGpuFabricInfo_t; NVIDIA/NVSentinel issue 883",
        fail=1,
    ),
)

_MEMORY = (
    Bound(
        "nvidia.recovery_action",
        "The driver's recovery action (field 230) is not None",
        "Memory, Error Recovery and Response Flags: all others end the use of the device",
        fail=1,
    ),
    Bound(
        "nvidia.remap_failure",
        "A row could not be remapped",
        "Memory, RMA Policy Thresholds for Row-Remapping",
        fail=1,
    ),
    Bound(
        "nvidia.remap_pending",
        "A row will be remapped at the next reset",
        "Memory, Error Recovery and Response Flags: new workloads can be launched (gcm: CRITICAL)",
        warn=1,
    ),
    Bound(
        "nvidia.uncorrectable",
        "Uncorrectable errors since the driver was loaded",
        "gcm check-nvidia-smi ecc_uncorrected_volatile_total: at most 0; Azure: SRAM alike",
        fail=1,
        unit="errors",
    ),
    Bound(
        "nvidia.sram_corrected",
        "Corrected errors in SRAM since the driver was loaded",
        "Azure: more than 10 000",
        warn=10_001,
        unit="errors",
    ),
    Bound(
        "nvidia.dram_corrected",
        "Corrected errors in DRAM since the driver was loaded",
        "Azure: more than 20 000 000 (gcm: 50 000 000)",
        warn=20_000_001,
        unit="errors",
    ),
    Bound(
        "nvidia.sram_threshold",
        "SRAM has had more uncorrectable errors than NVIDIA tolerates",
        "Memory, RMA Policy Thresholds for SRAM Failure Modes",
        fail=1,
    ),
    Bound(
        "nvidia.retired_pages",
        "Retired pages of memory (Volta and older)",
        "gcm check-nvidia-smi gpu_retired_pages: more than 10; boards are returned at 60 (hearsay; the table holds 64: Memory)",
        warn=11,
        fail=60,
        unit="pages",
    ),
    Bound(
        "nvidia.retired_pending",
        "A page is to be retired and still in use (Volta and older)",
        "Retirement: no new context until it is mapped out; gcm gpu_retired_pages: CRITICAL",
        fail=1,
    ),
)

_USE = (
    Bound(
        "nvidia.foreign_process",
        "Another user's processes on a device that is ours",
        "gcm check-nvidia-smi running_procs: CRITICAL",
        fail=1,
        unit="processes",
    ),
    Bound(
        "nvidia.own_process",
        "Processes of ours from before that still hold a device",
        "gcm check-nvidia-smi running_procs; ours: the user can end them, the node is fit",
        warn=1,
        unit="processes",
    ),
    Bound(
        "nvidia.memory_in_use",
        "Share of a device's memory that no visible process holds",
        "gcm check-nvidia-smi gpu_mem_usage; ours: as a share, as driver and our own context take some",
        warn=0.05,
        unit="of its memory",
    ),
)

_LOAD = (
    Bound(
        "nvidia.hw_slowdown",
        "Share of samples under load with slowdown by hardware, its heat, or the power brake",
        "gpud hw-slowdown: unhealthy from 6 events in 10 minutes, one a minute; DCGM: bit 0x8 also at changes of state",
        warn=0.3,
        fail=0.6,
        unit="of samples",
    ),
    Bound(
        "nvidia.sw_thermal",
        "Share of samples under load with slowdown by software because of heat",
        "NVML, SW thermal slowdown; ours: a fault only if also slow against peers",
        warn=0.3,
        unit="of samples",
    ),
    Bound(
        "nvidia.pcie_width",
        "PCIe lanes under load as a share of what device and board can do",
        "gcm check-pci; NVML, nvmlDeviceGetMaxPcieLinkWidth",
        fail=0.5,
        unit="of lanes",
        better="higher",
    ),
    Bound(
        "nvidia.pcie_generation",
        "PCIe generations under load below what device and board can do",
        "gcm check-pci; nvidia-smi manual: may be reduced while the GPU is not in use",
        fail=1,
        unit="generations",
    ),
)

_DCGM = (
    Bound(
        "nvidia.dcgm_failed",
        "Failed tests of dcgmi diag that speak of hardware or driver",
        "DCGM, Diagnostic Errors: severities isolate and reset",
        fail=1,
        unit="tests",
    ),
    Bound(
        "nvidia.dcgm_setting",
        "Failed tests of dcgmi diag that speak of settings or ask to watch",
        "DCGM, Diagnostic Errors: severities monitor, triage and config",
        warn=1,
        unit="tests",
    ),
    Bound(
        "nvidia.dcgm_no_proof",
        "Tests of dcgmi diag that passed without having run, or whose result cannot be read",
        "NVIDIA/DCGM issue 284: an allocation error is reported as a pass",
        warn=1,
        unit="tests",
    ),
)


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
    Bound(
        "cerebras.client",
        "failures of the appliance's client to get an answer",
        "Cerebras documentation, csctl",
        fail=1,
    ),
    Bound("graphcore.devices_missing", "IPUs fewer than described", "the partition's description", fail=1),
    Bound(
        "graphcore.error_state",
        "IPUs whose error state is not 'no errors'",
        "Graphcore command line tools, Device attributes: ipu error state",
        fail=1,
    ),
    *_INVENTORY,
    *_MODES,
    *_LINKS,
    *_MEMORY,
    *_USE,
    *_LOAD,
    *_DCGM,
)
