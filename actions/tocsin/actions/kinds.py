"""Kinds by name: those that tocsin has, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from tocsin.schemas.errors import ConfigurationError


class HasModel(Protocol):
    """What each kind has: the model of what may be configured of it, whose `type` is its name."""

    config: Any


class HasType(Protocol):
    """What each configuration has."""

    @property
    def type(self) -> str:
        """The kind's name."""
        ...


KindT = TypeVar("KindT", bound=HasModel)
ConfigT = TypeVar("ConfigT", bound=HasType)


class Kinds(Generic[KindT, ConfigT]):
    """All kinds by name. What tocsin has itself comes first: no package replaces it.

    A kind is imported when something of it is read, and not before: most configurations name one or
    two, and each process reads them.

    Args:
        what: what they are kinds of, for messages.
        base: the class from which each of them is derived.
        built_in: `module:Class` by name.
        group: the entry points by which a package offers kinds: the kind's name, and its class.
        installed: the entry points of that group, if not those of this environment.
    """

    def __init__(
        self,
        what: str,
        base: type[KindT],
        built_in: Mapping[str, str],
        group: str,
        installed: Callable[[], Iterable[EntryPoint]] | None = None,
    ) -> None:
        self._what = what
        self._base = base
        self._built_in = built_in
        self._group = group
        self._installed = installed or (lambda: entry_points(group=group))
        self._loaded: dict[str, KindT] = {}

    def names(self) -> list[str]:
        """All names. Reads what packages are installed."""
        return list(
            dict.fromkeys([*self._built_in, *sorted(one.name for one in self._installed())])
        )

    def get(self, name: str) -> KindT | None:
        """The kind of that name; None if there is none. May import a package.

        Raises:
            ConfigurationError: a package offers it, and it cannot be loaded.
        """
        if name not in self._loaded:
            if name in self._built_in:
                offered = [EntryPoint(name, self._built_in[name], self._group)]
            else:
                offered = [one for one in self._installed() if one.name == name]
            if not offered:
                return None
            self._loaded[name] = self._load(offered)
        return self._loaded[name]

    def built_in(self) -> Iterator[KindT]:
        """The kinds that tocsin has, one by one."""
        return (kind for name in self._built_in if (kind := self.get(name)) is not None)

    def model(self, kind: str) -> type[ConfigT] | None:
        """The model of a kind's configuration. Raises as `get` does."""
        found = self.get(kind)
        return None if found is None else found.config

    def models(self) -> list[type[ConfigT]]:
        """The models of all kinds. Raises as `get` does."""
        return [found for name in self.names() if (found := self.model(name)) is not None]

    def kind_of(self, config: ConfigT) -> KindT:
        """The kind of a configuration.

        Raises:
            TypeError: it was read without the models of kinds, or is of none: a bug.
        """
        kind = self.get(config.type)
        if kind is None or not isinstance(config, kind.config):
            raise TypeError(f"a {self._what} of the type {config.type!r} was not read as one")
        return kind

    def _load(self, offered: list[EntryPoint]) -> KindT:
        first = offered[0]
        by = " and ".join(sorted({one.dist.name if one.dist else one.value for one in offered}))
        what = f"the {self._what} kind {first.name!r} of {by}"
        if len({one.value for one in offered}) > 1:
            raise ConfigurationError(f"{what}: expected one package to offer it")
        try:
            kind = first.load()()
        # Whatever a package does when it is imported.
        except Exception as error:
            raise ConfigurationError(
                f"{what} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(kind, self._base):
            raise ConfigurationError(f"{what}: expected a class derived from {self._base.__name__}")
        return kind
