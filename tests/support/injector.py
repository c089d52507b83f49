"""Faults planted in tocsin's own code: any function of it may be told to raise at its n-th call.

All functions and methods of the given modules are wrapped; that costs a microsecond a call while
nothing is planted. What isolates others, or is called
by the user's code in front of one, is never made to raise: `outside` names those.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError


class _Strict(BaseModel):
    step: int


def _invalid() -> Exception:
    try:
        _Strict(step="planted")  # type: ignore[arg-type]  # on purpose
    except ValidationError as error:
        return error
    raise AssertionError


KINDS: tuple[Callable[[], Exception], ...] = (
    lambda: RuntimeError("planted"),
    lambda: MemoryError("planted"),
    lambda: OSError(28, "planted: no space left on device"),
    lambda: OSError(24, "planted: too many open files"),
    lambda: RecursionError("planted"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "planted"),
    lambda: StopIteration("planted"),
    lambda: StopAsyncIteration("planted"),
    lambda: AttributeError("planted"),
    lambda: KeyError("planted"),
    lambda: TimeoutError("planted"),
    lambda: AssertionError("planted"),
    _invalid,
)


@dataclass(frozen=True)
class Fault:
    """Raise at the `at`-th call of `site`, from 1; at each call after it too if it is `lasting`."""

    site: str
    at: int
    make: Callable[[], BaseException]
    lasting: bool = False

    def __str__(self) -> str:
        kind = type(self.make()).__name__
        return (
            f"{kind} at call {self.at}{' and all after it' if self.lasting else ''} of {self.site}"
        )


@dataclass
class Injector:
    """What is planted, and what has gone off."""

    outside: frozenset[str] = frozenset()
    sites: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    """Those of `outside` that were met."""
    calls: Counter[str] = field(default_factory=Counter)
    fired: list[Fault] = field(default_factory=list)
    _wrapped: list[tuple[object, str, object]] = field(default_factory=list)
    _faults: dict[str, Fault] = field(default_factory=dict)
    _counting: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wrap(self, modules: Sequence[ModuleType]) -> None:
        """Put a wrapper around all that these modules define."""
        replaced: dict[int, tuple[object, object]] = {}
        for module in modules:
            for name, value in list(vars(module).items()):
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                if isinstance(value, FunctionType):
                    made = self._around(value, f"{module.__name__}.{name}")
                    if made is not None:
                        replaced[id(value)] = (value, made)
                elif inspect.isclass(value):
                    self._wrap_class(value, f"{module.__name__}.{name}")
        for module in [m for key, m in sys.modules.items() if key.startswith("tocsin.")]:
            for name, value in list(vars(module).items()):
                if id(value) in replaced and replaced[id(value)][0] is value:
                    self._replace(module, name, replaced[id(value)][1])

    def unwrap(self) -> None:
        """Take the wrappers away, but for references to them that others keep."""
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped.clear()

    def _replace(self, owner: object, name: str, made: object) -> None:
        self._wrapped.append((owner, name, vars(owner)[name]))
        setattr(owner, name, made)

    def _wrap_class(self, kind: type, place: str) -> None:
        for name, value in list(vars(kind).items()):
            if name.startswith("__") and name not in _SPECIAL:
                continue
            inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if not isinstance(inner, FunctionType):
                continue
            made = self._around(inner, f"{place}.{name}")
            if made is not None:
                self._replace(kind, name, made if inner is value else type(value)(made))

    def _around(self, function: FunctionType, site: str) -> Callable[..., Any] | None:
        site = site.removeprefix("tocsin.")
        if site in self.outside:
            self.left_out.add(site)
            return None
        self.sites.add(site)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waiting(*args: Any, **kwargs: Any) -> Any:
                self._called(site)
                return await function(*args, **kwargs)

            return waiting

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            self._called(site)
            return function(*args, **kwargs)

        return calling

    def _called(self, site: str) -> None:
        if not self._counting:
            return
        with self._lock:
            self.calls[site] += 1
            fault = self._faults.get(site)
            if fault is None:
                return
            count = self.calls[site]
            if count != fault.at and not (fault.lasting and count > fault.at):
                return
            self.fired.append(fault)
        raise fault.make()

    @contextmanager
    def planted(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Within the block calls are counted, from 0, and the faults go off."""
        self.calls.clear()
        self.fired.clear()
        self._faults = {fault.site: fault for fault in faults}
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
            self._faults = {}


_SPECIAL = frozenset({"__init__", "__call__", "__aenter__", "__aexit__", "__enter__", "__exit__"})


def choose(seed: int, calls: Mapping[str, int], count: int) -> list[Fault]:
    """Some faults in what is called, each place as likely as any other."""
    chance = random.Random(seed)
    sites = chance.sample(sorted(calls), min(count, len(calls)))
    return [
        Fault(
            site,
            # The first call more often than any other: what it breaks is never seen again.
            chance.choice((1, chance.randint(1, calls[site]))),
            chance.choice(KINDS),
            lasting=chance.random() < 0.3,
        )
        for site in sites
    ]
