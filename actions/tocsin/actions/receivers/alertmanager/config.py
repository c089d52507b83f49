"""What may be configured of an Alertmanager."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import Duration, Secret, UrlOrSecret


class AlertmanagerReceiver(ReceiverConfig):
    """Sends an alert to an Alertmanager for each issue, and its end; needs the extra `actions`."""

    type: Literal["alertmanager"] = Field(examples=["alertmanager"])
    """The kind of receiver."""
    url: UrlOrSecret = Field(examples=["http://alertmanager:9093"])
    """Its URL, without `/api/v2/alerts`."""
    token: Secret | None = Field(default=None, examples=[{"secret": "alertmanager"}])
    """Token for a proxy in front of it (`Authorization: Bearer`); absent: none is sent."""
    expires_after: Duration = Field(default=timedelta(hours=24), examples=["24h"])
    """How long an alert stays that nothing resolves. Unit: a duration."""
