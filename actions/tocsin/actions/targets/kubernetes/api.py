"""Requests to an API server. What goes wrong becomes a value."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pydantic import JsonValue

from tocsin.actions.decision.retry import phrase_of
from tocsin.actions.receivers.address_guard import AddressGuard, watching
from tocsin.actions.receivers.http import failure_of
from tocsin.actions.targets.kubernetes.credentials import Cluster
from tocsin.actions.targets.kubernetes.objects import Object, Pod
from tocsin.actions.targets.kubernetes.workloads import Resource

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S: Final = 10.0
"""For one request as a whole."""

PAGE: Final = 100
"""Pods in one answer."""

_LARGEST: Final = 16 * 1024 * 1024
"""Bytes of an answer that are read: a pod has 10 KB, and 1 MB at most."""

_REASON: Final = re.compile(r"[A-Za-z]{1,60}")
_ALIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        body: the object that was answered; empty if it was none.
        why: what went wrong, in the words of the API; "" if nothing did.
        retry_after_ms: how long the server wants to be left alone; None if it did not say.
    """

    status: int
    body: Object
    why: str = ""
    retry_after_ms: int | None = None

    @property
    def missing(self) -> bool:
        """Whether the API server does not have this object.

        It answers 404, too, if it does not know the kind, and so does a proxy that stands in front
        of it: these are no proof that a job is gone.
        """
        details = self.body.get("details")
        return (
            self.status == 404
            and self.body.get("reason") == "NotFound"
            and isinstance(details, dict)
            and bool(details.get("name"))
        )


class KubernetesApi:
    """One API server, with one session; `close` it at the end.

    Its address is the operator's: it comes from the pod's environment or from a kubeconfig on this
    machine, and is private in most clusters. So private addresses are allowed, whatever
    `--allow-cidr` says; link-local and metadata addresses are not.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float = TIMEOUT_S) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._guard = AddressGuard(private=True)
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None

    async def get(self, resource: Resource, namespace: str, name: str) -> Answer:
        """One object."""
        answer = await self._request("GET", resource.path(namespace, name))
        if answer.status == 404 and not answer.missing:
            of = f"{resource.plural} of {resource.group}/{resource.version}"
            return Answer(404, {}, f"404: the API server does not know {of}")
        return answer

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, JsonValue]
    ) -> Answer:
        """Merge into an object. A field that the kind does not have is refused, not left out."""
        return await self._request(
            "PATCH",
            resource.path(namespace, name),
            {"fieldValidation": "Strict"},
            patch,
            "application/merge-patch+json",
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, version: str
    ) -> Answer:
        """Delete an object, if it is the one of that uid and version, with all that it owns.

        It stays until they are gone. Without a policy, the API server would let a Job's pods run
        on.
        """
        options: dict[str, JsonValue] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid, "resourceVersion": version},
        }
        return await self._request("DELETE", resource.path(namespace, name), body=options)

    async def pods(self, namespace: str, **selectors: str) -> list[Pod] | Answer:
        """The pods in which something may still run; the answer, if it was not a list of them.

        Args:
            namespace: theirs.
            selectors: `labelSelector` or `fieldSelector`.
        """
        query = {"limit": str(PAGE), "fieldSelector": _ALIVE}
        fields = selectors.pop("fieldSelector", None)
        if fields is not None:
            query["fieldSelector"] += f",{fields}"
        query |= selectors
        found: list[Pod] = []
        while True:
            answer = await self._request("GET", f"/api/v1/namespaces/{namespace}/pods", query)
            items, meta = answer.body.get("items"), answer.body.get("metadata")
            if answer.why or not isinstance(items, list) or not isinstance(meta, dict):
                return answer if answer.why else Answer(answer.status, {}, "broken answer")
            pods = [Pod.read(item) for item in items if isinstance(item, dict)]
            found += [pod for pod in pods if pod is not None and not pod.done]
            more = meta.get("continue")
            if not isinstance(more, str) or not more:
                return found
            query["continue"] = more

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(
        self,
        method: Literal["GET", "PATCH", "DELETE"],
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, JsonValue] | None = None,
        content_type: str = "application/json",
    ) -> Answer:
        """One request, of at most 10 s. Raises nothing but CancelledError."""
        import aiohttp

        headers = {"accept": "application/json", "content-type": content_type}
        try:
            bearer, tls = await asyncio.to_thread(self._log_in)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "expected one word"
            return Answer(0, {}, f"the token or a certificate cannot be read: {why}")
        if bearer is not None:
            headers["authorization"] = f"Bearer {bearer}"
        with watching() as tried:
            try:
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._open().request(
                        method,
                        self._cluster.server + path,
                        params=query,
                        data=None if body is None else json.dumps(body).encode(),
                        headers=headers,
                        allow_redirects=False,
                        ssl=tls,
                        server_hostname=self._cluster.server_name,
                    ) as response,
                ):
                    return await _answer(response)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if tried.why_refused is not None:
                    return Answer(0, {}, tried.why_refused)
                # Its authority or our certificate may have been replaced: read them again.
                self._tls = None
                return Answer(0, {}, failure_of(error))

    def _log_in(self) -> tuple[str | None, ssl.SSLContext]:
        """The token as it is now, and whom to trust."""
        if self._tls is None:
            self._tls = self._cluster.tls()
        return self._cluster.bearer(), self._tls

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=self._guard.socket, ttl_dns_cache=10),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Not a proxy of the environment: it would connect where the guard does not see.
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            )
        return self._session


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    """The object of an answer, and the reason of one that is an error."""
    text = bytearray()
    async for part in response.content.iter_any():
        text += part
        if len(text) > _LARGEST:
            return Answer(response.status, {}, "the answer is too large")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = None
    body = raw if isinstance(raw, dict) else {}
    if 200 <= response.status < 300:
        return Answer(response.status, body, "" if body else "broken answer")
    # The reason is a word of the API, its message quotes what it was sent.
    reason = body.get("reason")
    word = reason if isinstance(reason, str) and _REASON.fullmatch(reason) else None
    why = f"{response.status} {word or phrase_of(response.status)}"
    after = response.headers.get("Retry-After", "")
    wait_ms = int(after) * 1000 if re.fullmatch(r"[0-9]{1,5}", after) else None
    return Answer(response.status, body, why, wait_ms)
