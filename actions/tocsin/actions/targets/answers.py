"""What a backend's answer means for a stop, and whether its job is the recorded one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from tocsin.actions.decision.retry import Outcome, is_temporary, retry_after_ms
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetJob
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.targets import TargetConfig
from tocsin.schemas.configuration.values import format_duration

CLOCKS_APART_MS: Final = 60_000
"""How far the clocks of the bus and of a backend may differ."""

_WORD: Final = re.compile(r"[A-Za-z][A-Za-z_]{0,31}")


def stop_asked(outcome: Outcome, accepted: str, now_ms: int) -> StopAsked:
    """What an attempt to ask for the end means; `accepted` is the reason if it was."""
    text = outcome.text()
    if is_temporary(outcome):
        return StopAsked("failed", text, retry_after_ms(outcome.retry_after, now_ms))
    if succeeded(outcome):
        return StopAsked("accepted", accepted)
    if outcome.status is not None and 300 <= outcome.status < 400:
        return StopAsked("refused", f"{text}: redirects are not followed; configure the final URL")
    return StopAsked("refused", text)


def succeeded(outcome: Outcome) -> bool:
    """Whether it is a status 2xx."""
    return outcome.status is not None and 200 <= outcome.status < 300


def not_seen(why: str) -> JobSeen:
    """The backend could not be asked, or does not know."""
    return JobSeen("unknown", why)


def instead(seen: JobSeen) -> StopAsked:
    """What a request to stop means if, as was just seen, the job is not there to be asked."""
    if seen.state == "ended":
        return StopAsked("accepted", f"there was nothing left to end: {seen.reason}")
    if seen.state == "replaced":
        return StopAsked("refused", seen.reason)
    return StopAsked("failed", seen.reason)


def why_another(began_ms: int, job: TargetJob) -> str | None:
    """Why a job that the backend began then cannot be the one that was recorded; None if it can."""
    late_ms = began_ms - job.started_ms
    if late_ms <= CLOCKS_APART_MS:
        return None
    return f"it began {late_ms / 1000:,.0f} s after this training: another job with that name"


def word(value: object) -> str:
    """A state as a backend names it; nothing longer or stranger comes into a reason."""
    return value if isinstance(value, str) and _WORD.fullmatch(value) else "an unknown state"


def grace_problems(config: TargetConfig, most: timedelta, why: str, loc: Loc) -> Iterator[Problem]:
    """A grace that the backend does not give; `why` it is `most`."""
    if config.grace > most:
        limit = format_duration(most)
        message = f"expected at most {limit}: {why}"
        yield Problem((*loc, "grace"), message, hint=f"grace: {limit}")


def warning(loc: Loc, code: str, message: str, hint: str) -> Problem:
    """What works, though hardly as meant."""
    return Problem(loc, message, code, hint)
