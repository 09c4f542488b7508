"""The form in which a kind of workload is described: ``custom:`` of a partition, and the files of this folder."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pytest_mlhpc.system.schema import Count
from pytest_mlhpc.system.texts import Text

_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\Z")


def _path(value: str) -> str:
    if value and not _PATH.match(value):
        raise ValueError(f"{value!r:.80} is not a path such as spec.template, or spec.groups.0.template")
    return value


FieldPath = Annotated[str, AfterValidator(_path), Field(max_length=500)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ResourceModel(_Closed):
    """`resource:` how the API server names the kind."""

    group: str = ""
    version: Text
    kind: Text
    plural: Text


class TemplateModel(_Closed):
    """One entry of `templates:`."""

    path: FieldPath = Field("", description="of the pod template; empty: the object itself is the pod")
    pods: Count | None = Field(None, description="how many pods it makes; all that no other template does")
    count: list[FieldPath] = Field([], description="where that number is written")
    remove: FieldPath | None = Field(None, description="what to take out where it makes no pods")


class RankModel(_Closed):
    """`rank:` what holds the number of a pod, counted from 0 over all pods."""

    annotation: Text | None = None
    label: Text | None = None
    variable: Text | None = Field(None, description="of the environment, set by the kind's operator")

    def model_post_init(self, context: Any, /) -> None:
        """Require one."""
        del context
        if sum(value is not None for value in (self.annotation, self.label, self.variable)) != 1:
            raise ValueError("give one of annotation, label, variable")


class StatusModel(_Closed):
    """`status:` where it lies and which words mean what."""

    conditions: FieldPath = "status.conditions"
    phase: FieldPath | None = Field(None, description="a single word instead of, or besides, conditions")
    succeeded: list[Text] = []
    failed: list[Text] = []
    suspended: list[Text] = []
    running: list[Text] = []

    def model_post_init(self, context: Any, /) -> None:
        """Require both ends."""
        del context
        if not self.succeeded or not self.failed:
            raise ValueError("say which conditions (or phases) mean succeeded, and which failed")


class QueueModel(_Closed):
    """`queue:` the object of a queueing system that stands for the workload."""

    resource: ResourceModel
    label: Text = Field(description="that holds the workload's uid")
    admitted: list[Text] = Field(min_length=1, description="conditions that have to become true")
    evicted: list[Text] = Field([], description="conditions that are true once it has taken the nodes back")


class CustomKind(_Closed):
    """A kind of workload."""

    resource: ResourceModel
    templates: list[TemplateModel] = Field(min_length=1)
    status: StatusModel
    rank: RankModel | None = None
    each_pod: bool = Field(False, description="an object for each pod")
    most: Count | None = Field(None, description="the most pods that it can have")
    container: Text | None = Field(None, description="name of the container that runs the agent; worker")
    manifest: dict[str, Any] = Field(
        {}, description="fields of the kind's own, which another manifest may change"
    )
    must: dict[str, Any] = Field({}, description="the same, which it may not")
    several: dict[str, Any] = Field({}, description="more of these, with several pods")
    deadline: FieldPath | None = Field(None, description="where activeDeadlineSeconds is written")
    ttl: FieldPath | None = Field(None, description="where ttlSecondsAfterFinished is written")
    suspend: FieldPath | None = None
    devices: FieldPath | None = Field(None, description="where the number of devices is written, as text")
    leader: Text | None = Field(None, description="host name of rank 0, with {name} for the object's")
    own_service: bool = Field(False, description="its operator makes that name known")
    queue_label: Text | None = None
    queue: QueueModel | None = Field(None, description="the object that says why it waits")
    limit_label: Text | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Require a way to tell pods apart, and templates for all of them."""
        del context
        if self.rank is None and not self.each_pod and self.most != 1:
            raise ValueError(
                "`rank` is missing: what holds the number of a pod? With `most: 1` there is but one"
            )
        if self.each_pod and len(self.templates) > 1:
            raise ValueError("with each_pod there is one template")
        if sum(template.pods is None for template in self.templates) > 1:
            raise ValueError("several templates make all other pods; give `pods` to all but one")
        if self.rank is not None and self.rank.variable is None and len(self.templates) > 1:
            raise ValueError("with several templates, a rank is told by a variable")
