"""What all parts of tocsin agree on: records, topics, signatures and the config file.

The names below are imported when they are first asked for: to load them all takes 0.3 s, which
a process that needs `tocsin.schemas.errors` alone should not pay. The configuration has a module of
its own, `tocsin.schemas.configuration.file`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from tocsin.schemas.ids import check_run_id, delivery_id, incarnation_id, issue_id, new_id
    from tocsin.schemas.records.configurations import ConfigurationRefused
    from tocsin.schemas.records.dead_letters import DeadLetter
    from tocsin.schemas.records.deliveries import Attempt, Delivery
    from tocsin.schemas.records.events import EVENT_TYPES, Data, Event, EventTypes
    from tocsin.schemas.records.feedback import (
        FeedbackAcknowledged,
        FeedbackFalseAlarm,
        FeedbackResolved,
    )
    from tocsin.schemas.records.frames import Speaker, StepFrame, SystemFrame, TensorFrame
    from tocsin.schemas.records.issues import (
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
    from tocsin.schemas.records.program_facts import (
        LayerInputsSeen,
        LossInputsSeen,
        ModeSeen,
        OptimizersSeen,
    )
    from tocsin.schemas.records.real import Real
    from tocsin.schemas.records.runs import (
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
    from tocsin.schemas.records.silences import SilenceSet
    from tocsin.schemas.records.snapshots import Snapshot
    from tocsin.schemas.records.stops import (
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
    from tocsin.schemas.records.wire import (
        Meta,
        decode,
        meta_of,
        read_meta,
        read_signature,
        signature_headers,
    )
    from tocsin.schemas.signing import Signature, SigningKey, TrustedKeys, VerifyKey
    from tocsin.schemas.topics import Topics, TopicSpec, issue_partition, telemetry_partition

__all__ = [
    "EVENT_TYPES",
    "Attempt",
    "CaptureDegraded",
    "CaptureFigures",
    "Checkpoint",
    "CheckpointWritten",
    "ConfigurationError",
    "ConfigurationRefused",
    "Data",
    "DataLoaderSeen",
    "DeadLetter",
    "Delivery",
    "Event",
    "EventTypes",
    "Evidence",
    "Fact",
    "FeedbackAcknowledged",
    "FeedbackFalseAlarm",
    "FeedbackResolved",
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
    "SilenceSet",
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
    "read_meta",
    "read_signature",
    "signature_headers",
    "telemetry_partition",
]

# `records.wire` first: it imports all records, without which EVENT_TYPES would not know them.
_MODULES = (
    "records.wire",
    "errors",
    "ids",
    "signing",
    "topics",
    "records.configurations",
    "records.dead_letters",
    "records.deliveries",
    "records.events",
    "records.feedback",
    "records.frames",
    "records.issues",
    "records.program_facts",
    "records.real",
    "records.runs",
    "records.silences",
    "records.snapshots",
    "records.stops",
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
