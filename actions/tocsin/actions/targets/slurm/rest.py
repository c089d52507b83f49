"""A cluster by its REST API: a slurmrestd that takes JSON web tokens.

Versions of the API write the same things in different forms: a state is a text until v0.0.39 and a
list of texts from v0.0.40 on, a number may be an object that says whether it is set.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue, SecretStr

from tocsin.actions.decision.retry import Outcome
from tocsin.actions.receivers.http import HttpPoster, Method, http_url, tls_context
from tocsin.actions.targets.kind import StopAsked, TargetContext
from tocsin.actions.targets.slurm.config import SlurmRest
from tocsin.actions.targets.slurm.controller import Listing
from tocsin.actions.targets.slurm.jobs import SEVERAL, ListedJob
from tocsin.schemas.configuration.settings import value_of
from tocsin.schemas.errors import ConfigurationError

_LONGEST: Final = 1024 * 1024
"""Bytes that are read of an answer: each part of a heterogeneous job takes some 10 kB."""

_SWITCHES: Final = "v0.0.38"
"""This version takes options of sbatch: there `"requeue": false` allows it, with status 200."""

# Numbers of slurm/slurm_errno.h, the same in all versions.
_INVALID_JOB: Final = 2017
_ALREADY_DONE: Final = 2021
_DENIED: Final = frozenset((2002, 2010))
_TOKEN: Final = frozenset((1007, 6000, 6001, 9008))
_ERROR_KEYS: Final = ("error_number", "errno", "error_code")


class Rest:
    """One slurmrestd."""

    def __init__(
        self,
        poster: HttpPoster,
        base: SecretStr,
        headers: Mapping[str, SecretStr],
        tls: ssl.SSLContext | None = None,
        *,
        api: str,
    ) -> None:
        """`base` is the URL without the version of the API; the headers log in."""
        self._poster = poster
        self._base = base
        self._api = api
        self._headers = headers
        self._tls = tls

    async def jobs(self, called: str) -> Listing:
        """What the API answers about that job. It does not tell who else may hide jobs from us."""
        outcome, answer = await self._ask("GET", called)
        errors = _errors(answer)
        if _INVALID_JOB in errors:
            return Listing()
        why = _why(outcome, errors)
        if why is not None:
            return Listing(failure=why)
        try:
            return _listing(answer)
        except (KeyError, TypeError, ValueError):
            return Listing(failure="slurmrestd's answer is not a job list")

    async def set_requeue(self, called: str, *, allowed: bool) -> StopAsked:
        """By an update of that job."""
        body: dict[str, JsonValue] = {"requeue": allowed}
        if self._api == _SWITCHES and not allowed:
            body = {"no_requeue": True}
        return _answer(*await self._ask("POST", called, body))

    async def cancel(self, called: str) -> StopAsked:
        """By its deletion, which is a plain `scancel`."""
        return _answer(*await self._ask("DELETE", called))

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()

    async def _ask(
        self, method: Method, called: str, body: Mapping[str, JsonValue] | None = None
    ) -> tuple[Outcome, JsonValue]:
        return await self._poster.ask(
            method,
            SecretStr(f"{self._base.get_secret_value()}/slurm/{self._api}/job/{called}"),
            body,
            headers=self._headers,
            tls=self._tls,
            longest=_LONGEST,
        )


def rest_controller(name: str, config: SlurmRest, context: TargetContext) -> Rest:
    """The slurmrestd of the target of that name. Reads the TLS files.

    Raises:
        ConfigurationError: it cannot be used.
    """
    url, token = (value_of(given, context.secrets) for given in (config.url, config.token))
    if url is None or token is None:
        raise ConfigurationError(f"target {name!r}: expected values of the secrets of 'rest'")
    text = token.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ConfigurationError(f"target {name!r}: expected a token without line breaks")
    base = http_url(url, f"target {name!r}").get_secret_value().rstrip("/")
    return Rest(
        HttpPoster(context.guard),
        SecretStr(base),
        {
            "X-SLURM-USER-NAME": SecretStr(config.user),
            "X-SLURM-USER-TOKEN": token,
            # With a charset behind it, v0.0.38 answers 400.
            "content-type": SecretStr("application/json"),
        },
        None
        if config.tls is None
        else tls_context(config.tls, folder=context.folder, what=f"target {name!r}"),
        api=config.api,
    )


def _listing(answer: JsonValue) -> Listing:
    """Raises KeyError, TypeError, ValueError: it is no list of jobs."""
    if not isinstance(answer, dict) or not isinstance(answer["jobs"], list):
        raise TypeError
    jobs = [one for one in answer["jobs"] if isinstance(one, dict)]
    clusters = {str(one["cluster"]) for one in jobs}
    if len(clusters) > 1:
        raise ValueError
    return Listing(jobs=tuple(_job(one) for one in jobs), cluster="".join(clusters))


def _job(one: Mapping[str, JsonValue]) -> ListedJob:
    states = one["job_state"]
    task = _number(one["array_task_id"])
    in_array = _number(one["array_job_id"])
    return ListedJob(
        job=_number(one["job_id"]) or 0,
        restarts=_number(one["restart_cnt"]) or 0,
        states=tuple(map(str, states)) if isinstance(states, list) else (str(states),),
        requeue=one["requeue"] is not False,
        array_task=(SEVERAL if task is None else task) if in_array else None,
        het_job=_number(one["het_job_id"]) or 0,
        started_s=_number(one["start_time"]) or 0,
    )


def _number(value: JsonValue) -> int | None:
    """A number in any of its forms; None if it is not set. Raises TypeError: it is not one."""
    if isinstance(value, dict):
        value = value["number"] if value.get("set") else None
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError


def _errors(answer: JsonValue) -> set[int]:
    """The numbers of the errors in an answer."""
    listed = answer.get("errors") if isinstance(answer, dict) else None
    errors = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    numbers = [one.get(key) for one in errors for key in _ERROR_KEYS]
    return {number for number in numbers if isinstance(number, int) and number}


def _answer(outcome: Outcome, answer: JsonValue) -> StopAsked:
    errors = _errors(answer) - {_ALREADY_DONE}
    why = _why(outcome, errors)
    if why is None or _ALREADY_DONE in _errors(answer):
        return StopAsked("accepted", f"slurmrestd answered {outcome.text()}")
    never = errors & (_DENIED | _TOKEN) or outcome.status in (401, 403, 404) or outcome.forbidden
    # What Retry-After asks for is in seconds here.
    after = outcome.retry_after or ""
    wait_ms = int(after) * 1000 if after.isascii() and after.isdigit() and len(after) < 6 else None
    return StopAsked("refused" if never else "failed", why, wait_ms)


def _why(outcome: Outcome, errors: set[int]) -> str | None:
    """Why the API did not do it, in words of our own; None if it did."""
    if outcome.failure is not None or outcome.forbidden is not None:
        return f"slurmrestd: {outcome.text()}"
    if errors & _TOKEN or outcome.status == 401:
        return "slurmrestd does not accept the token"
    if errors & _DENIED or outcome.status == 403:
        return "slurmrestd: not permitted; the job's owner or an operator of Slurm may do it"
    if errors:
        return f"slurmrestd: Slurm's error {min(errors)}"
    if outcome.status != 200:
        return f"slurmrestd answered {outcome.text()}"
    return None
