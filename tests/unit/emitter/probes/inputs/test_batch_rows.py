"""The tensors of a batch as rows."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from tocsin.emitter.plan.collections import DEFAULT_PLANS, NEVER, CollectionPlan
from tocsin.emitter.probes.inputs.batch_rows import MAX_TENSORS, read_inputs, tensors_of


class Pair(NamedTuple):
    image: torch.Tensor
    label: object


def names_of(batch: object) -> list[str]:
    return [name for name, _ in tensors_of(batch)]


def test_a_tensor_is_named_by_its_place() -> None:
    one = torch.ones(2)
    assert names_of(one) == ["batch"]
    assert names_of((one, {"label": one, "path": "a.png"})) == ["0", "1.label"]
    assert names_of({"image": [one, one]}) == ["image.0", "image.1"]
    assert names_of(Pair(one, 3)) == ["image"]
    assert names_of("text") == names_of(None) == names_of([1.5]) == []


def test_what_has_no_end_is_cut() -> None:
    around: list[object] = [torch.ones(1)]
    around.append(around)
    assert len(names_of(around)) == 4
    assert len(names_of([torch.ones(1)] * 1000)) == MAX_TENSORS


def test_the_rows_of_each_collection() -> None:
    mine = CollectionPlan(
        "mine", "inputs", NEVER, match=(re.compile("image"),), columns=("mean", "max")
    )
    batch = {"image": torch.tensor([1.0, 3.0]), "label": torch.tensor([4, 0]), "text": ["a", "b"]}

    rows = read_inputs(batch, (DEFAULT_PLANS["inputs"], mine))

    assert rows is not None
    assert rows.ready
    every, some = rows.tables()
    assert (every.collection, every.names) == ("inputs", ("image", "label"))
    assert every.values[:, every.columns.index("mean")].tolist() == [2.0, 2.0]
    assert every.counts[:, every.count_columns.index("zeros")].tolist() == [0, 1]
    assert (some.collection, some.names) == ("mine", ("image",))
    assert some.values.tolist() == [[3.0, 2.0]]


def test_a_batch_without_numbers_has_no_rows() -> None:
    assert read_inputs(["text"], (DEFAULT_PLANS["inputs"],)) is None
    assert read_inputs(torch.empty(3, device="meta"), (DEFAULT_PLANS["inputs"],)) is None
