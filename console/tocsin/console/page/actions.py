"""What the buttons do: they put the same records on the bus as the commands of their names.

Nothing here changes what the page shows. That comes back over the bus, as for everybody else.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tocsin.console.context import CommandContext
from tocsin.console.feedback.send import Answer, as_text, feedback_on, feedback_record
from tocsin.console.person import reason_given
from tocsin.console.publication import publish
from tocsin.console.refusal import RefusedError
from tocsin.console.silences.send import add_silence, read_request
from tocsin.console.stop.approve import StopReply, choose_stop, send_answer
from tocsin.console.stop.send import read_options, stop_run
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.feedback import (
    Feedback,
    FeedbackAcknowledged,
    FeedbackFalseAlarm,
    FeedbackResolved,
)
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs_fold import RunsView
from tocsin.schemas.text import plain_line, time_text

FEEDBACK: Final[Mapping[str, type[Feedback]]] = {
    "ack": FeedbackAcknowledged,
    "resolve": FeedbackResolved,
    "false-alarm": FeedbackFalseAlarm,
}
_LASTS: Final = frozenset({"1h", "4h", "1d", "7d"})
_DEFAULT_GRACE: Final = "30s"


@dataclass(frozen=True, slots=True)
class PageActions:
    """What people may do, in the name of whom. All of it writes to the bus of `context`.

    Each method returns a sentence that says what was done, and raises ConfigurationError for what
    cannot be done as asked, BusError where the bus does not answer.
    """

    context: CommandContext
    environ: Mapping[str, str]

    async def answer(
        self, issue: IssueFiring, verb: str, fields: Mapping[str, str], person: str, now_ms: int
    ) -> str:
        """Acknowledge an issue, resolve it, or call it a false alarm."""
        why = reason_given(fields.get("why", ""))
        answer = Answer(issue=issue.issue_id, kind=FEEDBACK[verb], by=person, why=why)
        feedback = feedback_on(issue, answer, now_ms)
        async with self.context.open_bus(create=False) as bus:
            await publish(bus, [feedback_record(self.context.topics, feedback)])
        return as_text(feedback)

    async def silence(
        self, issue: IssueFiring, fields: Mapping[str, str], person: str, now_ms: int
    ) -> str:
        """Send no notices about a run, a rule, or both, for a time."""
        what, lasts = fields.get("what", "both"), fields.get("lasts", "1h")
        # A run's name has no pattern in it, a rule's may.
        matches = {"run": f"run={issue.run_id}", "rule": f"rule={glob.escape(issue.rule)}"}
        if what not in (*matches, "both") or lasts not in _LASTS:
            raise ConfigurationError("expected the form of the page")
        request = read_request(
            [*matches.values()] if what == "both" else [matches[what]],
            lasts=lasts,
            until=None,
            by=person,
            why=fields.get("why", ""),
            mutes=(),
            now_ms=now_ms,
        )
        silence = await add_silence(self.context, request, self.environ, now_ms)
        return f"silenced until {time_text(silence.until_ms)}; `tocsin silence list` lists it"

    async def reply(
        self,
        view: RunsView,
        delivery_id: str,
        verdict: Literal["approve", "reject"],
        person: str,
        now_ms: int,
    ) -> str:
        """Approve or reject a stop that waits."""
        stop = choose_stop(view.deliveries, delivery_id)
        reply = StopReply(text=delivery_id, verdict=verdict, by=person)
        async with self.context.open_bus(create=False) as bus:
            await send_answer(bus, self.context.topics, stop, reply, self.environ, now_ms)
        did = {"approve": "approved", "reject": "rejected"}[verdict]
        return f"{did} the stop of run {plain_line(stop.run_id)}"

    async def stop(self, run_id: str, fields: Mapping[str, str], person: str) -> str:
        """Ask a run to stop; the page shows how far it has come.

        Raises:
            RefusedError: it is not known that the command was sent, or it did not stop the run.
        """
        grace = fields.get("grace") or _DEFAULT_GRACE
        options = read_options(run_id, fields.get("reason", ""), grace=grace, wait_s=0.0, by=person)
        lines: list[str] = []
        outcome = await stop_run(self.context, options, self.environ, lines.append)
        text = lines[-1] if lines else f"asked run {plain_line(run_id)} to stop"
        if outcome.exit_code:
            raise RefusedError(503, text.strip())
        return text
