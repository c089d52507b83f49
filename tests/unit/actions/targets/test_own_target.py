"""A target from outside: the package that the page about stop targets shows, with its scheduler."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.actions.target_jobs import target_job
from support.records.issues import NOW_MS, delivery, issue, runs_view
from tocsin.actions.receivers.address_guard import AddressGuard
from tocsin.actions.targets.kind import JobSeen, StopAsked, TargetContext
from tocsin.actions.targets.registry import GROUP, TargetKinds
from tocsin.console.configuration.check import check_file
from tocsin.console.views.stop_history import backend_lines
from tocsin.console.views.why import story_lines, story_of
from tocsin.emitter.process.scheduler import scheduler_of
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.records.deliveries import BackendStop
from tocsin.schemas.records.runs import SchedulerJob

DOCS = Path(__file__).parents[4] / "docs" / "how-to" / "stop-targets.md"
LABCTL = """#!{python}
import pathlib, sys
file = pathlib.Path({file!r})
state, start = file.read_text().split()
if sys.argv[1] == "show" and sys.argv[2] == "17":
    print(state, start)
elif sys.argv[1:] == ["end", "17", start]:
    file.write_text("gone " + start)
else:
    sys.exit(1)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of job 17 of a lab, whose package is installed."""
    shown = dict(re.findall(r"^```(python|toml)\n(.*?)^```$", DOCS.read_text(), re.M | re.S))
    site = tmp_path / "site"
    package, metadata = site / "tocsin_lab", site / "tocsin_lab-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    (package / "target.py").write_text(shown["python"])
    points = shown["toml"].replace('project.entry-points."tocsin.stop_targets"', GROUP)
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tocsin-lab\nVersion: 1\n")
    monkeypatch.syspath_prepend(site)
    state, program = tmp_path / "job-17", tmp_path / "labctl"
    state.write_text("running 2")
    program.write_text(LABCTL.format(python=sys.executable, file=str(state)))
    program.chmod(0o700)
    return state


def config_text(folder: Path) -> str:
    return f"""version: 1
targets:
  lab-1: {{type: lab, program: {folder / "labctl"}}}
policy:
  - {{match: {{}}, may_stop_on: [lab-1]}}
"""


def test_check_reads_a_target_from_outside(lab: Path) -> None:
    file = lab.parent / "tocsin.yaml"
    file.write_text(config_text(lab.parent))
    checked = check_file(file, {}, lab.parent)
    assert (list(checked.problems), list(checked.warnings)) == ([], [])
    assert checked.effective is not None
    assert checked.effective.targets == {"lab-1": "lab"}
    assert checked.effective.policy == ["every run: lab-1"]


async def test_it_ends_the_start_of_the_job_that_the_run_recorded_and_no_other(lab: Path) -> None:
    from tocsin.schemas.configuration.file import SectionRegistry

    kinds = TargetKinds()
    config, problems = check_config(config_text(lab.parent), "f", SectionRegistry(targets=kinds))
    assert config is not None, problems
    kind = kinds.kind_of(config.targets["lab-1"])
    context = TargetContext(
        secrets={}, guard=AddressGuard(private=False), folder=lab.parent, environ={}
    )
    target = kind.target("lab-1", config.targets["lab-1"], context)
    scheduler = scheduler_of({"TOCSIN_SCHEDULER": "lab:job=17,start=2"})
    assert scheduler is not None
    assert kind.can_end(config.targets["lab-1"], scheduler)
    job = target_job("lab", dict(scheduler.names))
    earlier = target_job("lab", {"job": "17", "start": "1"})
    unknown = target_job("lab", {"job": "18", "start": "2"})

    assert await target.inspect(earlier) == JobSeen("replaced", "start 2")
    assert (await target.stop(earlier)).result == "failed"
    assert (await target.inspect(unknown)).state == "unknown"
    assert await target.inspect(job) == JobSeen("running", "running")
    assert await target.stop(job) == StopAsked("accepted", "labctl has accepted it")
    assert await target.inspect(job) == JobSeen("ended", "gone")
    await target.close()


def test_why_and_status_show_which_job_a_backend_is_to_end() -> None:
    backend = BackendStop(
        target="lab-1",
        job=SchedulerJob(kind="lab", names={"job": "17", "start": "2"}),
        permitted_by="policy (tocsin.yaml:5:32)",
        begun_ms=NOW_MS,
    )
    asked = "the backend was asked to end the job; waits for its end: lab-1: accepted"
    stop = delivery(issue(), "stop", backend=backend, reason=asked, attempts=2)
    view = runs_view(issue(), stop)
    text = "\n".join(line.plain for line in story_lines(story_of(view, {}, issue())))
    assert asked in text
    assert "lab-1 is to end the job of lab (job 17, start 2)" in text
    assert "permitted by policy (tocsin.yaml:5:32)" in text
    assert list(backend_lines(view.deliveries)) == [f"stop of run-1: {asked}"]
    over = stop.model_copy(update={"state": "delivered"})
    assert list(backend_lines([over])) == []
