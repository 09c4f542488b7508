"""The names of everything that can go wrong with a run, and what each means. Names never change, texts may."""

from __future__ import annotations

from dataclasses import dataclass

#: The run was broken or not what was asked: the test fails in its call phase.
FAILURES: dict[str, str] = {
    "metric_missing": "the run did not report a metric that it must report",
    "metric_invalid": "a metric is NaN, infinite, negative or zero where only a positive figure makes sense",
    "loss_nan": "the training loss became NaN or infinite",
    "no_baseline": "there is no baseline to compare with",
    "worker_exit": "a process ended with a non-zero exit code",
    "worker_killed": "a process was killed by a signal",
    "out_of_memory": "a process used more memory than it may",
    "too_few_ranks": "fewer ranks reported than were asked for",
    "too_few_devices": "fewer devices were used than were asked for",
    "too_few_steps": "fewer steps were measured than were asked for",
    "wrong_device": "the run used another type of device than was asked for",
    "foreign_result": "the result carries the id of another run",
    "truncated_result": "the result is incomplete or damaged",
    "duplicate_result": "the run reported two results",
    "no_result": "the run ended without reporting a result",
    "wrong_result": "what the run computed, sent or read back was checked and is wrong",
    "data_exhausted": "the data set ended before the steps that were asked for",
    "data_unusable": "the data set is missing, damaged or of another shape than the workload takes",
    "target_missed": "the training ended before the quality that was asked for was reached",
    "clock_backwards": "a clock went backwards during the run",
    "time_limit": "the run did not end within its time limit",
    "output_limit": "the program's output exceeded the limit within which metrics are searched",
    "command_not_found": "the program does not exist or cannot be executed",
    "regressed": "a judged metric is worse than its baseline and re-runs confirm it",
    "drifted": "the trailing median moved away from the baseline in git",
    "cannot_lower": "the compiler of the device cannot take this workload, so the test is skipped",
    "cancelled": "this session cancelled the run",
    "detached": "the run is still queued or running; a later session judges it",
}

#: Not the test's fault: a setup error, and mlhpc_infra_exit_code.
INFRASTRUCTURE: dict[str, str] = {
    "rejected": "the scheduler refused the allocation",
    "quota_exceeded": "a quota of the namespace or account has no room",
    "admission_denied": "an admission rule of the cluster refused the objects",
    "forbidden": "the user lacks a right that is needed",
    "unauthorized": "the credentials are not accepted (any more)",
    "never_scheduled": "the allocation did not start within its pending limit",
    "image_pull": "a container image could not be had",
    "container_config": "a container could not be made as it was described",
    "crash_loop": "a container ended and was started again, again and again",
    "launch_failed": "the launcher or the environment's interpreter could not be started",
    "import_failed": "the environment cannot import what the worker needs",
    "protocol_mismatch": "payload and controller are of different versions",
    "channel_broken": "the channel to the worker broke",
    "node_failure": "a node failed during the run",
    "cancelled_outside": "somebody else cancelled the allocation, or a run in it",
    "not_begun": "the allocation that it shared with others ended before it began",
    "evicted": "the node ran out of a resource and threw the pod out",
    "preempted": "the scheduler took the nodes away for another job",
    "unfit_nodes": "not enough nodes are fit",
    "disk_full": "there is no room for a file",
    "not_writable": "a file or folder may not be written, or cannot be where it should",
    "unsafe_directory": "another user could have changed a file that would be obeyed",
    "volume_unusable": "a volume to be measured is missing, read-only, not ours to write, or cannot do what was asked",
    "not_supported": "torch or a library of the environment cannot do what the run needs",
    "reruns_incomplete": "too few re-runs ended to judge",
}


@dataclass(frozen=True)
class Failure:
    """One thing that went wrong with one attempt: its name above, what was seen, and where to read on."""

    outcome: str
    text: str
    log: str = ""  #: path of the log that shows it
    nodes: tuple[str, ...] = ()  #: that failed
    where: str = ""  #: which nodes and job it happened on

    @property
    def infrastructure(self) -> bool:
        """Whether this is the machine's fault (setup error) rather than the run's."""
        return self.outcome in INFRASTRUCTURE

    def __str__(self) -> str:
        """Return ``outcome: text``, and where it happened and the log's path on lines of their own."""
        where = f"\n  ran on: {self.where}" if self.where else ""
        return f"{self.outcome}: {self.text}{where}" + (f"\n  log: {self.log}" if self.log else "")
