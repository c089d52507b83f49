"""Mail: one attempt hands one mail to an SMTP server, and returns what the server made of it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tocsin.actions.decision.retry import Failure, Outcome
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.email.body import ID_DOMAIN, Envelope, mail_of
from tocsin.actions.receivers.email.smtp_server import EmailTarget, SmtpServer
from tocsin.actions.receivers.kind import MakeReport
from tocsin.actions.receivers.message import Message, message_for
from tocsin.actions.receivers.picture import Plotter, drawing_of
from tocsin.actions.receivers.recipients import PartialRecipients
from tocsin.schemas.ids import delivery_id
from tocsin.schemas.records.deliveries import DIGEST

if TYPE_CHECKING:
    import aiosmtplib

TIMEOUT_S: Final = 30.0
"""For one attempt as a whole, the picture not counted."""

_FAREWELL_S: Final = 1.0

_HOST: Final = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")

_REPLIES: Final = {
    421: "service not available",
    450: "mailbox not available for now",
    451: "error in processing",
    452: "not enough storage",
    454: "temporary failure of the log-in",
    530: "log-in or encryption required",
    534: "log-in method refused",
    535: "log-in refused",
    550: "mailbox not available",
    551: "user not local",
    552: "too big, or mailbox full",
    553: "address not allowed",
    554: "refused",
}
"""What the codes mean, in our words: a server's own may quote addresses and passwords."""


