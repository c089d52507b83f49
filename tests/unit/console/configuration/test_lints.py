"""Warnings about stop targets: nobody may use one, or it gives a job less time than the stop."""

from __future__ import annotations

from pathlib import Path

from tocsin.console.configuration.check import check_file

CONFIG = """version: 1
targets:
  ours: {type: batch}
  theirs: {type: sagemaker}
policy:
  - {match: {team: vision}, may_stop_on: [ours]}
rules:
  - nonfinite: [{stop: {grace: 60s}}]
  - loss_diverged: [{stop: {grace: 30s}}]
  - exploding_gradient: [stop]
"""


def test_a_target_that_nobody_may_use_and_a_grace_that_it_does_not_give(tmp_path: Path) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text(CONFIG)
    checked = check_file(file, {}, tmp_path)
    assert list(checked.problems) == []
    assert [(one.line, one.column, one.code) for one in checked.warnings] == [
        (4, 3, "unused_target"),
        (8, 25, "grace_of_target"),
    ]
    assert checked.warnings[1].message == "a grace of 1m, but target 'ours' gives only 30s"
    assert checked.effective is not None
    assert checked.effective.targets == {"ours": "batch", "theirs": "sagemaker"}
    assert checked.effective.policy == ["team=vision: ours"]
