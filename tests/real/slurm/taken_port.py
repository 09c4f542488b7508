"""Launchers whose first start of a run meets a port that is taken: this process itself listens there."""

from __future__ import annotations

import socket

from pytest_mlhpc.node.launch import find_launcher

HELD = []


def launch(run, nodes, environment):
    given = dict(environment)
    if not HELD:
        HELD.append(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        given["MASTER_PORT"] = str(HELD[0].getsockname()[1])
    name = run.parameters["launcher"]
    return find_launcher(name)(run, nodes, given)
