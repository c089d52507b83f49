"""The built-in rules, by name and by the reference's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tocsin.schemas.errors import ConfigurationError, TocsinError
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.rules import (
    about_rules,
    data,
    large_models,
    numerical,
    progress,
    system,
    trees,
)

FAMILIES: Final = (numerical, progress, data, large_models, system, trees, about_rules)
"""Where the rules live; each has its own in `RULES`."""


class DuplicateRule(TocsinError):
    """Two rules have the same name or alias."""


class UnknownRule(ConfigurationError):
    """No rule has this name."""


class RuleCatalogue:
    """Rule classes by name; aliases lead to the same class."""

    def __init__(self, rules: Iterable[type[AnyRule]] = ()) -> None:
        self._rules: dict[str, type[AnyRule]] = {}
        self._aliases: dict[str, str] = {}
        for rule in rules:
            self.add(rule)

    def add(self, rule: type[AnyRule]) -> None:
        """Raises DuplicateRule: its name or alias is taken."""
        names = [rule.meta.name, *([rule.meta.alias] if rule.meta.alias else [])]
        for name in names:
            if name in self._rules or name in self._aliases:
                raise DuplicateRule(f"there is already a rule that is called {name!r}")
        self._rules[rule.meta.name] = rule
        if rule.meta.alias:
            self._aliases[rule.meta.alias] = rule.meta.name

    def get(self, name: str) -> type[AnyRule]:
        """The rule of that name or alias. Raises UnknownRule."""
        try:
            return self._rules[self._aliases.get(name, name)]
        except KeyError:
            raise UnknownRule(f"there is no rule {name!r}") from None

    def names(self) -> tuple[str, ...]:
        """All names, sorted, without aliases."""
        return tuple(sorted(self._rules))

    def aliases(self) -> tuple[str, ...]:
        """All aliases, sorted."""
        return tuple(sorted(self._aliases))

    def __contains__(self, name: object) -> bool:
        """Whether there is a rule of that name or alias."""
        return name in self._rules or name in self._aliases

    def __iter__(self) -> Iterator[type[AnyRule]]:
        """The rules in the order in which they were added."""
        return iter(self._rules.values())


def built_in() -> RuleCatalogue:
    """A catalogue of the rules that come with tocsin."""
    return RuleCatalogue(rule for family in FAMILIES for rule in family.RULES)
