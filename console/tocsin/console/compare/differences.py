"""Where two runs differ first: configuration, data, initialisation, loss, gradients, outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from tocsin.console.charts import value_text
from tocsin.console.report.numbers import RunNumbers
from tocsin.schemas.records.program_facts import LayerInputsSeen, LossInputsSeen, TrainingPlanned
from tocsin.schemas.records.runs import DataLoaderSeen, RunStarted
from tocsin.schemas.text import number_text, plain_line
from tocsin.store import Matrix

Kind = Literal["configuration", "data", "initialisation", "loss", "gradients", "outcome"]
KINDS: Final[tuple[Kind, ...]] = (
    "configuration", "data", "initialisation", "loss", "gradients", "outcome",
)  # fmt: skip

RTOL: Final = 1e-3
"""Numbers of the same step differ where they are further apart than this share of the larger one:
kernels add in another order, so equal programs differ in the last digits."""

_WEIGHTS_RTOL: Final = 1e-2
_SHORT: Final = 200


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs. `step` is the first one at which it does; None: it has no step."""

    kind: Kind
    what: str
    first: str
    second: str
    step: int | None = None

    @property
    def text(self) -> str:
        """`the loss at step 0: 2.31, then 2.29`."""
        at = "" if self.step is None else f" at step {self.step:,}"
        return f"{self.what}{at}: {self.first or 'none'}, then {self.second or 'none'}"


def differences(first: RunNumbers, second: RunNumbers) -> list[Difference]:
    """All that differs, in the order of `KINDS`: what comes first may cause what follows."""
    return [
        *_configuration(first, second),
        *_data(first, second),
        *_tensors(first, second, "weights", "initialisation"),
        *_loss(first, second),
        *_tensors(first, second, "gradients", "gradients"),
        *_outcome(first, second),
    ]


def _configuration(first: RunNumbers, second: RunNumbers) -> Iterator[Difference]:
    yield from _unequal("configuration", _program(first), _program(second))


def _program(numbers: RunNumbers) -> Mapping[str, str]:
    events = list(numbers.events())
    started = [one for one in events if isinstance(one, RunStarted)]
    trainers = [one for one in started if one.role == "trainer"]
    # Each rank has its own part of the model and of the data, and any may be first on the bus.
    leading = (one for one in trainers if one.rank == numbers.first_rank)
    trainer = next(leading, trainers[0] if trainers else None)
    view = numbers.run.view
    found = {
        "command": next((one.command for one in started if one.command), ""),
        "ranks": str(view.world_size) if view is not None else "",
    }
    labels = dict(view.labels) if view is not None else {}
    if trainer is not None:
        labels = labels or dict(trainer.labels)
        found |= {
            "commit": trainer.git_commit or "",
            "optimizer": trainer.optimizer or "",
            "trainable parameters": f"{trainer.parameters:,}",
            "trainable tensors": f"{trainer.tensors:,}",
            "devices": ", ".join(f"{n} x {name}" for name, n in trainer.devices.items()),
            "loaded files": ", ".join(trainer.loaded),
        }
        for group in trainer.groups:
            rate = "" if group.lr is None else number_text(group.lr)
            found[f"learning rate of group {group.index}"] = rate
        found |= {f"version of {name}": version for name, version in trainer.versions.items()}
    found |= {f"label {name}": value for name, value in labels.items()}
    for one in events:
        if isinstance(one, TrainingPlanned) and one.total_steps is not None:
            found["planned steps"] = f"{one.total_steps:,}"
    return found


def _data(first: RunNumbers, second: RunNumbers) -> Iterator[Difference]:
    yield from _unequal("data", _loaders(first), _loaders(second))
    # What the first layer and the losses were given: the same data, in the same order.
    inputs = [_first_inputs(numbers) for numbers in (first, second)]
    for key in inputs[0]:
        if key in inputs[1]:
            for (what, a), (_, b) in zip(inputs[0][key], inputs[1][key], strict=True):
                if _apart(a, b):
                    yield Difference("data", what, value_text(a, digits=5),
                                     value_text(b, digits=5), key[1])  # fmt: skip
                    return


def _loaders(numbers: RunNumbers) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for one in numbers.events():
        if isinstance(one, DataLoaderSeen) and one.rank == numbers.first_rank:
            name = f"{one.mode} data"
            found.setdefault(f"data set of the {name}", one.dataset)
            found.setdefault(f"samples of the {name}", _count(one.samples))
            found.setdefault(f"batch size of the {name}", _count(one.batch_size))
            found.setdefault(f"workers of the {name}", _count(one.workers))
    return found


