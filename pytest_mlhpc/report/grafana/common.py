"""What the dashboards share: conditions, names of series, variables. Pure."""

from __future__ import annotations

from typing import Any, Final

from pytest_mlhpc.influx.schema import RUN
from pytest_mlhpc.report.grafana.frame import variable
from pytest_mlhpc.report.grafana.query import Chosen, Conditions, OneOf

#: What is chosen of the variables that every dashboard has.
CHOSEN: Final[Conditions] = {"system": Chosen("system"), "purpose": Chosen("purpose")}
#: The same of first attempts: re-runs are asked for where something was odd, and would count twice.
FIRST: Final[Conditions] = {**CHOSEN, "attempt": OneOf(("0",))}
#: How series are called.
PARTITION: Final = "$tag_system:$tag_partition"


def common_variables() -> list[dict[str, Any]]:
    """Return the variables that every dashboard has."""
    return [
        variable("system", RUN, where={}),
        variable("purpose", RUN, where={"system": Chosen("system")}, chosen=("nightly",)),
    ]
