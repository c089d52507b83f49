"""Who needs which rights on a Kafka bus: the table of docs/how-to/secure-kafka.md as data. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tocsin.schemas.topics import Topics

Role = Literal["trainer", "rules", "actions", "archive", "reader", "stopper", "operator"]
Operation = Literal["Read", "Write", "Describe"]

ROLES: Final[Sequence[Role]] = get_args(Role)
"""`reader` is a person who looks; `stopper` one who also stops runs; `operator` one who also
answers issues, redrives dead letters and releases rules from quarantine."""


@dataclass(frozen=True, slots=True)
class Permission:
    """That a principal, such as `User:ana`, may do one thing with a topic or a group."""

    principal: str
    resource: Literal["topic", "group"]
    name: str
    operation: Operation

    def command(self, server: str) -> str:
        """The command of `kafka-acls.sh` that gives it."""
        return (
            f"kafka-acls.sh --bootstrap-server {server} --add --allow-principal "
            f"'{self.principal}' --operation {self.operation} --{self.resource} '{self.name}'"
        )


def permissions(topics: Topics, role: Role, principal: str) -> list[Permission]:
    """What a principal needs for a role; all else is to be denied."""
    writes, reads, groups = _needs(topics)[role]
    described = dict.fromkeys((*writes, *reads))
    return [
        *(Permission(principal, "topic", name, "Write") for name in writes),
        *(Permission(principal, "topic", name, "Read") for name in reads),
        *(Permission(principal, "topic", name, "Describe") for name in described),
        *(Permission(principal, "group", name, "Read") for name in groups),
    ]


def all_permissions(topics: Topics, principals: Mapping[Role, Iterable[str]]) -> list[Permission]:
    """What principals need for several roles, each right once."""
    found = [
        permission
        for role in ROLES
        for principal in principals.get(role, ())
        for permission in permissions(topics, role, principal)
    ]
    return list(dict.fromkeys(found))


def _needs(
    topics: Topics,
) -> Mapping[Role, tuple[Sequence[str], Sequence[str], Sequence[str]]]:
    """Topics to write, topics to read, groups."""
    t = topics
    looks = (t.telemetry, t.runs, t.issues, t.actions, t.control, t.dlq)
    return {
        "trainer": ((t.telemetry,), (t.control, t.runs, t.issues, t.actions), ()),
        "rules": (
            (t.issues, t.state, t.runs, t.control, t.dlq),
            (t.telemetry, t.state, t.runs),
            (f"{t.prefix}-rules",),
        ),
        "actions": (
            (t.actions, t.control, t.issues, t.dlq),
            # Telemetry: for reports that messages attach.
            (t.issues, t.runs, t.actions, t.control, t.telemetry),
            (f"{t.prefix}-actions",),
        ),
        # What it cannot read is the rules' to set aside.
        "archive": (
            (),
            (t.telemetry, t.runs, t.issues, t.actions, t.control),
            (f"{t.prefix}-archive", f"{t.prefix}-archive-issues"),
        ),
        "reader": ((), looks, ()),
        "stopper": ((t.control,), looks, ()),
        "operator": ((t.telemetry, t.issues, t.actions, t.control, t.dlq), looks, ()),
    }
