"""The rules that there are, by name and by the reference's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tocsin.schemas.errors import ConfigurationError, TocsinError
from tocsin.stream_rules.about_rules.rule_failed import RuleFailed
from tocsin.stream_rules.about_rules.rule_has_no_input import RuleHasNoInput
from tocsin.stream_rules.numerical.dead_relu import DeadRelu
from tocsin.stream_rules.numerical.exploding_gradient import ExplodingGradient
from tocsin.stream_rules.numerical.nonfinite import Nonfinite
from tocsin.stream_rules.numerical.unchanged_tensor import UnchangedTensor
from tocsin.stream_rules.numerical.vanishing_gradient import VanishingGradient
from tocsin.stream_rules.numerical.weight_update_ratio import WeightUpdateRatio
from tocsin.stream_rules.progress.learning_rate_anomaly import LearningRateAnomaly
from tocsin.stream_rules.progress.loss_diverged import LossDiverged
from tocsin.stream_rules.progress.loss_not_decreasing import LossNotDecreasing
from tocsin.stream_rules.progress.loss_spike import LossSpike
from tocsin.stream_rules.progress.overfit import Overfit
from tocsin.stream_rules.progress.overtraining import Overtraining
from tocsin.stream_rules.progress.stalled_training import StalledTraining
from tocsin.stream_rules.progress.telemetry_lost import TelemetryLost
from tocsin.stream_rules.rule import AnyRule
from tocsin.stream_rules.system.disk_full import DiskFull
from tocsin.stream_rules.system.host_memory_increase import HostMemoryIncrease
from tocsin.stream_rules.system.low_gpu_utilization import LowGpuUtilization


class DuplicateRule(TocsinError):
    """Two rules have the same name or alias."""


class UnknownRule(ConfigurationError):
    """There is no rule of that name."""


class Catalogue:
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

    def __iter__(self) -> Iterator[type[AnyRule]]:
        """The rules in the order in which they were added."""
        return iter(self._rules.values())


def built_in() -> Catalogue:
    """A catalogue of the rules that come with tocsin."""
    return Catalogue(
        (
            Nonfinite,
            ExplodingGradient,
            VanishingGradient,
            WeightUpdateRatio,
            UnchangedTensor,
            DeadRelu,
            LossDiverged,
            LossNotDecreasing,
            LossSpike,
            Overfit,
            Overtraining,
            LearningRateAnomaly,
            StalledTraining,
            TelemetryLost,
            HostMemoryIncrease,
            DiskFull,
            LowGpuUtilization,
            RuleHasNoInput,
            RuleFailed,
        )
    )
