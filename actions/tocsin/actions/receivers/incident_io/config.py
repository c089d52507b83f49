"""What may be configured of an alert source of incident.io."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import Secret, UrlOrSecret


class IncidentIoReceiver(ReceiverConfig):
    """Fires and resolves an alert of incident.io for each issue; needs the extra `actions`."""

    type: Literal["incident_io"] = Field(examples=["incident_io"])
    """The kind of receiver."""
    url: UrlOrSecret = Field(examples=["https://api.incident.io/v2/alert_events/http/01GW2G3V0S59"])
    """URL of an alert source of the kind HTTP."""
    token: Secret = Field(examples=[{"secret": "incident-io"}])
    """Its token."""
