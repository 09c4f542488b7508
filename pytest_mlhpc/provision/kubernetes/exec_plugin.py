"""Credentials from a program that a kubeconfig names (``exec``), with a time limit: client.authentication.k8s.io."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.errors import one_line
from pytest_mlhpc.results.foreign import read_json

#: Longest time that a plug-in may take, in seconds; some ask a server far away.
PLUGIN_LIMIT_S = 60.0
#: How long to wait for the ends of the pipes of a plug-in that was killed, in seconds.
DRAIN_S = 2.0


def credentials(
    config: Mapping[str, Any], cluster: Mapping[str, Any], directory: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run the plug-in and return the ``status`` that it prints: ``token``, or a client certificate and its key in PEM.

    Args:
        config: what stands under ``exec``.
        cluster: the cluster's entry, told to plug-ins that ask for it (``provideClusterInfo``).
        directory: of the kubeconfig; a relative command begins there.
        environ: of this process.

    Raises:
        UsageError: it cannot be started, fails, or prints something else. Nothing that it printed is quoted but its errors.
    """
    command, version = config.get("command"), config.get("apiVersion")
    if not (isinstance(command, str) and command and isinstance(version, str)):
        raise UsageError("`exec` of the kubeconfig has no `command` or no `apiVersion`")
    argv = [command, *map(str, config.get("args") or [])]
    if os.sep in command:
        argv[0] = str(Path(directory, command))
    spec: dict[str, Any] = {"interactive": False}
    if config.get("provideClusterInfo"):
        spec["cluster"] = dict(cluster)
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    env = {**environ, **_variables(config.get("env")), "KUBERNETES_EXEC_INFO": json.dumps(info)}
    out = _run(argv, env, directory or None, str(config.get("installHint") or ""))
    try:
        found = read_json(out)
        status = found["status"]
    except (ValueError, RecursionError, TypeError, KeyError):
        status = None
    if not isinstance(status, dict) or not (
        status.get("token") or (status.get("clientCertificateData") and status.get("clientKeyData"))
    ):
        raise UsageError(
            f"the credential plug-in {argv[0]} printed no credentials: run it by hand, or log in again"
        )
    return status


def _variables(listed: Any) -> dict[str, str]:
    entries = listed if isinstance(listed, list) else []
    return {
        str(one["name"]): str(one.get("value", ""))
        for one in entries
        if isinstance(one, dict) and "name" in one
    }


def _run(argv: list[str], env: Mapping[str, str], directory: str | None, hint: str) -> bytes:
    try:
        process = subprocess.Popen(
            argv, env=dict(env), cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # one group to kill; and no terminal to ask for a password
        )  # fmt: skip
    except OSError as error:
        more = f". {one_line(hint)}" if hint else ""
        raise UsageError(
            f"the credential plug-in {argv[0]} cannot be started: {error.strerror}{more}"
        ) from error
    try:
        out, err = process.communicate(timeout=PLUGIN_LIMIT_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise UsageError(
            f"the credential plug-in {argv[0]} did not end within {PLUGIN_LIMIT_S:g} s"
        ) from None
    except BaseException:  # Ctrl-C: nothing may be left running
        _kill(process)
        raise
    if process.returncode:
        words = one_line(err.decode(errors="replace")) or "it said nothing"
        raise UsageError(
            f"the credential plug-in {argv[0]} ended with exit code {process.returncode}: {words}"
        )
    return out


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole group and reap it; a child elsewhere that holds the pipes is not waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group's id is the process's: start_new_session
    try:
        process.communicate(timeout=DRAIN_S)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait(timeout=DRAIN_S)
