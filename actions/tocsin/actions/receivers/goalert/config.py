"""What may be configured of a service of GoAlert."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import UrlOrSecret


class GoAlertReceiver(ReceiverConfig):
    """Opens and closes an alert of GoAlert for each issue; needs the extra `actions`."""

    type: Literal["goalert"] = Field(examples=["goalert"])
    """The kind of receiver."""
    url: UrlOrSecret = Field(examples=[{"secret": "goalert"}])
    """URL of an integration key of the kind Generic API, with its `token`."""
