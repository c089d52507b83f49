"""Objects of the API server, and what a run recorded of its own, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from pydantic import JsonValue

from tocsin.actions.targets.kubernetes.workloads import Resource, Workload

Object = Mapping[str, JsonValue]

_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_UID: Final = re.compile(r"[0-9a-f-]{1,64}")
_CHANCE: Final = re.compile(r"-[a-z0-9]{5}$")
"""What the API server appends to a name that it makes."""

_FINISHED: Final = ("Complete", "Completed", "Succeeded", "Failed")
_DONE: Final = ("Succeeded", "Failed")
"""Phases of a pod of which all containers have ended and none is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run recorded of itself when it started; None or 0 where its pod did not tell.

    Attributes:
        namespace: its namespace.
        pod: the name of its pod.
        host: the host name of its pod, where it does not know the name. It is the same in most,
            but in an indexed Job it lacks the random end.
        pod_uid: the pod.
        container: the name of its container.
        noted_ms: when this was recorded, by the clock of its node. Unix milliseconds.
        job: the name of its job.
        job_uid: the job.
    """

    namespace: str
    pod: str | None = None
    host: str | None = None
    pod_uid: str | None = None
    container: str | None = None
    noted_ms: int = 0
    job: str | None = None
    job_uid: str | None = None

    @classmethod
    def read(cls, names: Mapping[str, str]) -> Self | None:
        """None without a namespace. What cannot be a name in Kubernetes counts as missing: it
        would become part of a path."""
        namespace = _matching(_NAME, names.get("namespace"))
        if namespace is None:
            return None
        noted = names.get("noted_ms", "")
        return cls(
            namespace=namespace,
            pod=_matching(_NAME, names.get("pod")),
            host=_matching(_NAME, names.get("host")),
            pod_uid=_matching(_UID, names.get("pod_uid")),
            container=_matching(_NAME, names.get("container")),
            noted_ms=int(noted) if re.fullmatch(r"[0-9]{1,15}", noted) else 0,
            job=_matching(_NAME, names.get("job")),
            job_uid=_matching(_UID, names.get("job_uid")),
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that controls another."""

    group: str
    kind: str
    name: str
    uid: str

    def is_a(self, resource: Resource) -> bool:
        """Whether it is of that kind, in whichever version."""
        return (self.group, self.kind) == (resource.group, resource.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod."""

    name: str
    uid: str
    created: datetime
    phase: str
    leaving: bool
    slot: str
    """Its name without what chance appended: equal for a pod and the one that replaces it."""
    owner: Owner | None
    started: Mapping[str, datetime]
    """When each running container was started; one that was started again counts from then."""

    @classmethod
    def read(cls, raw: Object) -> Self | None:
        """None: what was answered is no pod."""
        meta, status = _part(raw, "metadata"), _part(raw, "status")
        name, uid = _text(meta, "name"), _text(meta, "uid")
        created = _moment(meta.get("creationTimestamp"))
        if not name or not uid or created is None:
            return None
        named = _CHANCE.sub("", name) if meta.get("generateName") else name
        return cls(
            name=name,
            uid=uid,
            created=created,
            phase=_text(status, "phase") or "Unknown",
            leaving="deletionTimestamp" in meta,
            slot=named,
            owner=controller_of(raw),
            started=dict(_running(status)),
        )

    @property
    def done(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.phase in _DONE

    def is_slot_of(self, recorded: str) -> bool:
        """Whether it is the pod of that name or host name, or one that replaces it."""
        return self.slot in (recorded, _CHANCE.sub("", recorded))

    def restarted_since(self, recorded: Recorded) -> bool:
        """Whether the container of the run was started again within the pod.

        Not known, thus False, of a pod with several containers if the run did not record its own.
        """
        name = recorded.container
        if name is None and len(self.started) == 1:
            [name] = self.started
        started = self.started.get(name or "")
        # Both are times of the node. The API server cuts off fractions of seconds.
        return (
            recorded.noted_ms > 0
            and started is not None
            and started.timestamp() * 1000 > recorded.noted_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of one of the kinds, as `Workload` reads it.

    Attributes:
        version: changes with each change of the object.
        asked: whether its specification asks for it to be suspended.
        suspended: whether its controller has confirmed that.
        finished: the condition with which it ended; None if it has not.
        leaving: whether it is being deleted.
        queue: the queue of Kueue that starts it; None without.
    """

    name: str
    uid: str
    version: str
    created: datetime
    asked: bool
    suspended: bool
    finished: str | None
    leaving: bool
    owner: Owner | None
    queue: str | None

    @classmethod
    def read(cls, raw: Object, workload: Workload) -> Self | None:
        """None: what was answered is no job."""
        meta = _part(raw, "metadata")
        name, uid, version = (_text(meta, key) for key in ("name", "uid", "resourceVersion"))
        created = _moment(meta.get("creationTimestamp"))
        if not name or not uid or not version or created is None:
            return None
        conditions = _conditions(raw)
        return cls(
            name=name,
            uid=uid,
            version=version,
            created=created,
            asked=workload.asks_to_suspend(raw),
            suspended="Suspended" in conditions,
            finished=next((one for one in _FINISHED if one in conditions), None),
            leaving="deletionTimestamp" in meta,
            owner=controller_of(raw),
            queue=_text(_part(meta, "labels"), "kueue.x-k8s.io/queue-name") or None,
        )


def controller_of(raw: Object) -> Owner | None:
    """The owner that manages an object; None if nothing does."""
    references = _part(raw, "metadata").get("ownerReferences")
    for each in references if isinstance(references, list) else ():
        if not isinstance(each, dict) or each.get("controller") is not True:
            continue
        group, _, version = _text(each, "apiVersion").rpartition("/")
        owner = Owner(
            group if version else "", _text(each, "kind"), _text(each, "name"), _text(each, "uid")
        )
        if _NAME.fullmatch(owner.name) and _UID.fullmatch(owner.uid):
            return owner
    return None


def uid_of(raw: Object) -> str:
    """The uid of an object, or ""."""
    return _text(_part(raw, "metadata"), "uid")


def _conditions(raw: Object) -> set[str]:
    """The conditions that hold. One that no longer does stays in the list, with another status."""
    listed = _part(raw, "status").get("conditions")
    return {
        _text(each, "type")
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict) and each.get("status") == "True"
    }


def _running(status: Object) -> list[tuple[str, datetime]]:
    listed = status.get("containerStatuses")
    found = []
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            started = _moment(_part(_part(each, "state"), "running").get("startedAt"))
            if started is not None:
                found.append((_text(each, "name"), started))
    return found


def _part(raw: Object, key: str) -> Object:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _text(raw: Object, key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _moment(value: JsonValue) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


def _matching(pattern: re.Pattern[str], text: str | None) -> str | None:
    return text if text is not None and pattern.fullmatch(text) else None
