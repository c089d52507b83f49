"""Commands: who may run, and one run for each attempt.

A configuration file must not be enough to run programs, since more people may write one than may
log in where tocsin runs. So a program is named on the command line of tocsin, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.delivery.records import issue_of
from tocsin.actions.receivers.aws import event_text
from tocsin.actions.receivers.command.child import KEPT, end_group
from tocsin.actions.receivers.command.config import CommandReceiver
from tocsin.actions.receivers.kind import ReceiverContext, ReceiverKind
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.deliveries import DIGEST

AT_ONCE: Final = 4
_CONFIG: Final = 78
"""The exit status EX_CONFIG of sysexits: another attempt is pointless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTarget:
    """A program that may run. Its environment may hold secrets."""

    run: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    timeout_s: float
    folder: Path


class Command(ReceiverKind[CommandReceiver, CommandTarget]):
    """Runs a program for each issue."""

    config = CommandReceiver
    called = "a receiver of the type command"
    at_once = AT_ONCE

    def target(
        self, name: str, config: CommandReceiver, context: ReceiverContext
    ) -> CommandTarget | None:
        """The program; None without a secret of its environment."""
        program = config.run[0]
        if program not in context.commands:
            raise ConfigurationError(
                f"receiver {name!r}: {program} may not run here; "
                f"--allow-command {program} on tocsin's command line would allow it"
            )
        environment = {key: context.environ[key] for key in KEPT if key in context.environ}
        for key, given in config.environment.items():
            value = value_of(given, context.secrets)
            if value is None:
                return None
            if "\0" in value.get_secret_value():
                raise ConfigurationError(f"receiver {name!r}: {key} has a zero character")
            environment[key] = value.get_secret_value()
        return CommandTarget(
            run=config.run,
            environment=environment,
            timeout_s=config.timeout / timedelta(seconds=1),
            folder=context.folder,
        )

    def digests(self, config: CommandReceiver) -> bool:
        """Whether it takes notices with the occasion `digest`, whose event is a digest."""
        return True

    def sender(self, context: ReceiverContext) -> CommandSender:
        """One for all commands."""
        return CommandSender()


class CommandSender:
    """Runs programs. One per service."""

    async def send(self, target: CommandTarget, notice: Notice) -> Outcome:
        """One attempt: what the program prints is not read, so it can be logged nowhere.

        Raises:
            RecordError: the notice holds no issue.
        """
        about = {"TOCSIN_DELIVERY_ID": notice.delivery.delivery_id}
        if notice.delivery.occasion != DIGEST:
            issue = issue_of(notice.delivery)
            about |= {"TOCSIN_ISSUE_ID": issue.issue_id, "TOCSIN_ISSUE_STATE": issue.state}
        try:
            process = await asyncio.create_subprocess_exec(
                *target.run,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=target.folder,
                env={**target.environment, **about},
                # A group of its own, so that all that it has started can be ended with it.
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(later=f"the program cannot be started ({type(error).__name__})")
        try:
            async with asyncio.timeout(target.timeout_s):
                await process.communicate(event_text(notice).encode())
        except TimeoutError:
            return Outcome(later=f"the program was killed after {target.timeout_s:g} s")
        finally:
            # Shielded: a service that ends leaves no program behind.
            await asyncio.shield(end_group(process))
        return _outcome(process.returncode)

    async def close(self) -> None:
        """Nothing stays open."""


def _outcome(code: int | None) -> Outcome:
    if code == 0:
        return Outcome(done="the program exited with 0")
    if code is not None and code < 0:
        return Outcome(later=f"the program was ended by signal {-code}")
    text = f"the program exited with {code}"
    return Outcome(forbidden=text) if code == _CONFIG else Outcome(later=text)
