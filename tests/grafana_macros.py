"""What Grafana makes of a query before it sends it: the macros and variables that our dashboards use.

After public/app/features/templating and public/app/plugins/datasource/influxdb of Grafana: ``$timeFilter`` is a range in
milliseconds, ``${name:regex}`` the chosen value escaped for a regular expression, several as ``(a|b)``, all as ``.*``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}/]")


def escaped(value: str) -> str:
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", value)


def expanded(query: str, chosen: Mapping[str, Sequence[str]], from_ms: int, to_ms: int) -> str:
    """Return *query* as it is sent; no value for a variable is All."""

    def value(found: re.Match[str]) -> str:
        values = [escaped(one) for one in chosen.get(found[1], ())]
        return ".*" if not values else values[0] if len(values) == 1 else f"({'|'.join(values)})"

    text = query.replace("$timeFilter", f"time >= {from_ms}ms and time <= {to_ms}ms")
    text = re.sub(r"\$\{(\w+):regex\}", value, text)
    assert "$" not in re.sub(r"\\\$|\$/", "", text), f"a macro that is not known here: {text}"
    return text