class EmailSender:
    """Sends mail. One per service."""

    def __init__(
        self,
        *,
        plotter: Plotter | None = None,
        timeout_s: float = TIMEOUT_S,
        report: MakeReport | None = None,
    ) -> None:
        self._plotter = plotter or Plotter()
        self._report = report
        self._timeout_s = timeout_s
        self._reached = PartialRecipients()
        name = socket.gethostname()
        self._host = name if _HOST.fullmatch(name) else "localhost"

    async def send(self, target: EmailTarget, notice: Notice) -> Outcome:
        """One attempt. The outcome holds none of the server's own words.

        Raises:
            RecordError: the notice holds no issue.
        """
        delivery, message = notice.delivery, message_for(notice)
        identity = delivery.message_id
        firsts = (
            delivery_id(one.issue_id, one.action, "firing") for one in (delivery, *notice.others)
        )
        envelope = Envelope(
            sender=target.sender or f"tocsin@{self._host}",
            to=target.to,
            delivery_id=identity,
            sent_ms=min(one.created_ms for one in (delivery, *notice.others)),
            answers=()
            if delivery.occasion == DIGEST
            else tuple(first for first in firsts if first != identity),
            id_domain=target.sender.rpartition("@")[2] if target.sender else ID_DOMAIN,
        )
        report = await self._reported(target, message)
        mail = mail_of(message, envelope, await self._picture(message), report).as_bytes()
        missing = self._reached.missing(identity, target.to)
        outcome = await self._hand_over(target, identity, envelope, missing, mail)
        if outcome.done is not None or outcome.forbidden is not None:
            self._reached.discard(identity)
        return outcome

    async def close(self) -> None:
        """Close the sender; it keeps nothing open."""

    async def _picture(self, message: Message) -> bytes | None:
        drawing = drawing_of(message)
        if drawing is None:
            return None
        return await self._plotter.draw(f"{message.issue_id}/{message.state}", drawing)

    async def _reported(self, target: EmailTarget, message: Message) -> bytes | None:
        if self._report is None or not target.attach_report or message.digest:
            return None
        return await self._report(message.run_id)

    async def _hand_over(
        self,
        target: EmailTarget,
        identity: str,
        envelope: Envelope,
        to: Sequence[str],
        mail: bytes,
    ) -> Outcome:
        import aiosmtplib

        server = target.server
        client = aiosmtplib.SMTP(
            hostname=server.host,
            port=server.port,
            local_hostname=self._host,
            timeout=self._timeout_s,
            use_tls=server.security == "tls",
            start_tls=False,
            tls_context=server.context if server.security != "none" else None,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await client.connect()
                why_not = await self._prepare(client, server)
                if why_not is not None:
                    return Outcome(forbidden=why_not)
                refused, _ = await client.sendmail(envelope.sender, list(to), mail)
        except aiosmtplib.SMTPRecipientsRefused as error:
            return self._after(target, identity, to, [one.code for one in error.recipients], [])
        except aiosmtplib.SMTPResponseException as error:
            return _answer(error.code)
        except (aiosmtplib.SMTPException, OSError, TimeoutError, ValueError) as error:
            failure = _failure(error)
            return (
                Outcome(later=f"{failure}{server.advice}")
                if server.advice
                else Outcome(failure=failure)
            )
        else:
            # The mail is theirs now, however late it is and however the farewell goes.
            with contextlib.suppress(aiosmtplib.SMTPException, OSError, TimeoutError):
                await client.quit(timeout=_FAREWELL_S)
        finally:
            client.close()
        codes = [response.code for response in refused.values()]
        return self._after(target, identity, to, codes, [one for one in to if one not in refused])

    async def _prepare(self, client: aiosmtplib.SMTP, server: SmtpServer) -> str | None:
        """Encrypt and log in; why that cannot be."""
        await client.ehlo()
        if server.security == "starttls":
            if not client.supports_extension("starttls"):
                return (
                    "the mail server offers no STARTTLS; set `starttls: false` to send unencrypted"
                )
            await client.starttls(tls_context=server.context)
            await client.ehlo()
        if server.username is None and server.password is None:
            return None
        if server.username is None or server.password is None:
            what = "user name" if server.username is None else "password"
            return f"cannot log in: the secret of the {what} is missing"
        if not client.supports_extension("auth"):
            return "the mail server offers no log-in; remove username and password"
        if not client.supported_auth_methods:
            known = ", ".join(method.upper() for method in client.AUTH_METHODS)
            return f"the mail server offers no log-in by user name and password ({known})"
        await client.login(server.username.get_secret_value(), server.password.get_secret_value())
        return None

    def _after(
        self,
        target: EmailTarget,
        identity: str,
        to: Sequence[str],
        refused: Sequence[int],
        reached: Sequence[str],
    ) -> Outcome:
        """What an answer means that was not the same for all recipients, or good for all."""
        self._reached.add(identity, *reached)
        count = len(target.to) - len(self._reached.missing(identity, target.to))
        if not refused:
            return Outcome(done=f"accepted by the mail server for {_people(count)}")
        later = [code for code in refused if code < 500]
        text = _reply(later[0] if later else refused[0])
        if later:
            some = f"accepted for {count} of {len(target.to)} recipients; " if count else ""
            return Outcome(later=f"{some}{text}")
        if count == 0:
            return Outcome(forbidden=text)
        return Outcome(done=f"accepted for {count} of {len(target.to)} recipients; others: {text}")


def _people(count: int) -> str:
    return "1 recipient" if count == 1 else f"{count} recipients"


def _answer(code: int) -> Outcome:
    """5xx is final, all else may be better later."""
    text = _reply(code)
    return Outcome(forbidden=text) if 500 <= code < 600 else Outcome(later=text)


def _reply(code: int) -> str:
    return f"{code} {_REPLIES.get(code, '')}".strip()


def _failure(error: Exception) -> Failure:
    """The kind of failure. Never the error's own words: they quote the server's."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        if not isinstance(cause, Exception) or len(causes) > 8:
            break
        causes.append(cause)
    if any(isinstance(one, ssl.SSLError) for one in causes):
        return "TLS certificate not accepted"
    if any(isinstance(one, socket.gaierror) for one in causes):
        return "name not found"
    if any(isinstance(one, ConnectionRefusedError) for one in causes):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionError):
        return "connection reset"
    return "no connection" if isinstance(error, OSError) else "broken answer"
