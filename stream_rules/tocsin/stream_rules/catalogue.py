"""The built-in rules, by name and by the reference's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tocsin.schemas.errors import ConfigurationError, TocsinError
from tocsin.stream_rules.rule import AnyRule, Family
from tocsin.stream_rules.rules.about_rules import registry as about_rules
from tocsin.stream_rules.rules.data import registry as data
from tocsin.stream_rules.rules.large_models import registry as large_models
from tocsin.stream_rules.rules.numerical import registry as numerical
from tocsin.stream_rules.rules.progress import registry as progress
from tocsin.stream_rules.rules.system import registry as system
from tocsin.stream_rules.rules.trees import registry as trees

FAMILIES: Final[Mapping[Family, tuple[type[AnyRule], ...]]] = {
    "numerical": numerical.RULES,
    "progress": progress.RULES,
    "data": data.RULES,
    "large_models": large_models.RULES,
    "system": system.RULES,
    "trees": trees.RULES,
    "about_rules": about_rules.RULES,
}
"""The rules of each family, from the `registry` of its folder."""


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
    return RuleCatalogue(rule for rules in FAMILIES.values() for rule in rules)
