"""A run sent to a real MLflow server, and read back by its REST API."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.exported_run import HOSTILE, fill_bus
from support.servers.real_mlflow import real_mlflow
from tocsin.store import Run, open_run
from tocsin.store.export.mlflow import MlflowRefused, MlflowServer, export_mlflow

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with real_mlflow(tmp_path_factory.mktemp("mlflow")) as address:
        yield MlflowServer(address, {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("bus") / "bus.db"
    fill_bus(path)
    return open_run("run-1", bus=path)


def history(server: MlflowServer, run: str, key: str) -> list[tuple[int, float]]:
    """The points of a metric, by step."""
    found = server.call("GET", "metrics/get-history", {"run_id": run, "metric_key": key})
    points = found.get("metrics", [])
    assert isinstance(points, list)
    return sorted((int(one.get("step", 0)), float(one["value"])) for one in points)


def test_scalars_issues_and_the_state_arrive_once(
    server: MlflowServer, run: Run, tmp_path: Path
) -> None:
    first = export_mlflow(run, server, "trainings")
    second = export_mlflow(run, server, "trainings")

    assert (first.again, second.again) == (False, True)
    assert first.run == second.run
    loss = history(server, first.run, "loss")
    assert [step for step, _ in loss] == [0, 1, 2, 3, 4, 5]
    assert loss[1] == (1, 0.5)
    assert math.isnan(loss[3][1])
    assert history(server, first.run, "eval/loss") == [(5, 9.0)]
    assert len(history(server, first.run, "rank-1/loss")) == 6
    assert history(server, first.run, "tocsin/issues/nonfinite") == [(3, 1.0)]
    found = server.call("GET", "runs/get", {"run_id": first.run})["run"]
    assert isinstance(found, dict)
    info, data = found["info"], found["data"]
    assert (info["status"], info["run_name"]) == ("FAILED", "run-1")
    assert (info["start_time"], info["end_time"]) == (1_800_000_000_000, 1_800_000_060_000)
    tags = {one["key"]: one["value"] for one in data["tags"]}
    assert tags["tocsin.label.team"] == "vision"
    assert tags["tocsin.issues"] == "1"
    assert any(value.startswith("critical nonfinite, firing: a [link]") for value in tags.values())
    names = {one["key"] for one in data["metrics"]}
    assert any(name.startswith("log.a/b") for name in names), HOSTILE


def test_what_the_server_refuses_is_told(server: MlflowServer) -> None:
    with pytest.raises(MlflowRefused, match=r"answers 404 to runs/get: .*RESOURCE_DOES_NOT_EXIST"):
        server.call("GET", "runs/get", {"run_id": "nothing"})
