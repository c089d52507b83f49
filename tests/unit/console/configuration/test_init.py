"""The file that `tocsin init` writes: valid as it is and with its examples, complete, current."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from support.docs.config_examples import EXAMPLE, uncomment
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.actions.targets.registry import TargetKinds
from tocsin.console.configuration.editor_schema import editor_schema
from tocsin.console.configuration.field_texts import field_texts
from tocsin.console.configuration.init import (
    config_text,
    first_text,
    write_config,
)
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.configuration.file_schema import config_model
from tocsin.schemas.configuration.problems import PlacedProblem
from tocsin.schemas.configuration.sections import RuleEntry, StopOptions
from tocsin.schemas.configuration.yaml_document import load
from tocsin.schemas.errors import ConfigurationError
from tocsin.stream_rules.catalogue import built_in

TEXT = config_text()
LINES = TEXT.splitlines(keepends=True)

MODELS = ReceiverKinds().models()
TARGETS = TargetKinds().models()

NAMES = {"unknown_receiver", "unknown_target", "unknown_secret", "unknown_time_window"}


def example_blocks() -> list[range]:
    """The lines of each example: neighbours that are not prose."""
    blocks: list[range] = []
    for number, line in enumerate(LINES):
        if not EXAMPLE.match(line):
            continue
        if blocks and blocks[-1].stop == number:
            blocks[-1] = range(blocks[-1].start, number + 1)
        else:
            blocks.append(range(number, number + 1))
    return blocks


BLOCKS = example_blocks()
FULL = uncomment(TEXT)


def with_examples(blocks: list[range]) -> str:
    used = {number for block in blocks for number in block}
    return "".join(
        EXAMPLE.sub(r"\1", line) if number in used else line for number, line in enumerate(LINES)
    )


def problems(text: str) -> list[PlacedProblem]:
    return check_config(text, "tocsin.yaml", section_registry())[1]


@pytest.mark.parametrize("text", [TEXT, first_text()], ids=["full", "first"])
def test_as_written_it_is_valid_and_changes_nothing(text: str) -> None:
    config, found = check_config(text, "tocsin.yaml", section_registry())

    assert found == []
    assert config == Config()


@pytest.mark.parametrize("count", range(1, len(BLOCKS) + 1))
def test_each_example_works_with_those_above_it(count: int) -> None:
    assert problems(with_examples(BLOCKS[:count])) == []


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_alone_lacks_at_most_a_name_from_above(number: int) -> None:
    found = problems(with_examples([BLOCKS[number]]))

    assert {problem.code for problem in found} <= NAMES


@pytest.mark.parametrize("text", [FULL, uncomment(first_text())], ids=["full", "first"])
def test_all_examples_work_together(text: str) -> None:
    assert problems(text) == []
    assert EXAMPLE.search(text) is None


def test_the_first_file_is_short() -> None:
    assert len(first_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "text",
    [TEXT, FULL, first_text(), uncomment(first_text())],
    ids=["as written", "all examples", "first", "all first examples"],
)
def test_an_editor_finds_nothing_wrong_with_it(text: str) -> None:
    data: Any = load(text, source="tocsin.yaml").data

    jsonschema.Draft202012Validator(editor_schema(built_in(), MODELS, TARGETS)).validate(data)


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """All keys of a model and of those inside it."""
    for field in field_texts(model):
        yield field.key
        for part in field.parts:
            if part is not RuleEntry:
                yield from keys_of(part)


def keys_in(data: object) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from keys_in(value)
    elif isinstance(data, list):
        for item in data:
            yield from keys_in(item)


def test_every_key_has_an_example() -> None:
    entry = {"name", "use", "match", "params", "severity", "actions"}
    wanted = {*keys_of(config_model(MODELS, TARGETS)), *keys_of(StopOptions), *entry}

    missing = wanted - set(keys_in(load(FULL, source="").data))

    assert not missing, "add an example to configuration/templates/full.yaml"


def test_every_kind_of_receiver_and_of_target_has_an_example() -> None:
    config, _ = check_config(FULL, "", section_registry())
    assert config is not None

    assert {type(one) for one in config.receivers.values()} == set(MODELS), "add an example to init"
    assert {type(one) for one in config.targets.values()} == set(TARGETS), "add an example to init"


def test_every_rule_has_its_parameters_at_their_defaults() -> None:
    config, _ = check_config(FULL, "", section_registry())
    assert config is not None
    listed = {entry.name: entry for entry in config.rules}

    for rule in built_in():
        entry = listed[rule.meta.name]
        assert set(entry.params) == set(rule.meta.params.model_fields)
        assert rule.meta.params.model_validate(dict(entry.params)) == rule.meta.params()


def test_the_values_of_the_sections_are_the_defaults_where_there_are_any() -> None:
    data: Any = load(FULL, source="").data

    defaults = {"rules": "all", "mode": "enforce", "send_resolved": True}
    defaults |= {"group_by": ["run", "rule"], "group_wait": "0s"}
    assert data["defaults"] == {**defaults, "repeat_interval": "4h"}
    assert data["bus"]["prefix"] == Config().bus.prefix


def test_no_line_is_too_long_and_none_ends_in_a_space() -> None:
    for text in (TEXT, first_text()):
        assert max(map(len, text.splitlines())) <= 100
        assert not re.search(r" $", text, re.MULTILINE)


def test_it_is_written_once_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "tocsin.yaml"
    write_config(path)
    assert path.read_text() == first_text()
    path.unlink()
    write_config(path, full=True)
    assert path.read_text() == TEXT
    path.write_text("mine")

    with pytest.raises(ConfigurationError, match=r"tocsin\.yaml already exists.*tocsin-new"):
        write_config(path)

    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write .*No such file"):
        write_config(tmp_path / "nowhere" / "tocsin.yaml")


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tocsin.yaml").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigurationError, match="already"):
        write_config(tmp_path / "tocsin.yaml")

    assert not (tmp_path / "elsewhere").exists()
