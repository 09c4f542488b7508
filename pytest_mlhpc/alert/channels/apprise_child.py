"""The process in which apprise runs: one request as JSON on stdin, one answer as JSON on stdout.

Request: ``url``, ``title``, ``body``, ``type`` (info, success, warning or failure). Answer: ``known`` (whether apprise has a service
for the URL), ``delivered``, ``log`` (what apprise said beyond INFO; it may hold parts of the URL).
"""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any


def main() -> int:
    """Answer one request."""
    request = json.load(sys.stdin.buffer)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger("apprise").addHandler(handler)
    answer = _notify(request)
    json.dump({**answer, "log": log.getvalue()}, sys.stdout)
    return 0


def _notify(request: dict[str, Any]) -> dict[str, bool]:
    import apprise

    # In memory: what services want to remember between messages may hold secrets, and belongs to no account of ours.
    asset = apprise.AppriseAsset(
        app_id="pytest-mlhpc", app_desc="pytest-mlhpc", storage_mode=apprise.PersistentStoreMode.MEMORY
    )
    services = apprise.Apprise(asset=asset)
    if not services.add(request["url"]):
        return {"known": False, "delivered": False}
    delivered = services.notify(
        title=request["title"],
        body=request["body"],
        notify_type=apprise.NotifyType(request["type"]),
        body_format=apprise.NotifyFormat.TEXT,
    )
    return {"known": True, "delivered": bool(delivered)}


if __name__ == "__main__":
    sys.exit(main())
