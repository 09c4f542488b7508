"""Bounds for the host (processors, memory, clock, PCI, storage, network ports) and for the set-up of a job."""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound

_PROMISED = "the partition's description in systems.yaml, or --expect"
_MCELOG = "mcelog.conf, section dimm"


_NVSENTINEL = "NVSentinel, NIC health monitor, link counters"


MIB = 1 << 20
GIB = 1 << 30

_CORES = (
    "sbatch(1) of Slurm 22.05 and newer: srun does not inherit --cpus-per-task; ml-engineering, "
    "orchestration/slurm/performance.md: each GPU needs a core for its process and more for loaders"
)
_DUPLICATE = "NCCL, src/init.cc: Duplicate GPU detected, ncclInvalidUsage"
_NCCL_ENV = "NCCL user guide, Environment Variables"
_INODES = "torch.distributed.checkpoint writes at least one file for each rank, each time"
_QUOTA = "lfs-quota(1), quota(1); write(2): EDQUOT"
_LEFT = "soperator, passive checks: busy devices and full disks are the user's to mend; proc(5)"
_NAMES = "torch.distributed: MASTER_ADDR is the address of rank 0's node; getaddrinfo(3)"


BOUNDS: Tuple[Bound, ...] = (
    Bound("inventory.cores", "processors fewer than described", _PROMISED, fail=1),
    Bound(
        "inventory.cores_smt",
        "cores fewer than described, where threads are more than described: either may be meant",
        _PROMISED,
        warn=1,
    ),
    Bound(
        "inventory.memory",
        "memory that Linux has, as share of what is described",
        "own: kernel and firmware keep 1 to 3 %; one module of 24 is 4 %",
        warn=0.97,
        fail=0.95,
        better="higher",
    ),
    Bound("inventory.expected", "properties that are not as described", _PROMISED, fail=1),
    Bound(
        "inventory.swap_used",
        "memory swapped out before the job, as share of all memory",
        "own: it comes back slowly, or someone else needs the memory",
        warn=0.1,
    ),
    Bound(
        "inventory.clock_error",
        "largest error of a disciplined clock",
        "own; adjtimex(2) maxerror. Logs of nodes that differ by more cannot be put in order",
        warn=1.0,
        unit="s",
    ),
    Bound("pci.missing", "accelerators that are not on the PCI bus", _PROMISED, fail=1),
    Bound(
        "pci.dead",
        "the device does not answer: 1",
        "PCI Express base specification 2.3.2: a read that fails returns all ones",
        fail=1,
    ),
    Bound(
        "edac.uncorrected",
        "uncorrected memory errors since the driver counts",
        f"{_MCELOG}: uc-error-threshold = 1 / 24h; LBNL NHC, check_hw_mcelog",
        fail=1,
    ),
    Bound(
        "edac.corrected",
        "corrected errors of one memory module in a day",
        f"{_MCELOG}: ce-error-threshold = 10 / 24h",
        warn=10,
        unit="1/d",
    ),
    Bound(
        "cpu_throttle.events",
        "times that a processor was throttled for heat during vetting",
        "Intel SDM volume 3B, 15.8: PROCHOT and thermal status; the kernel counts them",
        warn=1,
    ),
    Bound(
        "cpu_throttle.share",
        "share of the time of vetting that a processor was throttled for heat",
        "own: sustained, as for GPUs",
        fail=0.5,
    ),
    Bound(
        "cpu_throttle.clock",
        "clock of busy processors, median, as share of their base clock",
        "own: AVX-512 and AMX run little below base; a node held by PROCHOT or a power cap at a fifth to two fifths",
        warn=0.6,
        fail=0.4,
        better="higher",
    ),
    Bound(
        "cpu_throttle.cap",
        "highest clock that the operating system allows, as share of the base clock",
        "own: a limit that someone set and left (scaling_max_freq)",
        warn=0.99,
        better="higher",
    ),
    Bound(
        "storage.room",
        "bytes free where the node writes",
        "own: 256 MiB are written and read to measure, and less says little",
        warn=1 << 29,
        better="higher",
        unit="B",
    ),
    Bound(
        "storage.files",
        "files that may still be made where the node writes",
        "own: 100 are made to measure",
        warn=1000,
        better="higher",
    ),
    Bound(
        "storage.refused",
        "the folder for temporary files may not be written to: 1",
        "own: some programs need it",
        warn=1,
    ),
    Bound("storage.failed", "the named folder is refused, or reading and writing fails: 1", "own", fail=1),
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
    # -- binding
    Bound("job.cores_per_rank", "cores for each rank that drives a device", _CORES, 2, 1, "1", "higher"),
    Bound(
        "job.cores_per_cpu_rank",
        "cores for each rank of a CPU code",
        "srun(1), --overcommit",
        None,
        0.99,
        "1",
        "higher",
    ),
    Bound(
        "job.same_cores",
        "ranks on the same part of the node's cores as another",
        "srun(1), --cpu-bind",
        None,
        1,
    ),
    Bound(
        "job.device_far",
        "devices on another NUMA node than their rank's cores",
        "srun(1), --gpu-bind=closest; kernel, ABI sysfs-bus-pci, numa_node",
        1,
    ),
    Bound(
        "job.memory_far",
        "NUMA nodes whose cores a rank may use, but not their memory",
        "cpuset(7), Mems_allowed_list",
        1,
    ),
    Bound("job.same_device", "ranks that were given another rank's device", _DUPLICATE, None, 1),
    Bound(
        "job.devices_per_rank", "devices that ranks see, for each rank", _DUPLICATE, None, 0.99, "1", "higher"
    ),
    # -- limits
    Bound(
        "job.memlock",
        "memory that may be locked beside a fabric that registers memory",
        "NCCL user guide, Troubleshooting, InfiniBand: unlimited; nccl-tests issue 206: 8 MiB fails; 1 GiB is ours",
        float(1 << 62),
        GIB,
        "B",
        "higher",
    ),
    Bound(
        "job.nofile",
        "files that a process may have open",
        "PyTorch, torch.multiprocessing: file_descriptor holds one for each shared tensor; 1024 is the old default",
        1024,
        None,
        "1",
        "higher",
    ),
    Bound(
        "job.nofile_per_rank",
        "files that a process may have open, for each rank of the whole job",
        "torch.distributed.TCPStore: each rank keeps a connection to one process",
        None,
        1,
        "1",
        "higher",
    ),
    Bound(
        "job.tasks_per_rank",
        "processes and threads that may be had, for each rank",
        "getrlimit(2), RLIMIT_NPROC; cgroups(7), pids.max; the figures are ours: eight loaders of eight threads beside a thread for each of 64 cores",
        512,
        64,
        "1",
        "higher",
    ),
    Bound(
        "job.stack",
        "size of the stack",
        "getrlimit(2): 8 MiB is the system's own; NVIDIA, frameworks user guide: 64 MiB",
        8 * MIB - 1,
        None,
        "B",
        "higher",
    ),
    Bound(
        "job.core_dumps", "size of core dumps that each rank would write as files", "core(5)", GIB, None, "B"
    ),
    Bound(
        "job.shm",
        "free shared memory for each rank",
        "nccl issue 525: four GPUs fail with 64 MiB; NCCL user guide, Troubleshooting, Shared memory: 1 GiB for a node (of eight)",
        128 * MIB - 1,
        16 * MIB,
        "B",
        "higher",
    ),
    # -- space
    Bound(
        "job.checkpoint_path",
        "reasons why no checkpoint can be written",
        "open(2): ENOENT, ENOTDIR, EROFS, EACCES",
        None,
        1,
    ),
    Bound(
        "job.checkpoint_space",
        "checkpoints that there is room for",
        "open(2): ENOSPC; the new one is written before the old one goes",
        2,
        1,
        "1",
        "higher",
    ),
    Bound(
        "job.checkpoint_share",
        "free share of the checkpoints' file system, where their size is not known",
        "ours: beyond it shared file systems slow down, and single servers are full",
        0.05,
        0.01,
        "1",
        "higher",
    ),
    Bound(
        "job.checkpoint_inodes",
        "files that can be made, for each rank of the job",
        _INODES,
        20,
        2,
        "1",
        "higher",
    ),
    Bound(
        "job.quota_space",
        "checkpoints (of 1 GiB where their size is not known) that the quota has room for",
        _QUOTA,
        2,
        1,
        "1",
        "higher",
    ),
    Bound(
        "job.quota_inodes",
        "files that the quota allows, for each rank of the job",
        f"{_QUOTA}; {_INODES}",
        20,
        2,
        "1",
        "higher",
    ),
    Bound(
        "job.quota_grace",
        "soft limits that are passed, so that writing fails when their grace ends",
        _QUOTA,
        1,
    ),
    Bound(
        "job.tmp_space",
        "free space of temporary files",
        "ours: torch's and Triton's caches of compiled kernels are some hundred MiB",
        GIB,
        64 * MIB,
        "B",
        "higher",
    ),
    Bound("job.data_path", "reasons why the data cannot be read", "open(2): ENOENT, EACCES, ESTALE", None, 1),
    Bound(
        "job.wall_time",
        "time left, as a multiple of what the run needs",
        "squeue(1), %L; ours: starting and the last checkpoint take a tenth",
        1.1,
        1,
        "1",
        "higher",
    ),
    # -- transport
    Bound(
        "job.transport",
        "sockets although there is a fabric: 2 where it is one of its own, 1 where Ethernet could do RoCE",
        f"{_NCCL_ENV}; CSCS, communication/nccl: falling back to TCP is far slower",
        1,
        2,
    ),
    Bound(
        "job.interface_missing",
        "variables that name interfaces which are not there",
        "NCCL, src/bootstrap.cc: no socket interface found; torch.distributed, GLOO_SOCKET_IFNAME",
        None,
        1,
    ),
    Bound(
        "job.fabric_devices",
        "fabrics that /sys shows, but whose device files are missing",
        "kernel, infiniband/user_verbs: /dev/infiniband/uverbsN; fi_cxi(7): /dev/cxiN",
        None,
        1,
    ),
    Bound(
        "job.plugin_missing",
        "Slingshot without NCCL's plug-in for it",
        "CSCS, communication/nccl: aws-ofi-nccl",
        1,
    ),
    Bound(
        "job.debug_variables",
        "variables that are for debugging and slow down",
        f"{_NCCL_ENV}, Debugging: not in production",
        1,
    ),
    # -- names
    Bound("job.name_unresolved", "rendezvous names that this node does not know", _NAMES, None, 1),
    Bound("job.name_loopback", "rendezvous names that mean each node itself", _NAMES, None, 1),
    Bound("job.rendezvous", "rendezvous addresses that do not answer from this node", _NAMES, None, 1),
    Bound(
        "job.port_taken",
        "rendezvous ports on which another process listens",
        "bind(2): EADDRINUSE; torch.distributed.TCPStore",
        None,
        1,
    ),
    Bound(
        "job.own_name_loopback",
        "own names that are loopback addresses, to which gloo would bind",
        "PyTorch, ProcessGroupGloo: the address of the host's name; GLOO_SOCKET_IFNAME",
        1,
    ),
    # -- leftovers
    Bound("job.leftover_busy", "processes of others, or of earlier jobs, that compute", _LEFT, 1),
    Bound(
        "job.leftover_share", "share of the cores on which they do", f"{_LEFT}; a quarter is ours", None, 0.25
    ),
    Bound("job.leftover_device", "processes of this user's earlier jobs that hold a device", _LEFT, 1),
)
