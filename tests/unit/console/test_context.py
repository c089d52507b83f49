"""What a command is told, put together."""

from __future__ import annotations

from pathlib import Path

from tocsin.console.context import read_context


def test_the_aliases_of_rules_are_read_as_the_rules_own_names(tmp_path: Path) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text(
        "version: 1\n"
        "rules:\n"
        "  - ExplodingTensor: [stop]\n"
        "  - {name: slow, use: LossNotDecreasing, actions: []}\n"
    )
    context = read_context(file, None, environ={})
    assert [(rule.name, rule.use) for rule in context.config.rules] == [
        ("nonfinite", "nonfinite"),
        ("slow", "loss_not_decreasing"),
    ]


def test_the_flag_beats_the_environment_and_the_environment_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tocsin.yaml"
    file.write_text("version: 1\nbus: embedded:file.db\n")
    urls = [
        read_context(file, flag, environ=environ).settings.bus.url
        for flag, environ in (
            (None, {}),
            (None, {"TOCSIN_BUS": "embedded:environment.db"}),
            ("embedded:flag.db", {"TOCSIN_BUS": "embedded:environment.db"}),
        )
    ]
    assert urls == ["embedded:file.db", "embedded:environment.db", "embedded:flag.db"]
