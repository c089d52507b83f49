"""Sections whose entries are of kinds: each kind has a model of its own, named by `type`.

Which kinds there are is known to those who use them: they hand `KindModels` to the reading of the
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

ModelT_co = TypeVar("ModelT_co", covariant=True)


class KindModels(Protocol[ModelT_co]):
    """The models of the kinds of one section."""

    def names(self) -> Sequence[str]:
        """All kinds. May read what packages are installed."""
        ...

    def model(self, kind: str) -> type[ModelT_co] | None:
        """The model of a kind; None if there is no such kind.

        Raises:
            ConfigurationError: a package offers the kind, and it cannot be loaded.
        """
        ...
