"""The page of an issue as HTML. Pure.

No script and nothing from elsewhere; the content security policy forbids both, too. Forms post to
the page's own address, so that a proxy may serve it under any path.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tocsin.actions.receivers.message import message_of
from tocsin.console.links.case import Case
from tocsin.schemas.errors import require_extra
from tocsin.schemas.links import LinkVerb
from tocsin.schemas.text import plain_line

if TYPE_CHECKING:
    from jinja2 import Template

_PAGE: Final = "page.html.jinja"

_STYLE: Final = """
body { margin: 0; padding: 16px; font: 16px/1.45 system-ui, sans-serif; }
main { max-width: 640px; margin: 0 auto; overflow-wrap: anywhere; }
h1 { font-size: 20px; line-height: 1.35; }
.said { padding: 12px; border: 2px solid #1f5fa8; border-radius: 4px; font-weight: 600; }
.word { padding: 3px 9px; border-radius: 3px; font-size: 13px; color: #fff; background: #1f5fa8; }
.word.critical { background: #b3261e; } .word.warning { background: #9a5b00; }
.word.resolved { background: #1e6b3a; }
.buttons { display: flex; flex-wrap: wrap; gap: 10px; }
button { padding: 12px 18px; border: 0; border-radius: 4px; font: inherit; font-weight: 600; }
button { color: #fff; background: #5f6368; } button.ack { background: #1f5fa8; }
button.approve { background: #b3261e; } button.reject { background: #1e6b3a; }
dt { margin-top: 8px; font-size: 13px; opacity: 0.75; } dd { margin: 0; }
"""

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
"""The Content-Security-Policy of the pages."""

TEXTS: Final[Mapping[LinkVerb, str]] = {
    "approve": "Approve the stop",
    "reject": "Reject the stop",
    "ack": "Acknowledge",
    "resolve": "Resolve",
    "false-alarm": "False alarm",
    "silence": "Silence for 1 hour",
}


@dataclass(frozen=True, slots=True)
class Button:
    """What can be answered, with the token that permits it."""

    verb: LinkVerb
    token: str

    @property
    def text(self) -> str:
        """What is on it."""
        return TEXTS[self.verb]


def page_of(
    case: Case | None, buttons: Sequence[Button] = (), *, person: str = "", message: str = ""
) -> str:
    """The page of an issue, or without one, only its text."""
    issue = None if case is None else case.issue
    answers = [] if case is None else case.answers
    waiting = [] if case is None else case.waiting()
    return _template().render(
        # Ours, and its hash is in the policy: not escaped.
        style=_STYLE,
        text=message,
        message=None if issue is None else message_of(issue),
        lines=[plain_line(answer.text) for answer in answers],
        stops=[f"The stop waits: {plain_line(stop.reason)}" for stop in waiting],
        buttons=buttons,
        person=person,
    )


@functools.cache
def _template() -> Template:
    require_extra("actions", "public_url", "jinja2")
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(files(__package__).joinpath(_PAGE).read_text(encoding="utf-8"))
