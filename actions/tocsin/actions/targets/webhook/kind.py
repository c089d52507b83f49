"""A service of the user's own that ends jobs.

tocsin asks it with a signed POST and polls its status URL: only what that shows counts as an end.
There is no callback: the service would need an address of tocsin's for one.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlencode, urlsplit

from pydantic import JsonValue, SecretStr

from tocsin.actions.receivers.http import HttpPoster, http_url, tls_context
from tocsin.actions.receivers.webhook.endpoint import (
    header_problems,
    header_values,
    signing_keys,
    tls_problems,
)
from tocsin.actions.receivers.webhook.signature import signed_headers
from tocsin.actions.targets.answers import instead, not_seen, stop_asked, succeeded
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext, TargetJob, TargetKind
from tocsin.actions.targets.webhook.config import WebhookStopTarget
from tocsin.schemas import monotonic_clock
from tocsin.schemas.configuration.problems import Loc, Problem
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.configuration.values import SecretRef
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.runs import SchedulerJob

EVENT: Final = "tocsin.stop"
"""The `type` in the body of a request."""

STATES: Final[tuple[Literal["running", "ended", "replaced", "unknown"], ...]] = (
    "running",
    "ended",
    "replaced",
    "unknown",
)
"""What a service may answer."""


class Webhook(TargetKind[WebhookStopTarget]):
    """Asks a service to end jobs."""

    config = WebhookStopTarget
    libraries = ("aiohttp",)

    def check(self, config: WebhookStopTarget, loc: Loc) -> Iterator[Problem]:
        """Headers that are none, ours, or there twice; TLS files without TLS."""
        yield from tls_problems(config.tls, (config.url, config.status_url), loc)
        yield from header_problems(config.headers, loc)

    def can_end(self, config: WebhookStopTarget, scheduler: SchedulerJob) -> bool:
        """What the configuration says."""
        return not config.schedulers or scheduler.kind in config.schedulers

    def target(self, name: str, config: WebhookStopTarget, context: TargetContext) -> StopService:
        """The service."""
        what = f"target {name!r}"

        def url(given: str | SecretRef) -> SecretStr:
            found = value_of(given, context.secrets)
            if found is None:
                raise ConfigurationError(f"{what}: there is no URL of the service")
            return http_url(found, what)

        return StopService(
            HttpPoster(context.guard),
            url(config.url),
            url(config.status_url),
            signing_keys(config.sign, context.secrets, what),
            header_values(config.headers, context.secrets, what),
            None
            if config.tls is None
            else tls_context(config.tls, folder=context.folder, what=what),
        )


@dataclass(frozen=True, slots=True)
class StopService:
    """One service. Everything that may be secret is wrapped, URLs too: some hold a token.

    Attributes:
        keys: the signing key, and behind it the one before while they are being replaced.
    """

    poster: HttpPoster
    url: SecretStr
    status_url: SecretStr
    keys: tuple[SecretStr, ...]
    headers: Mapping[str, SecretStr] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    now_ms: Callable[[], int] = monotonic_clock.unix_ms

    async def inspect(self, job: TargetJob) -> JobSeen:
        """Ask for the state of the job."""
        outcome, answer = await self.poster.ask(
            "GET", status_of(self.status_url, job), headers=self.headers, tls=self.tls
        )
        return seen_of(job, answer) if succeeded(outcome) else not_seen(outcome.text())

    async def stop(self, job: TargetJob) -> StopAsked:
        """Look, and post the request unless it is over. Each attempt has the same id."""
        seen = await self.inspect(job)
        # A service that cannot tell yet is asked anyway: the request names the incarnation.
        if seen.state in ("ended", "replaced"):
            return instead(seen)
        body = json.dumps(request_of(job), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {name: value.get_secret_value() for name, value in self.headers.items()}
        headers["content-type"] = "application/json; charset=utf-8"
        headers |= signed_headers(
            self.keys, id=job.delivery_id, timestamp_s=self.now_ms() // 1000, body=body
        )
        outcome = await self.poster.post(self.url, body, headers, tls=self.tls)
        return stop_asked(outcome, f"the service answered {outcome.text()}", self.now_ms())

    async def close(self) -> None:
        """Close the connections."""
        await self.poster.close()


def request_of(job: TargetJob) -> dict[str, JsonValue]:
    """The body of the request. Pure."""
    return {
        "type": EVENT,
        "stop": job.delivery_id,
        "run": job.run_id,
        "incarnation": job.incarnation,
        "job": {"scheduler": job.scheduler.kind, "names": dict(job.scheduler.names)},
        "started_ms": job.started_ms,
        "reason": job.reason,
    }


def status_of(url: SecretStr, job: TargetJob) -> SecretStr:
    """The status URL with the job in its query. Pure."""
    asked = {"run": job.run_id, "incarnation": job.incarnation, "stop": job.delivery_id}
    parts = urlsplit(url.get_secret_value())
    query = "&".join(filter(None, (parts.query, urlencode(asked))))
    return SecretStr(parts._replace(query=query, fragment="").geturl())


def seen_of(job: TargetJob, answer: JsonValue) -> JobSeen:
    """What the service shows of the job. It must name the incarnation: a page that says `ended` to
    everybody confirms nothing. Pure."""
    if not isinstance(answer, Mapping):
        return not_seen("expected JSON with `incarnation` and `state`")
    if answer.get("incarnation") != job.incarnation:
        return not_seen("the service did not answer about this incarnation")
    for state in STATES:
        if answer.get("state") == state:
            return JobSeen(state, f"the service answered: {state}")
    return not_seen(f"expected `state` as one of {', '.join(STATES)}")