def _first_inputs(
    numbers: RunNumbers,
) -> Mapping[tuple[str, int], Sequence[tuple[str, float]]]:
    found: dict[tuple[str, int], Sequence[tuple[str, float]]] = {}
    for one in numbers.events():
        if isinstance(one, LayerInputsSeen | LossInputsSeen) and one.rank != numbers.first_rank:
            continue
        if isinstance(one, LayerInputsSeen):
            what = f"input of {plain_line(one.layer)}"
            found.setdefault(
                (one.layer, one.step),
                ((f"mean of the {what}", one.mean), (f"spread of the {what}", one.std)),
            )
        elif isinstance(one, LossInputsSeen) and one.target_spread is not None:
            what = f"spread of the targets of {plain_line(one.function)}"
            found.setdefault((one.function, one.step), ((what, one.target_spread),))
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def _loss(first: RunNumbers, second: RunNumbers) -> Iterator[Difference]:
    a, b = first.series("loss"), second.series("loss")
    if a is None or b is None:
        return
    steps, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    unequal = apart(a.values[at_a], b.values[at_b])
    if unequal.any():
        i = int(np.argmax(unequal))
        x, y = float(a.values[at_a][i]), float(b.values[at_b][i])
        yield Difference(
            "loss", "the loss", value_text(x, digits=5), value_text(y, digits=5), int(steps[i])
        )


def _tensors(
    first: RunNumbers, second: RunNumbers, collection: str, kind: Kind
) -> Iterator[Difference]:
    """The first step at which the norm of a tensor differs: of weights only their first summary,
    since later ones follow from the gradients."""
    matrices = [numbers.matrix(collection, "l2") for numbers in (first, second)]
    if matrices[0] is None or matrices[1] is None:
        return
    a, b = matrices[0], matrices[1]
    missing = sorted(set(a.rows) ^ set(b.rows))
    if missing and kind == "initialisation":
        place = "the first" if missing[0] in a.rows else "the second"
        yield Difference(
            kind, "tensors of the model", f"{len(a.rows):,}",
            f"{len(b.rows):,} ({missing[0]} is only in {place} run)",
        )  # fmt: skip
    rows = [name for name in a.rows if name in set(b.rows)]
    steps = np.intersect1d(a.steps, b.steps)
    if not rows or not steps.size:
        return
    if kind == "initialisation":
        steps = steps[:1]
    x, y = (_cells(matrix, rows, steps) for matrix in (a, b))
    # After the first step the data has had its part in the weights, a small one.
    rtol = _WEIGHTS_RTOL if kind == "initialisation" else RTOL
    unequal = apart(x, y, rtol) & np.isfinite(x) & np.isfinite(y)
    columns = unequal.any(axis=0)
    if not columns.any():
        return
    column = int(np.argmax(columns))
    row = int(np.argmax(unequal[:, column]))
    count = int(unequal[:, column].sum())
    more = f" and {count - 1:,} more" if count > 1 else ""
    yield Difference(
        kind, f"the norm of {collection} of {plain_line(rows[row])}{more}",
        value_text(float(x[row, column]), digits=5), value_text(float(y[row, column]), digits=5),
        int(steps[column]),
    )  # fmt: skip


def _cells(
    matrix: Matrix, rows: Sequence[str], steps: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    places = {name: i for i, name in enumerate(matrix.rows)}
    chosen = matrix.values[[places[name] for name in rows]]
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
    found = chosen[:, np.searchsorted(matrix.steps, steps)]
    return found


def _outcome(first: RunNumbers, second: RunNumbers) -> Iterator[Difference]:
    yield from _unequal("outcome", _ends(first), _ends(second))


def _ends(numbers: RunNumbers) -> Mapping[str, str]:
    view = numbers.run.view
    found: dict[str, str] = {}
    if view is not None:
        found["outcome"] = view.outcome or view.state
    for issue in numbers.run.issues():
        if issue.severity != "info":
            where = "" if issue.first_step is None else f" from step {issue.first_step:,}"
            found.setdefault(f"rule {issue.rule}", f"{issue.severity}{where}")
    return found


def apart(
    a: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    b: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    rtol: float = RTOL,
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Where two numbers differ by more than `rtol`; NaN is equal to NaN, and to nothing else."""
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        close = np.abs(a - b) <= rtol * np.maximum(np.abs(a), np.abs(b))
    equal: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    equal = same | (close & np.isfinite(a) & np.isfinite(b))
    return ~equal


def _apart(a: float, b: float) -> bool:
    return bool(apart(np.array([a]), np.array([b]))[0])


def _unequal(
    kind: Kind, first: Mapping[str, str], second: Mapping[str, str]
) -> Iterator[Difference]:
    for what in dict.fromkeys([*first, *second]):
        a, b = (plain_line(one.get(what, ""))[:_SHORT] for one in (first, second))
        if a != b:
            yield Difference(kind, plain_line(what), a, b)


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
