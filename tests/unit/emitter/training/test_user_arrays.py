"""`run.record`: arrays of any framework, and a loop without one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from support.trainings.captured import environment, said
from support.trainings.watched import records
from tocsin.emitter.process.isolation import Isolation
from tocsin.emitter.run import Run
from tocsin.emitter.statistics.arrays import CHUNK
from tocsin.emitter.statistics.quantiles import ROW_COLUMNS
from tocsin.emitter.training.session import Session
from tocsin.emitter.training.user_arrays import as_array, frame_of
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.stream_rules.testing import assert_fires

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


class FakeJax:
    """An array of a framework that offers `__array__`; NumPy has no type for its bfloat16."""

    def __init__(self, values: npt.ArrayLike) -> None:
        self._values = np.asarray(values, np.float32)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        return self._values


class FakeCupy:
    """An array on a GPU: refuses to be copied unless it is asked to."""

    def __init__(self, values: npt.ArrayLike) -> None:
        self._values = np.asarray(values, np.float32)
        self.__cuda_array_interface__ = {"version": 3}

    def __array__(self, dtype: object = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def get(self) -> npt.NDArray[np.float32]:
        return self._values


class FakeDlpack:
    """What offers nothing but the protocol of DLPack."""

    def __init__(self, values: npt.ArrayLike) -> None:
        self._values = np.asarray(values, np.float32)

    def __dlpack__(self, **options: object) -> object:
        return self._values.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def row(array: object) -> tuple[dict[str, float], list[int]]:
    frame = frame_of(ORIGIN, {"a": as_array(array)}, "weights", 3)
    assert frame.encode()
    return dict(zip(frame.columns, frame.values[0].tolist(), strict=True)), frame.counts[0].tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0, -2.0, 0.0]),
        np.array([1, -2, 0], np.int8),
        np.array([1, -2, 0], np.float16),
        np.array([[1.0, 9.0], [-2.0, 9.0], [0.0, 9.0]])[:, 0],
        np.ma.masked_array([1.0, -2.0, 0.0, 77.0], mask=[False, False, False, True]),
        FakeJax([1, -2, 0]),
        FakeCupy([1, -2, 0]),
        FakeDlpack([1, -2, 0]),
        np.array([1.0, -2.0, 0.0]).__dlpack__(),
        [1, -2.0, False],
        torch.tensor([1.0, -2.0, 0.0]),
        torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([1.0, -2.0, 0.0]).to(torch.float8_e5m2),
        torch.tensor([1.0, -2.0, 0.0]).half(),
        torch.complex(torch.tensor([1.0]), torch.tensor([-2.0])),
    ],
    ids=lambda array: type(array).__name__,
)
def test_arrays_of_any_framework(array: object) -> None:
    values, counts = row(array)
    assert (values["min"], values["max"], values["l1"]) == (-2, 1, 3)
    assert values["l2"] == pytest.approx(math.sqrt(5))
    assert counts[2:] == [0, 0]
    assert counts[0] - counts[1] == 2


def test_complex_bool_scalar_and_empty() -> None:
    values, counts = row(np.array([3 - 4j]))
    assert (values["min"], values["max"], counts) == (-4, 3, [2, 0, 0, 0])
    values, counts = row(np.array([True, False, True]))
    assert values["mean"] == pytest.approx(2 / 3)
    assert counts == [3, 1, 0, 0]
    values, counts = row(np.float64(2.5))
    assert (values["mean"], values["p95"], counts) == (2.5, 2.5, [1, 0, 0, 0])
    values, counts = row(np.zeros((0, 3)))
    assert (set(values.values()), counts) == ({0.0}, [0, 0, 0, 0])


def test_what_numpy_has_no_type_for() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="JAX brings it")
    for name in ("bfloat16", "float8_e4m3fn", "int4"):
        array = np.array([1, -2, 0]).astype(getattr(ml_dtypes, name))
        values, counts = row(array)
        assert (values["min"], values["max"], values["l1"]) == (-2, 1, 3)
        assert counts == [3, 1, 0, 0]


def test_a_large_array_is_read_in_pieces() -> None:
    array = np.linspace(-1, 1, 3 * CHUNK + 5, dtype=np.float32)
    array[[7, CHUNK, 3 * CHUNK]] = 0.0, np.nan, np.inf
    values, counts = row(array)
    good = array[np.isfinite(array)].astype(np.float64)
    assert counts == [array.size, int((array == 0).sum()), 1, 1]
    assert values["std"] == pytest.approx(good.std(), rel=1e-6)
    assert values["p25"] == pytest.approx(np.quantile(good, 0.25), abs=0.1)


@pytest.mark.parametrize(
    "array",
    [
        None,
        "text",
        ["a"],
        object,
        np.array([1, None]),
        np.array([b"x"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, [("x", "f4")]),
        torch.empty(3, device="meta"),
        {"nested": 1},
        [[1, 2], [3]],
    ],
    ids=repr,
)
def test_what_is_no_array_of_numbers_is_refused(array: object) -> None:
    with pytest.raises(ConfigurationError, match="expected an array of numbers"):
        as_array(array)


def started(folder: Path) -> tuple[Session, Run]:
    session = Session(environment(folder), Isolation())
    return session, Run(session)


@pytest.mark.parametrize("wrap", [np.asarray, FakeJax], ids=["numpy", "jax"])
def test_a_loop_without_torch_is_watched_end_to_end(
    tmp_path: Path, wrap: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tocsin.emitter.hooks.torch_patches", raising=False)
    session, run = started(tmp_path)
    weights, bias = np.zeros(8), np.zeros(1)
    for step in range(8):
        x = np.random.default_rng(step).normal(size=(32, 8))
        error = x @ weights + bias - x.sum(1)
        gradient = x.T @ error / len(x)
        if step == 6:
            gradient[3] = np.nan
        run.log({"loss": (error**2).mean()})
        run.record({"w": wrap(gradient), "b": wrap(error.mean())}, kind="gradients")
        weights -= 0.1 * gradient
        bias -= 0.1 * error.mean()
        run.record("w", wrap(weights), kind="weights")
    session.end()
    found = said(tmp_path)
    frames = [f for f in found.frames if f.collection == "gradients"]
    assert [f.step for f in frames] == list(range(8))
    assert {f.rows for f in frames} == {("w", "b")}
    assert frames[0].columns == ROW_COLUMNS
    nans = frames[6].count("nans")
    assert nans is not None
    assert nans.tolist() == [1, 0]
    issue = assert_fires(records(tmp_path), "nonfinite", first_step=6)
    assert issue.subject.name == "w"


def test_wrong_arguments_are_said(tmp_path: Path) -> None:
    session, run = started(tmp_path)
    one = np.zeros(1)
    wrong: list[tuple[tuple[object, ...], dict[str, object]]] = [
        (("", one), {}),
        (({"a": one}, one), {}),
        (({"": one},), {}),
        (("a", one), {"kind": ""}),
        (("a", one), {"step": -1}),
        (("a",), {}),
    ]
    for arguments, options in wrong:
        with pytest.raises(ConfigurationError, match="record: expected"):
            run.record(*arguments, **options)  # type: ignore[arg-type]  # wrong on purpose
    run.record({})
    session.end()
