"""The bus: moves records between processes, on one SQLite file or on Kafka.

The names below are imported when they are first asked for: who needs only `tocsin.bus.port` imports
no SQLite.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tocsin.bus.embedded.bus import EmbeddedBus
    from tocsin.bus.embedded.location import Place, default_place, explicit_place
    from tocsin.bus.kafka.security import KafkaSecurity
    from tocsin.bus.port import (
        EARLIEST,
        LATEST,
        AssignmentListener,
        Bus,
        BusClosed,
        BusError,
        BusUnavailable,
        Consumer,
        FencedMember,
        From,
        Headers,
        Lease,
        MissingBus,
        Outgoing,
        Partition,
        Producer,
        Reader,
        Record,
        TopicState,
        UnknownTopic,
        UnusableBus,
    )
    from tocsin.bus.urls import DEFAULT_URL, open_bus

__all__ = [
    "DEFAULT_URL",
    "EARLIEST",
    "LATEST",
    "AssignmentListener",
    "Bus",
    "BusClosed",
    "BusError",
    "BusUnavailable",
    "Consumer",
    "EmbeddedBus",
    "FencedMember",
    "From",
    "Headers",
    "KafkaSecurity",
    "Lease",
    "MissingBus",
    "Outgoing",
    "Partition",
    "Place",
    "Producer",
    "Reader",
    "Record",
    "TopicState",
    "UnknownTopic",
    "UnusableBus",
    "default_place",
    "explicit_place",
    "open_bus",
]

_MODULES = ("port", "urls", "embedded.bus", "embedded.location", "kafka.security")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = vars(import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
