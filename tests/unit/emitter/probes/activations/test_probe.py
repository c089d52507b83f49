"""Activations as the collections want them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from torch import nn

from tocsin.emitter.plan.collections import DEFAULT_PLANS, NEVER, AnyOf, CollectionPlan
from tocsin.emitter.probes.activations.module_kinds import Kind, scan
from tocsin.emitter.probes.activations.probe import SelectedActivations
from tocsin.emitter.statistics.tables import Table

EVERY = DEFAULT_PLANS["activations"]
LINEAR = CollectionPlan("mine", "activations", NEVER, columns=("max",), module_types=("Linear",))
NAMED = CollectionPlan("named", "activations", NEVER, match=(re.compile("1$"),))


class Said:
    ready = True

    def tables(self) -> Iterator[Table]:
        counts = np.ones((3, 1), np.uint64)
        values = np.arange(6, dtype=np.float32).reshape(3, 2)
        names = ("0", "1", "1#2")
        yield Table("activations", names, values, counts, ("mean", "max"), ("numel",))
        yield Table("attention", ("2",), values[:1], counts[:1], ("a", "b"), ("numel",))


def test_each_collection_has_its_modules_and_columns() -> None:
    types = {"0": "Linear", "1": "ReLU"}
    chosen = SelectedActivations(Said(), (EVERY, LINEAR, NAMED), types, frozenset({"0"}))

    assert chosen.ready
    tables = {table.collection: table for table in chosen.tables()}
    assert list(tables) == ["activations", "mine", "named", "attention"]
    assert tables["activations"].names == ("1", "1#2")
    assert tables["mine"].names == ("0",)
    assert (tables["mine"].columns, tables["mine"].values.tolist()) == (("max",), [[1.0]])
    assert tables["named"].names == ("1", "1#2")
    alone = SelectedActivations(Said(), (NAMED,), types)
    assert [table.collection for table in alone.tables()] == ["named"]


def test_what_a_collection_picks_is_looked_at_beside_the_usual_types() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 1))

    def kinds(*plans: CollectionPlan) -> dict[str, Kind]:
        return {known.name: known.kind for known in scan(model, AnyOf(plans)).known.values()}

    assert kinds(EVERY) == {"1": Kind.RELU}
    assert kinds(EVERY, LINEAR) == {"0": Kind.PLAIN, "1": Kind.RELU, "3": Kind.PLAIN}
    assert kinds(NAMED) == {"1": Kind.RELU}
