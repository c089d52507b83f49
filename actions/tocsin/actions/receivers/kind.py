"""A kind of receiver: what may be configured of it, and how an issue is sent to it.

A kind is one package: its configuration, its `ReceiverKind` and its sender. `registry` names those
that tocsin has; an installed package offers one as an entry point of the group `tocsin.receivers`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import PER_RECEIVER, Notice
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.errors import require_extra

MakeReport = Callable[[str], Awaitable[bytes | None]]
"""Makes the HTML of a report from the id of a run; None if it cannot be made in time. It raises
nothing but CancelledError."""

ConfigT = TypeVar("ConfigT", bound=ReceiverConfig)
TargetT = TypeVar("TargetT")
TargetT_contra = TypeVar("TargetT_contra", contravariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverContext:
    """What a receiver may use of the process around it.

    Attributes:
        secrets: their values, for `tocsin.schemas.configuration.settings.value_of`.
        guard: which addresses may be connected to.
        folder: where relative paths of the configuration start.
        environ: the environment.
        software: what a receiver calls itself to others.
        commands: the programs that may be run, by their full paths.
        report: makes a report of a run; None where nobody can.
    """

    secrets: Mapping[str, SecretStr]
    guard: AddressGuard
    folder: Path
    environ: Mapping[str, str]
    software: str = "tocsin"
    commands: frozenset[str] = frozenset()
    report: MakeReport | None = None


class Sender(Protocol[TargetT_contra]):
    """Sends to all receivers of one kind. One per service, in its event loop."""

    async def send(self, target: TargetT_contra, notice: Notice) -> Outcome:
        """Make one attempt. The ledger retries, so this does not.

        Attempts at several receivers run at the same time. An outcome is recorded and logged, so it
        holds nothing that the peer wrote.

        Raises:
            RecordError: the notice can never be sent, as `message_for` says.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Called once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Address:
    """A receiver that `--notify` names.

    Attributes:
        name: what the ledger calls it; no name of a file has its colon.
        config: as if the file named it. May hold a token.
    """

    name: str
    config: ReceiverConfig = field(repr=False)

    @classmethod
    def from_text(cls, shown: str, text: str, config: ReceiverConfig) -> Address:
        """The same text has the same name in each process; of it, the name shows `shown`."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return cls(f"notify:{shown}-{digest}", config)


class ReceiverKind(Generic[ConfigT, TargetT]):
    """One kind of receiver.

    Attributes:
        config: the model of what may be configured; its `type` is the kind's name.
        libraries: modules of the extra `actions` that must be installed; `load` imports them.
        called: what the message calls such a receiver if one of them is missing.
        at_once: attempts at one receiver at a time.
        one_alert: whether an issue is one alert there, which each notification sets to the issue's
            state: one that still waits is then not sent after a later state.
        acknowledges: whether a sender can say that somebody takes care of an issue: it then gets
            notices with the occasion `acknowledged`, whose event is the person's answer.
    """

    config: type[ConfigT]
    libraries: Sequence[str] = ()
    called: str = ""
    at_once: int = PER_RECEIVER
    one_alert: bool = False
    acknowledges: bool = False

    def check(self, config: ConfigT, loc: Loc) -> Iterable[Problem]:
        """What is wrong with a receiver at `loc` beyond its shape. Pure."""
        return ()

    def address(self, text: str) -> Address | None:
        """The receiver that a text of `--notify` names; None if it is of another kind. Pure.

        Raises:
            ValueError: it is of this kind and cannot be used. The message shows no secret.
        """
        return None

    def target(self, name: str, config: ConfigT, context: ReceiverContext) -> TargetT | None:
        """What the sender needs to reach a receiver: its secrets are looked up here, once.

        None if it goes without an optional secret that it needs. May read files; connects to
        nobody.

        Raises:
            ConfigurationError: the receiver cannot be used. The message shows no secret.
        """
        raise NotImplementedError

    def groups(self, target: TargetT | None) -> bool:
        """Whether a sender puts several issues into one message there: `Notice.others`.

        `target` is None where it is not known.
        """
        return False

    def edits(self, target: TargetT | None) -> bool:
        """Whether a sender edits the message about an issue there, without notifying anybody.

        It then gets notices with the occasion `stopped`. `target` is None where it is not known.
        """
        return False

    def digests(self, config: ConfigT) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest. Pure."""
        return False

    def shows_question(self, config: ConfigT) -> bool:
        """Whether people see in its messages that a stop waits for their approval. Pure."""
        return False

    def sender(self, context: ReceiverContext) -> Sender[TargetT]:
        """The sender of a service."""
        raise NotImplementedError

    def check_installed(self) -> None:
        """Raises MissingExtra: one of the libraries is not installed."""
        require_extra("actions", self.called, *self.libraries)

    def load(self) -> None:
        """Import the libraries, for the sender; may take some tenths of a second.

        Called when the service starts: at the first delivery it would hold up a stop.
        """
        for library in self.libraries:
            importlib.import_module(library)


AnyKind = ReceiverKind[Any, Any]
