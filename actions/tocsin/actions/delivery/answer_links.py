"""The links in a message: to answer to its issue, and to the issue's page. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from tocsin.schemas.links import PATH, Link
from tocsin.schemas.records.deliveries import DIGEST, DRILL, Delivery
from tocsin.schemas.signing import SigningKey

LASTS: Final = timedelta(days=3)
"""Over a weekend. Less than all records by which the bus knows that a link was used."""


@dataclass(frozen=True, slots=True)
class AnswerLinks:
    """Makes links. Without a URL or a key there are none.

    Attributes:
        public_url: where people reach the pages, without a slash at its end.
        key: signs the links; who serves the pages must trust it.
        without: receivers whose messages have none.
        page_url: where people reach the live page, likewise; None: it is not linked.
    """

    public_url: str | None = None
    key: SigningKey | None = None
    without: Collection[str] = ()
    page_url: str | None = None

    def page(self, delivery: Delivery) -> str:
        """The page of the issue of a notice. Empty: it has none."""
        if self.page_url is None or delivery.occasion in (DIGEST, DRILL):
            return ""
        return f"{self.page_url}/issues/{delivery.issue_id}"

    def url(self, delivery: Delivery) -> str:
        """The link for the receiver of a notice; the same in each attempt. Empty: it has none."""
        over = delivery.issue_state == "resolved" or delivery.occasion in (DIGEST, DRILL)
        if self.public_url is None or self.key is None or over or delivery.action in self.without:
            return ""
        link = Link(
            verb="open",
            run_id=delivery.run_id,
            incarnation=delivery.incarnation,
            issue_id=delivery.issue_id,
            person=delivery.action,
            # What is redriven after days is new to its readers.
            until_ms=(delivery.redriven_ms or delivery.created_ms)
            + LASTS // timedelta(milliseconds=1),
        )
        return f"{self.public_url}{PATH}{link.token(self.key)}"
