"""What all parts of tocsin agree on: records, topics, signatures and the config file.

The names below are imported when they are first asked for: to load them all takes 0.3 s, which
a process that needs `tocsin.schemas.errors` alone should not pay. The configuration has a module of
its own, `tocsin.schemas.config`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tocsin.schemas.control import (
        LookCloser,
        SignedDatagram,
        StopAcknowledged,
        StopEscalated,
        StopExited,
        StopExpired,
        StopLeft,
        StopRefused,
        StopRequested,
    )
    from tocsin.schemas.dead_letters import DeadLetter
    from tocsin.schemas.deliveries import Attempt, Delivery
    from tocsin.schemas.errors import (
        ConfigurationError,
        MalformedRecord,
        MissingExtra,
        RecordError,
        RecordTooLarge,
        SignatureError,
        TocsinError,
        UnavailableError,
        UnknownRecord,
    )
    from tocsin.schemas.events import EVENT_TYPES, Data, Event, EventTypes
    from tocsin.schemas.identity import check_run_id, delivery_id, incarnation_id, issue_id, new_id
    from tocsin.schemas.issues import (
        Evidence,
        Fact,
        Issue,
        IssueFiring,
        IssueOngoing,
        IssueResolved,
        Origin,
        Series,
        Subject,
    )
    from tocsin.schemas.observed import LayerInputsSeen, LossInputsSeen, ModeSeen, OptimizersSeen
    from tocsin.schemas.real import Real
    from tocsin.schemas.runs import (
        CaptureDegraded,
        CaptureFigures,
        Checkpoint,
        CheckpointWritten,
        DataLoaderSeen,
        Group,
        Heartbeat,
        PhaseMark,
        RankView,
        RunEnded,
        RunStarted,
        RunView,
        StopView,
    )
    from tocsin.schemas.signing import Signature, SigningKey, TrustedKeys, VerifyKey, own_key
    from tocsin.schemas.state import Snapshot
    from tocsin.schemas.telemetry import Speaker, StepFrame, SystemFrame, TensorFrame
    from tocsin.schemas.topics import Topics, TopicSpec, issue_partition, telemetry_partition
    from tocsin.schemas.wire import (
        Meta,
        decode,
        meta_of,
        read_meta,
        read_signature,
        signature_headers,
    )

__all__ = [
    "EVENT_TYPES",
    "Attempt",
    "CaptureDegraded",
    "CaptureFigures",
    "Checkpoint",
    "CheckpointWritten",
    "ConfigurationError",
    "Data",
    "DataLoaderSeen",
    "DeadLetter",
    "Delivery",
    "Event",
    "EventTypes",
    "Evidence",
    "Fact",
    "Group",
    "Heartbeat",
    "Issue",
    "IssueFiring",
    "IssueOngoing",
    "IssueResolved",
    "LayerInputsSeen",
    "LookCloser",
    "LossInputsSeen",
    "MalformedRecord",
    "Meta",
    "MissingExtra",
    "ModeSeen",
    "OptimizersSeen",
    "Origin",
    "PhaseMark",
    "RankView",
    "Real",
    "RecordError",
    "RecordTooLarge",
    "RunEnded",
    "RunStarted",
    "RunView",
    "Series",
    "Signature",
    "SignatureError",
    "SignedDatagram",
    "SigningKey",
    "Snapshot",
    "Speaker",
    "StepFrame",
    "StopAcknowledged",
    "StopEscalated",
    "StopExited",
    "StopExpired",
    "StopLeft",
    "StopRefused",
    "StopRequested",
    "StopView",
    "Subject",
    "SystemFrame",
    "TensorFrame",
    "TocsinError",
    "TopicSpec",
    "Topics",
    "TrustedKeys",
    "UnavailableError",
    "UnknownRecord",
    "VerifyKey",
    "check_run_id",
    "decode",
    "delivery_id",
    "incarnation_id",
    "issue_id",
    "issue_partition",
    "meta_of",
    "new_id",
    "own_key",
    "read_meta",
    "read_signature",
    "signature_headers",
    "telemetry_partition",
]

# `wire` first: it imports all records, without which EVENT_TYPES would not know them.
_MODULES = (
    "wire",
    "control",
    "dead_letters",
    "deliveries",
    "errors",
    "events",
    "identity",
    "issues",
    "observed",
    "real",
    "runs",
    "signing",
    "state",
    "telemetry",
    "topics",
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
