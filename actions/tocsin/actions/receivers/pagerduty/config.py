"""What may be configured of a service of PagerDuty."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import Secret, UrlOrSecret


class PagerDutyReceiver(ReceiverConfig):
    """Triggers and resolves an alert of PagerDuty for each issue; needs the extra `actions`."""

    type: Literal["pagerduty"] = Field(examples=["pagerduty"])
    """The kind of receiver."""
    routing_key: Secret = Field(examples=[{"secret": "pagerduty"}])
    """The key of an integration with the Events API v2."""
    url: UrlOrSecret = Field(
        default="https://events.pagerduty.com/v2/enqueue",
        examples=["https://events.eu.pagerduty.com/v2/enqueue"],
    )
    """Where to post; accounts in the EU have their own."""
