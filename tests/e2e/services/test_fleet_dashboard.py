"""Grafana's dashboard in `deploy/`: what its script writes, and what Grafana's schemas know.

The schemas are those of grafana-foundation-sdk, which Grafana Labs generates from Grafana itself.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema
from grafana_foundation_sdk.models import prometheus, timeseries

import fleet_dashboard

GRAFANA = Path(__file__).parents[3] / "deploy" / "monitoring" / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "tocsin.json"
PANELS = {one.identifier: one for one in (timeseries.variant_config(),)}
QUERIES = {one.identifier: one for one in (prometheus.variant_config(),)}
"""What the dashboard uses; without them, the package leaves options and queries undecoded."""


def read() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return made


def sources() -> list[dict[str, str]]:
    """The data sources that are provisioned, as a panel refers to them."""
    made = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    return [{"type": one["type"], "uid": one["uid"]} for one in made["datasources"]]


def problems(facts: dict[str, Any]) -> list[str]:
    """What Grafana would not understand of a dashboard, each with its place."""
    for panel in PANELS.values():
        runtime.register_panelcfg_variant(panel)
    for query in QUERIES.values():
        runtime.register_dataquery_variant(query)
    found = [
        f"{panel['title']}: no schema of panel type {panel['type']!r}"
        for panel in facts["panels"]
        if panel["type"] not in PANELS
    ]
    for panel in facts["panels"]:
        for one in (panel, *panel["targets"]):
            if one["datasource"] not in sources():
                found.append(f"{panel['title']}: data source {one['datasource']} is not there")
    decoded = schema.Dashboard.from_json(facts)
    found += lost(facts, json.loads(json.dumps(decoded, cls=JSONEncoder)), "")
    return [*found, *mistyped(decoded, object, "")]


def lost(given: object, encoded: object, where: str) -> Iterator[str]:
    """What is not in the schema is not encoded again. Defaults that are added count as nothing."""
    if isinstance(given, dict) and isinstance(encoded, dict):
        for key, value in given.items():
            if key in encoded:
                yield from lost(value, encoded[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"
    elif isinstance(given, list) and isinstance(encoded, list) and len(given) == len(encoded):
        for number, (one, other) in enumerate(zip(given, encoded, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif given != encoded:
        yield f"{where} is {given!r}, and {encoded!r} once it was read"


def mistyped(value: Any, hint: Any, where: str) -> Iterator[str]:
    """Values that are not of the annotated types, which the package itself does not check."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next((one for one in typing.get_args(hint) if fits(value, one)), hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) or not fits(value, hint):
        yield f"{where} is {value!r}, not {hint}"
    elif isinstance(value, list):
        (of,) = typing.get_args(hint) or (object,)
        for number, one in enumerate(value):
            yield from mistyped(one, of, f"{where}[{number}]")
    elif isinstance(value, dict):
        _, of = typing.get_args(hint) or (str, object)
        for key, one in value.items():
            yield from mistyped(one, of, f"{where}.{key}")
    elif hasattr(value, "to_json"):
        for name, of in typing.get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), of, f"{where}.{name}")


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type that is no union, its parts left out."""
    if hint in (object, Any):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is float:
        return type(value) in (int, float)
    if kind in (int, bool, str):
        return type(value) is kind
    if issubclass(kind, enum.Enum):  # enumerations stay what the JSON has
        return value in [one.value for one in kind]
    return isinstance(value, kind)


def test_the_dashboard_is_what_its_script_writes() -> None:
    script = fleet_dashboard.__file__
    assert DASHBOARD.read_text() == fleet_dashboard.dashboard(), f"python {script} {DASHBOARD}"


def test_no_panel_lies_on_another() -> None:
    facts = read()
    assert {"uid", "title", "schemaVersion", "panels", "time"} <= facts.keys()
    assert len({panel["id"] for panel in facts["panels"]}) == len(facts["panels"]) >= 12
    places = set()
    for panel in facts["panels"]:
        grid = panel["gridPos"]
        assert 0 <= grid["x"] <= 24 - grid["w"]
        places.add((grid["x"], grid["y"]))
    assert len(places) == len(facts["panels"])


def test_grafana_knows_each_field_of_the_dashboard() -> None:
    assert problems(read()) == []


def renamed(part: Any, old: str, new: str) -> None:
    part[new] = part.pop(old)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda facts: renamed(facts, "refresh", "refesh"), ".refesh is unknown"),
        (lambda facts: facts["panels"][3].update(titel="Records"), "[3].titel is unknown"),
        (
            lambda facts: renamed(facts["panels"][0]["targets"][0], "legendFormat", "legend"),
            "targets[0].legend is unknown",
        ),
        (
            lambda facts: facts["panels"][0]["options"].update(legends={}),
            "options.legends is unknown",
        ),
        (
            lambda facts: facts["panels"][0]["fieldConfig"]["defaults"].update(
                custom={"lineWidht": 2}
            ),
            "custom.lineWidht is unknown",
        ),
        (lambda facts: facts.update(schemaVersion="39"), ".schema_version is '39'"),
        (lambda facts: facts.update(editable="false"), ".editable is 'false'"),
        (lambda facts: facts["panels"][1]["gridPos"].update(x="0"), "grid_pos.x is '0'"),
        (
            lambda facts: facts["panels"][1]["fieldConfig"]["defaults"].update(min="0"),
            "defaults.min_val is '0'",
        ),
        (
            lambda facts: facts["panels"][1]["options"]["legend"].update(placement="below"),
            "legend.placement is 'below'",
        ),
        (lambda facts: facts["panels"][2].update(type="timeserie"), "no schema of panel type"),
        (
            lambda facts: facts["panels"][2]["targets"][0]["datasource"].update(uid="loki"),
            "'uid': 'loki'} is not there",
        ),
    ],
)
def test_a_dashboard_that_grafana_would_not_understand_is_refused(
    change: Callable[[dict[str, Any]], None], shown: str
) -> None:
    facts = read()
    change(facts)
    assert shown in " ".join(problems(facts))
