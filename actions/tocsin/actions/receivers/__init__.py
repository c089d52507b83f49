"""The receivers: each kind is a package, which sends what was found to one sort of address.

What a kind of your own needs is exported here; `docs/reference/receivers.md` shows one.
"""

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.kind import ReceiverContext, ReceiverKind, Sender
from tocsin.actions.receivers.message import Message, message_for
from tocsin.schemas.configuration.receivers import ReceiverConfig

__all__ = [
    "Message",
    "Notice",
    "Outcome",
    "ReceiverConfig",
    "ReceiverContext",
    "ReceiverKind",
    "Sender",
    "message_for",
]
