"""How a watched training ends, and what its end is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.trainings.captured import captured, run_with_hook, said
from tocsin.emitter.run import Run
from tocsin.emitter.send.sender import Sender
from tocsin.emitter.stop import exit_points
from tocsin.emitter.training.context import current
from tocsin.schemas.records.runs import RunEnded, RunStarted


def test_no_stop_is_heard_any_more_when_the_sender_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    close = Sender.close

    def noted(self: Sender, timeout_s: float = 5.0) -> bool:
        heard.append(exit_points._rank is not None)
        return close(self, timeout_s)

    monkeypatch.setattr(Sender, "close", noted)
    with captured(tmp_path):
        session = current.session
        assert session is not None
        session.start()
        session.announce({})
        assert exit_points._rank is not None
    assert heard == [False]


FORKS = """
import os
from tocsin.emitter import start
run = start("r1", services=False)
run.log({"loss": 1.0})
child = os.fork()
if child == 0:
    own = start(services=False)
    own.log({"loss": 2.0})
    own.finish()
    os._exit(0 if own is not run else 1)
_, status = os.waitpid(child, 0)
run.finish()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


def test_start_in_a_forked_child_is_a_training_of_its_own(tmp_path: Path) -> None:
    done = run_with_hook(tmp_path, FORKS, PYTHONPATH="", TOCSIN_RUN_ID="", TOCSIN_JOB_ID="")
    assert (done.returncode, done.stderr) == (0, "")
    found = said(tmp_path)
    assert sorted(row["loss"] for _, _, row in found.rows) == [1.0, 2.0]
    assert len({each.incarnation for each in found.of(RunStarted)}) == 2


@pytest.mark.parametrize("by_hand", [False, True], ids=["without autograd", "own optimizer"])
def test_a_loop_that_logs_is_a_training_though_torch_is_there(
    tmp_path: Path, *, by_hand: bool
) -> None:
    with captured(tmp_path):
        assert current.session is not None
        run = Run(current.session)
        w = torch.ones(3, requires_grad=True)
        for _ in range(600):
            loss = (w * w).sum()
            if by_hand:
                loss.backward()
                with torch.no_grad():
                    w -= 0.01 * w.grad
                w.grad = None
            run.log({"loss": loss.item()})
        training = current.session.training
        assert training is not None
        assert training.next_step == 600
    found = said(tmp_path)
    assert found.steps().keys() == set(range(600))


def test_what_is_logged_during_a_long_accumulation_waits_for_its_step(tmp_path: Path) -> None:
    with captured(tmp_path):
        assert current.session is not None
        run = Run(current.session)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for i in range(200):
                model(torch.ones(1, 2)).sum().backward()
                run.log({"part": float(i)})
            assert (current.session.training is None) == (step == 0)
            optimizer.step()
            optimizer.zero_grad()
        assert current.session.training is not None
        assert current.session.training.next_step == 2


def test_calls_beyond_those_kept_before_the_first_step_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tocsin.emitter.training.session.MAX_EARLY", 5)
    with captured(tmp_path):
        assert current.session is not None
        run = Run(current.session)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            run.log({"part": 1.0})
        assert capsys.readouterr().err == ""
        for _ in range(3):
            run.log({"part": 1.0})
        assert capsys.readouterr().err.count("more than 5 calls of run.log and others") == 1
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert capsys.readouterr().err == (
            "tocsin: calls of run.log and others that were not kept: 3, behind the first 5 before "
            "the first step\n"
        )


@pytest.mark.parametrize(
    ("end", "code", "outcome"),
    [
        ("sys.exit(3)", 3, "failed"),
        pytest.param("exit(3)", 3, "failed", marks=pytest.mark.torture),
        ("quit()", 0, "completed"),
        pytest.param("with run: raise SystemExit(3)", 3, "failed", marks=pytest.mark.torture),
        ("with run: sys.exit(0)", 0, "completed"),
        ("try: sys.exit(3)\nexcept SystemExit: run.log({'loss': 1.0})", 0, "completed"),
    ],
)
def test_an_exit_is_told_as_what_it_is(tmp_path: Path, end: str, code: int, outcome: str) -> None:
    script = f"""
import sys
from tocsin.emitter import start
run = start("r1", services=False)
run.log({{"loss": 1.0}})
{end}
"""
    done = run_with_hook(tmp_path, script, PYTHONPATH="", TOCSIN_RUN_ID="", TOCSIN_JOB_ID="")
    assert (done.returncode, done.stderr) == (code, "")
    assert [each.outcome for each in said(tmp_path).of(RunEnded)] == [outcome]
