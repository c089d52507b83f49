"""Which stop target would be asked, by which line: in `explain`, `status --json` and `drill`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.records.issues import runs_view
from tocsin.actions.targets.slurm.kind import Slurm
from tocsin.console.__main__ import app
from tocsin.console.configuration.explanation import explain, sample_issue
from tocsin.console.context import CommandContext, read_context
from tocsin.console.services.launch import RunOptions, launch_options
from tocsin.console.views.status import status_json
from tocsin.console.views.stop_targets import policy_of
from tocsin.schemas.errors import MissingExtra
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.records.runs import SchedulerJob

CONFIG = """\
version: 1
bus: embedded:{folder}/bus.db
targets:
  slurm-a: {{type: slurm}}
  spare: {{type: slurm}}
  aws: {{type: batch, region: eu-central-1}}
policy:
  - {{match: {{team: vision}}, may_stop_on: [aws, slurm-a]}}
  - {{match: {{run: "sweep-*"}}, may_stop_on: [spare]}}
"""


def context(folder: Path, more: str = "") -> CommandContext:
    file = folder / "tocsin.yaml"
    file.write_text(CONFIG.format(folder=folder) + more)
    return read_context(file, None, environ={})


def steps(folder: Path, more: str = "", **labels: str) -> list[tuple[str, str]]:
    given = context(folder, more)
    issue = sample_issue(given.config, "nonfinite", None, labels, 0)
    found = explain(given.config, issue, path=given.loaded.path, now_ms=0)
    return [(one.decision, one.decided_by) for one in found if one.stage == "target"]


def test_explain_shows_who_may_end_the_job(tmp_path: Path) -> None:
    (first, line), (second, _) = steps(tmp_path, team="vision")
    assert first == "if its launcher does not end it: aws (batch)"
    assert line == "policy (tocsin.yaml:8:43)"
    assert second == "if its launcher does not end it: slurm-a (slurm)"
    assert [one for one, _ in steps(tmp_path, team="vision", run="sweep-1")] == [
        first,
        second,
        "if its launcher does not end it: spare (slurm)",
    ]
    ((nobody, _),) = steps(tmp_path, team="language")
    assert nobody.endswith("nobody is asked: no entry of the policy matches this run")


def test_explain_shows_none_where_no_stop_is_sent(tmp_path: Path) -> None:
    assert steps(tmp_path, "defaults: {mode: shadow}\n", team="vision") == []


def test_status_shows_the_target_of_each_run_that_runs(tmp_path: Path) -> None:
    def run(name: str, job: SchedulerJob | None = None, **more: object) -> RunView:
        return RunView.model_validate(
            {"run_id": name, "incarnation": "i", "scheduler": job, "state": "running", **more}
        )

    job = SchedulerJob(kind="slurm", names={"job": "17", "restarts": "0"})
    view = runs_view(
        run("a", job, labels={"team": "vision"}), run("b", job), run("c"), run("d", state="ended")
    )
    policy = policy_of(context(tmp_path))
    found = {one["run_id"]: one for one in json.loads(status_json(view, policy=policy))["runs"]}
    assert found["a"]["stop_target"]["target"] == "slurm-a"
    assert "tocsin.yaml:8:48" in found["a"]["stop_target"]["why"]
    assert found["b"]["stop_target"]["target"] is None
    assert "to permit it" in found["b"]["stop_target"]["why"]
    assert "no job" in found["c"]["stop_target"]["why"]
    assert "stop_target" not in found["d"]


def missing(self: Slurm) -> None:
    raise MissingExtra("actions", "a target of the type slurm")


def test_a_drill_names_a_target_that_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context(tmp_path)
    command = ["drill", "--config", str(tmp_path / "tocsin.yaml")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("target slurm-a  slurm  can be asked, for runs with team=vision (")
    monkeypatch.setattr(Slurm, "check_installed", missing)
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 1
    found = {one["name"]: one for one in json.loads(done.output)["targets"]}
    assert "needs the extra 'actions'" in found["slurm-a"]["problem"]
    assert found["aws"]["problem"] == ""


def test_a_run_does_not_start_if_a_target_lacks_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context(tmp_path)
    monkeypatch.setattr(Slurm, "check_installed", missing)
    given = RunOptions(config=tmp_path / "tocsin.yaml")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with pytest.raises(MissingExtra, match="a target of the type slurm"):
        launch_options(["true"], given, environ)
