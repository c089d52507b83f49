"""The bus: moves records between processes, on one SQLite file or on Kafka."""

from tocsin.bus.embedded import EmbeddedBus
from tocsin.bus.place import Place, default_place, explicit_place
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
    Outgoing,
    Partition,
    Producer,
    Reader,
    Record,
    TopicState,
    UnknownTopic,
    UnusableBus,
)
from tocsin.bus.security import KafkaSecurity
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
