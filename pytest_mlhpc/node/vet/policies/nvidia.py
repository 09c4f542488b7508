"""PAYLOAD. Bounds for NVIDIA GPUs. Where a bound counts trouble, 1 says that there is some.

Sources by short name: NVML: API reference R590; Memory: "NVIDIA GPU Memory Error Management"; Retirement: "NVIDIA Dynamic
Page Retirement"; DCGM: its documentation 4.6; Health: "NVIDIA Health Validation" 2026; gcm: facebookresearch/gcm,
gcm/health_checks; gpud: leptonai/gpud; Azure: Azure/azurehpc-health-checks, azure_gpu_ecc.nhc; ours: this project's.
"""

from __future__ import annotations

from pytest_mlhpc.node.vet.policy import Bound

_INVENTORY = (
    Bound(
        "nvidia.driver",
        "The partition wants CUDA, and the driver or its library does not answer",
        "NVML: DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH: nothing can compute",
        fail=1,
    ),
    Bound(
        "nvidia.driver_unasked",
        "Accelerators on the PCI bus without a driver, where nobody has said what is wanted",
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
        "Share of a device's memory that nobody in sight holds",
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

BOUNDS = (*_INVENTORY, *_MODES, *_LINKS, *_MEMORY, *_USE, *_LOAD, *_DCGM)
