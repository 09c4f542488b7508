"""Kinds of workload, as data: where the pods' templates of a kind lie, how ranks are known, what its status says.

Each is a YAML file in this folder in the form of ``custom:`` (``schema.CustomKind``); a site's own has the same form.
"""

from pytest_mlhpc.provision.kubernetes.kinds.files import builtin_kinds, kind_of
from pytest_mlhpc.provision.kubernetes.kinds.model import (
    Kind,
    RankRule,
    StatusRule,
    TemplateRule,
    WorkloadStatus,
)

__all__ = ["Kind", "RankRule", "StatusRule", "TemplateRule", "WorkloadStatus", "builtin_kinds", "kind_of"]
