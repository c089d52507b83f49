"""A run in MLflow's words, and how a server is asked that is busy, refuses, or is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from support.records.issues import issue
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.run_view import RunView
from tocsin.store import Run
from tocsin.store.errors import StoreUnavailable
from tocsin.store.export.mlflow import MlflowRefused, MlflowServer, export_mlflow
from tocsin.store.export.mlflow_batches import (
    batches,
    issue_metrics,
    issue_tags,
    metric_name,
    metrics_of,
    status_of,
    tags_of,
)
from tocsin.store.export.series import scalars_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "loss"),
        ("eval/lr.0", "eval/lr.0"),
        ('a"b\x1b', "a_b_"),
        ("../../etc", "_/_/etc"),
        ("a//b", "a/_/b"),
        ("/", "_"),
        ("", "_"),
        ("x" * 400, "x" * 250),
        ("é", "_"),
    ],
)
def test_a_name_becomes_one_that_mlflow_takes(name: str, expected: str) -> None:
    assert metric_name(name) == expected


def test_metrics_keep_steps_times_and_what_is_not_finite(run: Run) -> None:
    found = list(metrics_of(scalars_of(run)))
    loss = [one for one in found if one["key"] == "loss"]
    assert [one["step"] for one in loss] == [0, 1, 2, 3, 4, 5]
    assert loss[3]["value"] == "NaN"
    assert all(isinstance(one["timestamp"], int) and one["timestamp"] > 10**12 for one in loss)
    assert json.dumps(found, allow_nan=False)
    assert {one["key"] for one in found if one["value"] == 9.0} == {"eval/loss"}


def test_names_that_mlflow_cannot_tell_apart_stay_apart(run: Run) -> None:
    from dataclasses import replace

    (one, *_) = scalars_of(run)
    named = [
        replace(one, series=replace(one.series, name=name)) for name in ("a:b", "a;b", "A:b", "a:b")
    ]
    keys = list(dict.fromkeys(str(metric["key"]) for metric in metrics_of(named)))
    assert keys == ["a_b", "a_b_2", "A_b_3"]


def test_issues_are_tags_and_counts() -> None:
    issues = [issue("r", episode="1"), issue("r", episode="2"), issue("r", "overfit")]
    counts = [(one["key"], one["value"], one["step"]) for one in issue_metrics(issues)]
    assert counts == [
        ("tocsin/issues/nonfinite", 1.0, 3),
        ("tocsin/issues/nonfinite", 2.0, 3),
        ("tocsin/issues/overfit", 1.0, 3),
    ]
    tags = issue_tags(issues)
    assert tags["tocsin.issues"] == "3"
    assert tags[f"tocsin.issue.{issues[0].short_id}"].startswith("critical nonfinite, firing: NaN")


@pytest.mark.parametrize(
    ("state", "outcome", "expected"),
    [
        ("running", None, "RUNNING"),
        ("ended", "completed", "FINISHED"),
        ("ended", "failed", "FAILED"),
        ("ended", "stopped", "KILLED"),
        ("lost", None, "FAILED"),
        ("ended", None, "FINISHED"),
    ],
)
def test_a_state_has_its_word_there(state: Any, outcome: Any, expected: str) -> None:
    view = RunView(run_id="r", incarnation="i", state=state, outcome=outcome)
    assert status_of(view) == expected
    assert tags_of("r", view, "i")["tocsin.state"] == (outcome or state)
    assert status_of(None) == "RUNNING"


def test_batches_hold_each_item_once() -> None:
    found = list(batches(({"n": n} for n in range(5)), 2))
    assert [len(one) for one in found] == [2, 2, 1]


@contextmanager
def answering(*answers: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A server with these answers, one after the other, and what it was asked."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers["Authorization"], json.loads(body)))
            status, answer = left.pop(0)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_busy_server_is_asked_again_and_gets_the_token() -> None:
    pauses: list[float] = []
    with answering((503, {}), (429, {}), (200, {"a": 1})) as (url, asked):
        server = MlflowServer(url, {"MLFLOW_TRACKING_TOKEN": "t"}, sleep=pauses.append)
        assert server.call("POST", "runs/create", {"b": 2}) == {"a": 1}
    assert len(asked) == 3
    assert asked[0] == ("/api/2.0/mlflow/runs/create", "Bearer t", {"b": 2})
    assert pauses == [1.0, 4.0]


def test_a_server_that_refuses_is_not_asked_again() -> None:
    with answering((400, {"message": "no"})) as (url, _):
        environ = {"MLFLOW_TRACKING_USERNAME": "ana", "MLFLOW_TRACKING_PASSWORD": "x"}
        with pytest.raises(MlflowRefused, match=r"answers 400 to runs/create: .*no"):
            MlflowServer(url, environ).call("POST", "runs/create", {})


def test_a_redirect_takes_no_token_along() -> None:
    with (
        answering((302, {})) as (url, _),
        pytest.raises(MlflowRefused, match="answers 302"),
    ):
        MlflowServer(url, {"MLFLOW_TRACKING_TOKEN": "t"}).call("POST", "runs/create", {})


def test_a_server_that_is_away_is_told(run: Run) -> None:
    server = MlflowServer("http://127.0.0.1:9", {}, sleep=lambda seconds: None)
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        export_mlflow(run, server, "trainings")


@pytest.mark.parametrize("uri", ["mlflow", "file:///tmp", "http://", "http://a:b@host", "ftp://h"])
def test_an_address_of_another_kind_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="--tracking-uri: expected http"):
        MlflowServer(uri, {})
