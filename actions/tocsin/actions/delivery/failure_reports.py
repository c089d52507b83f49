"""What reports a delivery that has failed: a dead letter, and the issue `action_failed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tocsin.actions.decision.planned import STOP
from tocsin.actions.decision.retry import Outcome, phrase_of
from tocsin.actions.decision.routing import ACTION_FAILED
from tocsin.actions.delivery.circuit import GONE
from tocsin.actions.delivery.records import failed_letter, issue_of, issue_record
from tocsin.bus.port import Outgoing
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.errors import RecordError
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.deliveries import REPEAT, Delivery
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Severity, Subject
from tocsin.schemas.topics import Topics

VERSION: Final = 1
_REMEDY: Final = (
    "Check the receiver's address, secret and network path. Then `tocsin bus dlq` lists what was "
    "not delivered, and `tocsin bus redrive` sends it."
)


_GONE: Final = Outcome(status=410, phrase=phrase_of(410)).text()


@dataclass(frozen=True, slots=True)
class FailureReports:
    """Reports what could not be delivered, under the name that the configuration gives the rule."""

    name: str = ACTION_FAILED
    severity: Severity = "warning"
    off: bool = False

    @classmethod
    def from_config(cls, config: Config) -> FailureReports:
        """Read the settings of the rule from the configuration."""
        entry = next((rule for rule in config.rules if rule.use == ACTION_FAILED), None)
        if entry is None:
            return cls(off=config.defaults.rules != "all")
        return cls(entry.name, entry.severity or "warning", entry.off)

    def why_not_notified(self, issue: IssueFiring, action: str) -> str | None:
        """Why a receiver does not get an issue: the issue is that this receiver fails."""
        if issue.rule != self.name or issue.subject.name != action:
            return None
        return "the issue is that this receiver fails"

    def records(
        self, topics: Topics, delivery: Delivery, before: Delivery | None, now_ms: int
    ) -> list[Outgoing]:
        """What is to be published when a delivery has come to a state.

        One that expired or was rejected is a dead letter, so that it can be sent once more. One
        that expired, or whose receiver answered that it is gone, is an issue too, unless it was
        about one. Another delivery to the same receiver gives the same issue, by its id: one is
        enough.
        """
        if delivery.state not in ("expired", "rejected"):
            return []
        if delivery.occasion == REPEAT and delivery.reason != _GONE:
            # The next repeat takes its place.
            return []
        letter = failed_letter(topics, delivery, before, now_ms)
        if delivery.state == "rejected" and delivery.reason != _GONE:
            return [letter] if delivery.kind != STOP else []
        if self.off or delivery.rule == self.name:
            return [letter]
        issue = self._issue(delivery, before or delivery, now_ms)
        return [letter, issue_record(topics, issue, now_ms)]

    def _issue(self, delivery: Delivery, before: Delivery, now_ms: int) -> IssueFiring:
        try:
            about = issue_of(before)
        except RecordError:
            about = None  # a stop's command
        what = "a stop" if delivery.kind == STOP else f"a notice to {delivery.action}"
        why = f"has expired: {delivery.reason}"
        if delivery.state == "rejected":
            why = f"was rejected: {GONE}"
        run, incarnation = delivery.run_id, delivery.incarnation
        return IssueFiring(
            run_id=run,
            incarnation=incarnation,
            world_size=about.world_size if about else 1,
            issue_id=issue_id(run, incarnation, self.name, VERSION, delivery.action),
            rule=self.name,
            use=ACTION_FAILED,
            rule_version=VERSION,
            severity=self.severity,
            subject=Subject(kind="rule", name=delivery.action),
            reason=clip(f"{what} about {delivery.rule} {why}"),
            remedy=_REMEDY,
            step=about.step if about else None,
            onset_ms=delivery.created_ms,
            at_ms=now_ms,
            labels=dict(about.labels) if about else {},
            evidence=Evidence(
                facts=(
                    Fact(name="issue", value=delivery.issue_id),
                    Fact(name="rule", value=delivery.rule),
                    Fact(name="attempts", value=float(delivery.attempts)),
                    Fact(name="tried_for", value=(now_ms - delivery.created_ms) / 1000, unit="s"),
                ),
                explanation=f"asked for by {delivery.decided_by}" if delivery.decided_by else "",
            ),
        )
