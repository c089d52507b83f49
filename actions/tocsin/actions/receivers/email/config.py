"""Configuration of an e-mail receiver."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from tocsin.actions.receivers.recipients import between
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import FilePath, MailAddress, Secret, TextOrSecret


class SmtpConfig(Section):
    """The mail server."""

    host: str = Field(
        min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$", examples=["mail.example.com"]
    )
    """Name or address of the server."""
    port: int | None = Field(default=None, ge=1, le=65535, examples=[587])
    """Port of the server. Absent: 465 with `tls`, 587 with `starttls`, else 25."""
    starttls: bool | None = Field(default=None, examples=[True])
    """Require STARTTLS. Absent: yes, unless `tls` is on or the server is on this machine."""
    tls: bool = Field(default=False, examples=[True])
    """Encrypt from the first byte."""
    ca: FilePath | None = Field(default=None, examples=["tls/ca.pem"])
    """PEM file of the authorities to trust, instead of the system's."""
    username: TextOrSecret | None = Field(default=None, examples=["tocsin"])
    """User to log in as. Absent: no log-in."""
    password: Secret | None = Field(default=None, examples=[{"secret": "mail"}])
    """The password."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.tls and self.starttls:
            raise ValueError("expected either 'tls' or 'starttls', not both")
        if (self.username is None) != (self.password is None):
            raise ValueError("expected 'username' and 'password' together")
        if self.password is not None and self.starttls is False and not self.tls:
            raise ValueError("a password is sent encrypted only: use 'starttls' or 'tls'")
        return self


class EmailReceiver(ReceiverConfig):
    """Sends each issue as an e-mail, with a plot of its data; needs the extra `actions`."""

    type: Literal["email"] = Field(examples=["email"])
    """The kind of receiver."""
    to: tuple[MailAddress, ...] = Field(
        strict=False,
        json_schema_extra={"minItems": 1, "maxItems": 50},
        examples=[["vision@example.com"]],
    )
    """Recipients."""
    sender: MailAddress | None = Field(default=None, examples=["tocsin@example.com"])
    """Sender. Absent: `tocsin@` and the name of the machine."""
    smtp: SmtpConfig | None = None
    """The mail server. Absent: the one in `TOCSIN_SMTP`, else the one on this machine."""
    send_resolved: bool | None = Field(default=None, examples=[False])
    """Also send an e-mail when an issue resolves, as a reply to the first one; absent:
    `defaults.send_resolved`."""

    attach_report: bool = Field(default=False, examples=[True])
    """Attach a report of the run, as `tocsin report` writes it. It is made when the e-mail is sent,
    which takes about two seconds of CPU."""

    @field_validator("to")
    @classmethod
    def _some(cls, to: tuple[str, ...]) -> tuple[str, ...]:
        return between("addresses", to, 50)
