"""Sends a run to an MLflow server, by its REST API.

The same run again is the same run there: it is found by its tags, and what it has stays once.
"""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from tocsin.schemas.errors import ConfigurationError
from tocsin.store.errors import StoreUnavailable
from tocsin.store.export.mlflow_batches import (
    INCARNATION_TAG,
    METRICS,
    RUN_TAG,
    TAGS,
    Json,
    as_tags,
    batches,
    issue_metrics,
    issue_tags,
    metrics_of,
    status_of,
    tags_of,
)
from tocsin.store.export.series import scalars_of
from tocsin.store.run import Run

TIMEOUT_S: Final = 30.0
"""For one request."""

_PAUSES_S: Final = (1.0, 4.0, 16.0)
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_ANSWER: Final = 300


class MlflowRefused(ConfigurationError):
    """The MLflow server refuses a request; the message has its answer."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent, and where it is."""

    url: str
    run: str
    metrics: int
    issues: int
    again: bool


class MlflowServer:
    """The REST API of a server. Its methods block.

    Args:
        uri: `http://HOST:PORT` or `https://…`.
        environ: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and …_PASSWORD.

    Raises:
        ConfigurationError: it is no such address.
    """

    def __init__(
        self,
        uri: str,
        environ: Mapping[str, str] | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigurationError(
                "--tracking-uri: expected http://HOST:PORT or https://HOST, without a user: "
                "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD, name one"
            )
        self.uri: Final = uri.rstrip("/")
        self._headers = _headers(os.environ if environ is None else environ)
        self._sleep = sleep

    def call(self, method: str, path: str, body: Mapping[str, object]) -> Json:
        """One request; tried again a few times while the server is busy.

        Raises:
            MlflowRefused: the answer is no. StoreUnavailable: there is none.
        """
        url = f"{self.uri}/api/2.0/mlflow/{path}"
        data: bytes | None = None
        if method == "GET":
            url += "?" + urllib.parse.urlencode({key: str(value) for key, value in body.items()})
        else:
            data = json.dumps(body, allow_nan=False).encode()
        for pause_s in (*_PAUSES_S, None):
            request = urllib.request.Request(url, data, self._headers, method=method)
            try:
                # A tracking server is where people say; nothing else is asked (no redirect).
                with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                    found: Json = json.load(answer)
                    return found
            except urllib.error.HTTPError as error:
                text = error.read(2_000).decode(errors="replace")
                if error.code not in _AGAIN or pause_s is None:
                    raise MlflowRefused(
                        f"{self.uri} answers {error.code} to {path}: {text[:_ANSWER]}"
                    ) from None
            except (urllib.error.URLError, OSError, ValueError) as error:
                if pause_s is None:
                    raise StoreUnavailable(f"{self.uri} does not answer: {error}") from error
            self._sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is made if need be. Raises what `call` does."""
        try:
            found = self.call("GET", "experiments/get-by-name", {"experiment_name": name})
        except MlflowRefused as error:
            if "RESOURCE_DOES_NOT_EXIST" not in str(error):
                raise
            return str(self.call("POST", "experiments/create", {"name": name})["experiment_id"])
        experiment = found["experiment"]
        assert isinstance(experiment, dict)
        return str(experiment["experiment_id"])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could carry the token to another host."""

    def redirect_request(self, *arguments: object) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirect)


def export_mlflow(run: Run, server: MlflowServer, experiment: str) -> Sent:
    """Send scalars and issues of a run. Blocks.

    Raises:
        MlflowRefused: the server refuses. StoreUnavailable: it does not answer.
    """
    view, issues = run.view, [one for one in run.issues() if one.incarnation == run.incarnation]
    tags = tags_of(run.run_id, view, run.incarnation) | issue_tags(issues)
    experiment_id = server.experiment(experiment)
    found = _known(server, experiment_id, run)
    if found is None:
        started_ms = 0 if view is None else view.started_ms
        body = {"experiment_id": experiment_id, "run_name": run.run_id, "start_time": started_ms}
        marks = [*as_tags({key: tags[key] for key in (RUN_TAG, INCARNATION_TAG)})]
        created = server.call("POST", "runs/create", {**body, "tags": marks})["run"]
        target = _run_id(created)
    else:
        target = found
    for batch in batches(as_tags(tags), TAGS):
        server.call("POST", "runs/log-batch", {"run_id": target, "tags": batch})
    count = 0
    for metrics in (metrics_of(scalars_of(run)), issue_metrics(issues)):
        for batch in batches(metrics, METRICS):
            server.call("POST", "runs/log-batch", {"run_id": target, "metrics": batch})
            count += len(batch)
    update: Json = {"run_id": target, "status": status_of(view)}
    if view is not None and view.ended_ms is not None:
        update["end_time"] = view.ended_ms
    server.call("POST", "runs/update", update)
    url = f"{server.uri}/#/experiments/{experiment_id}/runs/{target}"
    return Sent(url, target, count, len(issues), found is not None)


def _known(server: MlflowServer, experiment_id: str, run: Run) -> str | None:
    """The run there that is this one, if it was exported before."""
    wanted = f"tags.`{RUN_TAG}` = '{run.run_id}' AND tags.`{INCARNATION_TAG}` = '{run.incarnation}'"
    body = {"experiment_ids": [experiment_id], "filter": wanted, "max_results": 1}
    runs = server.call("POST", "runs/search", body).get("runs")
    return _run_id(runs[0]) if isinstance(runs, list) and runs else None


def _run_id(run: object) -> str:
    assert isinstance(run, dict)
    info = run["info"]
    assert isinstance(info, dict)
    return str(info["run_id"])


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "tocsin"}
    if token := environ.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    elif user := environ.get("MLFLOW_TRACKING_USERNAME"):
        secret = f"{user}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
    return headers
