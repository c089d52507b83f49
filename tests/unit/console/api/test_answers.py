"""`/api/v1`: what is answered fits its description, and every request gets an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate
from starlette.applications import Starlette
from starlette.testclient import TestClient

from support.records.api_source import MadeSource
from support.records.issues import NOW_MS, delivery, feedback, incarnation, issue
from support.records.issues import view as view_of_run
from tocsin.bus.port import BusUnavailable
from tocsin.console.api.openapi import openapi, parameters_of
from tocsin.console.api.operations import OPERATIONS, PATH_PARAMETERS, ROOT
from tocsin.console.api.paging import page_of
from tocsin.console.api.problems import MEDIA_TYPE, ProblemError
from tocsin.console.api.routes import api_routes
from tocsin.console.context import read_context
from tocsin.console.views.issues import issue_facts
from tocsin.console.views.status import status_json, target_policy
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.feedback import FeedbackResolved
from tocsin.schemas.records.goodput import Goodput
from tocsin.schemas.records.run_view import RankView, StopView
from tocsin.schemas.records.runs import SchedulerJob
from tocsin.schemas.records.runs_fold import CommandSeen, RunsView
from tocsin.schemas.records.stops.commands import StopRequested

NAN = issue("run-1")
SPIKE = issue("run-2", "loss_spike", severity="warning").model_copy(
    update={"onset_ms": NOW_MS - 1, "consequence_of": NAN.issue_id}
)
STOPPED = view_of_run(
    "run-1",
    ended=True,
    stop=StopView(
        state="exited", command_id="c1", exit_code=79, states={"requested": NOW_MS}, how="edge"
    ),
).model_copy(
    update={
        "labels": {"team": "vision"},
        "rules": {"nonfinite": "issues_found", "overfit": "waiting_for_input"},
        "last_loss": float("nan"),
        "goodput": Goodput(wall_s=10.0, productive_s=8.0),
        "started_ms": NOW_MS - 5_000,
        "ranks": (RankView(rank=0, last_heard_ms=NOW_MS),),
    }
)
COMMAND = StopRequested.model_validate(
    {
        "command_id": "c1",
        "run_id": "run-1",
        "incarnation": incarnation(),
        "requested_by": "ana@node",
        "reason": "NaN",
        "requested_ms": NOW_MS,
        "nonce": "n" * 16,
        "not_after_ms": NOW_MS + 60_000,
        "grace_s": 30.0,
    }
)
SOURCE = MadeSource(
    STOPPED,
    view_of_run("run-2"),
    view_of_run("run-22"),
    NAN,
    SPIKE,
    delivery(NAN, event={"data": "not shown"}),
    delivery(NAN, "stop", issue_event={"data": "not shown"}),
    feedback(FeedbackResolved, SPIKE, "known"),
    commands={"c1": CommandSeen(COMMAND, NOW_MS)},
)
CLIENT = TestClient(Starlette(routes=api_routes(SOURCE, now_ms=lambda: NOW_MS)))
ANSWERS = {operation.name: operation.answer for operation in OPERATIONS}


def get(path: str, **parameters: object) -> Any:
    """The body of a good answer, which fits its model."""
    answer = CLIENT.get(f"{ROOT}{path}", params=parameters)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def problem(path: str, status: int, **parameters: object) -> str:
    """What a refused request is told."""
    answer = CLIENT.get(f"{ROOT}{path}", params=parameters)  # type: ignore[arg-type]
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    body = answer.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:tocsin:problem:")
    return str(body["detail"])


@pytest.mark.parametrize("listed", ["issues", "deliveries", "stops"])
def test_a_list_of_one_run_knows_the_run_as_the_command_does(listed: str) -> None:
    """An empty list would say of a run that was misspelt that all is well."""
    assert "no run 'rum-1'" in problem(f"/{listed}", 404, run="rum-1")
    assert "2 runs start with 'run-'" in problem(f"/{listed}", 404, run="run-")
    assert {one["run_id"] for one in get(f"/{listed}", run="run-1")[listed]} == {"run-1"}
    assert get(f"/{listed}", run="run-22")[listed] == []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("list_runs", "/runs"),
        ("get_run", "/runs/run-1"),
        ("get_run", "/runs/run-2"),
        ("get_rules_of_run", "/runs/run-1/rules"),
        ("get_goodput", "/runs/run-1/goodput"),
        ("get_goodput", "/runs/run-2/goodput"),
        ("list_issues", "/issues"),
        ("get_issue", f"/issues/{NAN.issue_id}"),
        ("get_issue", f"/issues/{SPIKE.short_id}"),
        ("list_deliveries", "/deliveries"),
        ("list_stops", "/stops"),
        ("get_stops_report", "/stops/report"),
        ("list_suspended_receivers", "/receivers/suspended"),
        ("list_refused_configurations", "/configurations/refused"),
        ("list_rules", "/rules"),
    ],
)
def test_an_answer_fits_its_model_and_has_no_field_beside(name: str, path: str) -> None:
    body = get(path)
    assert body["version"] == 1
    model = ANSWERS[name]
    _same_keys(model.model_validate(body).model_dump(mode="json"), body, name)


def _same_keys(checked: object, body: object, where: str) -> None:
    """Whether a model has kept all that was there: it ignores what it does not know."""
    if isinstance(body, dict):
        assert isinstance(checked, dict), where
        for key, value in body.items():
            assert key in checked, f"{where}.{key} is not described"
            _same_keys(checked[key], value, f"{where}.{key}")
    elif isinstance(body, list):
        assert isinstance(checked, list), where
        for number, value in enumerate(body):
            _same_keys(checked[number], value, f"{where}[{number}]")


def test_a_run_is_meant_by_its_beginning_only_if_one_begins_so() -> None:
    assert "2 runs start with 'run-'" in problem("/runs/run-", 404)
    assert "no run 'x'" in problem("/runs/x", 404)


def test_a_run_tells_who_stopped_it_and_keeps_what_is_not_finite() -> None:
    body = get("/runs/run-1")
    assert body["stop"]["requested_by"] == "ana@node"
    assert body["run"]["last_loss"] == "NaN"
    assert body["incarnations"] == [incarnation()]
    standings = {one["rule"]: one for one in get("/runs/run-1/rules")["rules"]}
    assert standings["nonfinite"]["worst_severity"] == "critical"
    assert standings["overfit"]["issues"] == 0
    assert get("/runs/run-1/goodput")["productive_share"] == 0.8


def test_runs_are_filtered_by_state_label_and_time() -> None:
    assert [one["run_id"] for one in get("/runs", state="ended")["runs"]] == ["run-1"]
    assert [one["run_id"] for one in get("/runs", label="team=vision")["runs"]] == ["run-1"]
    assert get("/runs", label="team=audio")["runs"] == []
    assert [one["run_id"] for one in get("/runs", since="1h")["runs"]] == ["run-1"]


def test_an_issue_tells_its_consequences_and_no_payload() -> None:
    body = get(f"/issues/{NAN.issue_id}")
    assert body["issue"]["consequences"] == [SPIKE.issue_id]
    assert body["stop"]["command_id"] == "c1"
    assert "not shown" not in json.dumps(body)
    assert get("/issues/run-1")["issue"]["issue_id"] == NAN.issue_id
    assert "expected a run, or at least 4" in problem("/issues/1", 404)


def test_the_api_and_the_command_have_one_shape() -> None:
    (shown,) = get("/issues", run="run-1")["issues"]
    assert shown == json.loads(json.dumps(issue_facts(SOURCE.known, NAN)))


def test_issues_are_filtered() -> None:
    assert [one["run_id"] for one in get("/issues", state="open")["issues"]] == ["run-1"]
    assert [one["run_id"] for one in get("/issues", rule="loss_spike")["issues"]] == ["run-2"]
    assert get("/issues", severity="info")["issues"] == []
    later = "2026-11-21T10:46:53Z"
    assert get("/issues", since=later)["issues"] == []


def test_deliveries_are_filtered() -> None:
    assert len(get("/deliveries", issue=NAN.issue_id)["deliveries"]) == 2
    assert get("/deliveries", state="expired")["deliveries"] == []


def test_pages_hold_each_item_once() -> None:
    first = get("/issues", limit=1)
    second = get("/issues", limit=1, cursor=first["next"])
    assert second["next"] is None
    found = [one["issue_id"] for one in first["issues"] + second["issues"]]
    assert found == [NAN.issue_id, SPIKE.issue_id] or found == [SPIKE.issue_id, NAN.issue_id]
    assert first["as_of"] == "2026-11-21T10:46:52.300Z"


@pytest.mark.parametrize("cursor", ["x", "bnVsbA", "WzEsMl0", "W10", "é", "WzEsICJhIiwgM10"])
def test_a_cursor_that_no_page_gave_is_refused(cursor: str) -> None:
    assert "cursor: expected the `next`" in problem("/runs", 400, cursor=cursor)


def test_a_page_is_stable_while_items_are_added() -> None:
    items = [(number, str(number)) for number in range(10)]
    page = page_of(items, lambda one: one, limit=4, cursor=None)
    again = page_of([*items, (99, "new")], lambda one: one, limit=4, cursor=page.next)
    assert [*page.items, *again.items] == items[:1:-1]


@pytest.mark.parametrize(
    ("path", "parameters", "told"),
    [
        ("/runs", {"limit": 0}, "limit: input should be greater than or equal to 1"),
        ("/runs", {"limit": "many"}, "limit: input should be a valid integer"),
        ("/runs", {"since": "yesterday"}, "since 'yesterday': expected a duration like 30s"),
        ("/runs", {"colour": "red"}, "colour: unknown parameter"),
        ("/runs", {"label": "vision"}, "label: expected KEY=VALUE"),
        ("/runs/run-1", {"since": "1h"}, "since: unknown parameter"),
        ("/issues", {"severity": "bad"}, "severity: input should be 'info', 'warning' or"),
        ("/runs/run-1/series", {}, "expected one of: name, for a scalar; tensor"),
        ("/runs/run-1/matrix", {"rows": 1000, "steps": 1000}, "at most 20,000 cells"),
    ],
)
def test_a_wrong_request_is_told_what_was_expected(
    path: str, parameters: dict[str, object], told: str
) -> None:
    assert told in problem(path, 400, **parameters)


def test_a_parameter_is_given_once() -> None:
    answer = CLIENT.get(f"{ROOT}/runs?limit=1&limit=2")
    assert (answer.status_code, answer.json()["detail"]) == (400, "limit: expected once")


def test_numbers_of_a_run_that_has_none_are_not_found() -> None:
    assert "no run 'run-1': looked at a test" in problem("/runs/run-1/captured", 404)


def test_the_api_has_what_status_has_of_receivers_workers_and_targets(tmp_path: Path) -> None:
    attempt = {"at_ms": NOW_MS, "result": "503", "retry": True, "duration_ms": 20}
    waits = delivery(NAN, attempts=1, last_attempts=(attempt,), suspended_until_ms=NOW_MS + 30_000)
    refused = ConfigurationRefused(worker="rules@node-1", at_ms=NOW_MS, problems=("line 3",))
    runs = view_of_run("run-2").model_copy(
        update={"scheduler": SchedulerJob(kind="slurm", names={"job": "17", "restarts": "0"})}
    )
    file = tmp_path / "tocsin.yaml"
    file.write_text(
        f"version: 1\nbus: embedded:{tmp_path}/bus.db\ntargets: {{a: {{type: slurm}}}}\n"
        "policy: [{match: {}, may_stop_on: [a]}]\n"
    )
    policy = target_policy(read_context(file, None, environ={}))
    source = MadeSource(STOPPED, runs, NAN, waits, refused, policy=policy)
    client = TestClient(Starlette(routes=api_routes(source, now_ms=lambda: NOW_MS)))
    shown = json.loads(status_json(source.known, source.known.refused, policy=policy))

    def answer(name: str, path: str) -> Any:
        body = client.get(f"{ROOT}{path}").json()
        _same_keys(ANSWERS[name].model_validate(body).model_dump(mode="json"), body, name)
        return body

    target = answer("get_run", "/runs/run-2")["run"]["stop_target"]
    assert target["target"] == "a"
    assert {one["run_id"]: one.get("stop_target") for one in shown["runs"]} == {
        one["run_id"]: one.get("stop_target") for one in answer("list_runs", "/runs")["runs"]
    }
    found = answer("list_suspended_receivers", "/receivers/suspended")["suspended_receivers"]
    assert found == [{"receiver": "ml", **shown["suspended_receivers"]["ml"]}]
    found = answer("list_refused_configurations", "/configurations/refused")
    assert found["refused_configurations"] == shown["refused_configurations"]
    assert found["refused_configurations"][0]["worker"] == "rules@node-1"


def test_the_api_only_reads() -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answer = CLIENT.request(method, f"{ROOT}/runs")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        assert answer.headers["content-type"] == MEDIA_TYPE
    assert "there is no such path" in problem("/nothing", 404)


def test_a_bus_that_is_away_is_no_crash() -> None:
    class Away(MadeSource):
        async def view(self, run_id: str | None = None) -> RunsView:
            raise BusUnavailable("kafka-1:9092 does not answer")

    client = TestClient(Starlette(routes=api_routes(Away())))
    answer = client.get(f"{ROOT}/runs")
    assert (answer.status_code, answer.json()["title"]) == (503, "the bus does not answer")
    assert answer.headers["cache-control"] == "no-store"


def test_the_description_is_a_valid_one_of_all_that_there_is() -> None:
    document = openapi()
    validate(document)
    assert CLIENT.get(f"{ROOT}/openapi.json").json() == document
    assert set(document["paths"]) == {operation.path for operation in OPERATIONS}
    for name, schema in document["components"]["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            assert about.get("description"), f"{name}.{field} has no meaning"
    for operation in OPERATIONS:
        for one in parameters_of(operation):
            assert one["description"], f"{operation.name} {one['name']}"
        assert ("{" in operation.path) == bool(operation.about)
    assert {one.about for one in OPERATIONS} == {"", *PATH_PARAMETERS}


def test_problems_have_their_own_words() -> None:
    error = ProblemError("unknown", "a\x1b[2J\nb" + "x" * 5_000)
    assert len(error.problem.detail) == 1_000
    assert "\x1b" not in error.problem.detail
