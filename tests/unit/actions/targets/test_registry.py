"""The kinds of stop targets that tocsin has."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from tocsin.actions.targets.kind import TargetKind
from tocsin.actions.targets.registry import BUILT_IN, GROUP, TargetKinds
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.docstrings import field_docstrings
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.targets import TargetConfig


def test_each_kind_is_called_as_its_type_and_shows_its_keys() -> None:
    kinds = TargetKinds(installed=list)
    assert kinds.names() == list(BUILT_IN)
    for name, kind in zip(kinds.names(), kinds.built_in(), strict=True):
        assert isinstance(kind, TargetKind)
        model = kinds.model(name)
        assert model is not None
        assert issubclass(model, TargetConfig)
        assert model.model_fields["type"].examples == [name]
        assert set(field_docstrings(model)) >= set(model.model_fields)
        assert (model.__doc__ or "").strip()


def test_a_package_that_cannot_be_loaded_is_named_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = [EntryPoint("farm", "nowhere.at_all:Farm", GROUP)]
    monkeypatch.setattr("tocsin.actions.kinds.entry_points", lambda group: offered)
    text = "version: 1\ntargets:\n  a: {type: farm}\n  b: {type: frm}\n"
    _, problems = check_config(text, "f", section_registry())
    assert [(one.line, one.column, one.code, one.hint) for one in problems] == [
        (3, 13, "target_not_loaded", None),
        (4, 13, "invalid_value", "farm"),
    ]
    assert "the stop target kind 'farm' of nowhere.at_all:Farm" in problems[0].message
