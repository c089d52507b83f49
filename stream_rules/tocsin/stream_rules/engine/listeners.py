"""Which rule instances of a run read a record, by its kind."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from tocsin.stream_rules.engine.instance import Instance
from tocsin.stream_rules.rule import Input

MAX_KINDS: Final = 1000
"""So many kinds of records have their listeners kept at once."""

Kind = tuple[str, str | None, tuple[str, ...]]
"""Of a record, as far as it decides who listens: scalar, tensors, system or event; its mode; its
columns, its collection or its type."""


class Listeners:
    """The listeners of each kind of record that has come, found once."""

    def __init__(self, instances: Sequence[Instance] = ()) -> None:
        self._instances: Final = instances
        self._by_kind: dict[Kind, tuple[tuple[Instance, ...], frozenset[str]]] = {}

    def __len__(self) -> int:
        return len(self._by_kind)

    def find(self, kind: Kind) -> tuple[tuple[Instance, ...], frozenset[str]]:
        """Instances that read records of a kind, and the names of those whose input it is, not only
        what they read beside their input."""
        found = self._by_kind.get(kind)
        if found is None:
            if len(self._by_kind) >= MAX_KINDS:
                self._by_kind.clear()
            names = frozenset(kind[2])
            listeners = tuple(one for one in self._instances if _reads(one, kind, names))
            fed = (one.spec.name for one in listeners if _is_input(one, kind, names))
            found = self._by_kind[kind] = listeners, frozenset(fed)
        return found


def _reads(instance: Instance, kind: Kind, names: Set[str]) -> bool:
    return any(_fits(wanted, kind, names) for wanted in instance.spec.rule.meta.inputs)


def _is_input(instance: Instance, kind: Kind, names: Set[str]) -> bool:
    inputs = instance.spec.rule.meta.inputs
    return any(_fits(wanted, kind, names) for wanted in inputs if not wanted.optional)


def _fits(wanted: Input, kind: Kind, names: Set[str]) -> bool:
    name, mode, _ = kind
    if wanted.kind != name or wanted.mode not in (None, mode):
        return False
    return wanted.fits_any(names)
