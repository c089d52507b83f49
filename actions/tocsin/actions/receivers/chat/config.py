"""Configuration of a chat receiver."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tocsin.actions.receivers.templates.config import TemplateConfig
from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import TextOrSecret


class ChatReceiver(ReceiverConfig):
    """Sends each issue as a chat message, through apprise; needs the extra `actions`."""

    type: Literal["chat"] = Field(examples=["chat"])
    """The kind of receiver."""
    url: TextOrSecret = Field(examples=[{"secret": "slack"}])
    """URL of apprise, such as `slack://TOKEN_A/TOKEN_B/TOKEN_C`, `discord://ID/TOKEN` or
    `tgram://BOT_TOKEN/CHAT_ID`; or a webhook URL of Slack or Discord."""
    template: TemplateConfig | None = None
    """A message of your own. Absent: some lines with what people need to know."""
