"""Whether a run's configuration lets its ranks leave before an update (`stop.before_update`). Pure.

They leave for the rule `nonfinite`, before it has fired: so only where that rule would stop this
run at once, with nobody to be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.routing.matches import labels_fit
from tocsin.schemas.configuration.sections import CheckpointChoice, RuleEntry, StopOptions

RULE: Final = "nonfinite"
_NAMES: Final = frozenset({RULE, "ExplodingTensor"})


@dataclass(frozen=True, slots=True)
class BeforeUpdatePolicy:
    """What becomes of the checkpoint of a stop before an update; None: there is no such stop, and
    `why_not`, where the configuration asks for one.
    """

    checkpoint: CheckpointChoice | None = None
    why_not: str = ""


def before_update_policy(config: Config, labels: Mapping[str, str]) -> BeforeUpdatePolicy:
    """Whether a run with these labels is stopped before an update."""
    if not config.stop.before_update:
        return BeforeUpdatePolicy()
    reasons = []
    for options in _stops(config, labels):
        if isinstance(options, str):
            reasons.append(options)
            continue
        mode = options.mode or config.defaults.mode
        if mode == "enforce":
            return BeforeUpdatePolicy(options.checkpoint)
        reasons.append(f"its mode is {mode}")
    return BeforeUpdatePolicy(
        why_not=f"the rule {RULE} does not stop this run at once: {reasons[0]}"
    )


def _stops(config: Config, labels: Mapping[str, str]) -> Iterator[StopOptions | str]:
    """The stops of the rule's instances for this run; a sentence where one does not stop it."""
    entries = [entry for entry in config.rules if entry.use in _NAMES]
    for entry in entries:
        yield _entry_options(entry, labels)
    if not any(entry.name in _NAMES for entry in entries):
        yield StopOptions() if config.defaults.rules == "all" else "it is off"


def _entry_options(entry: RuleEntry, labels: Mapping[str, str]) -> StopOptions | str:
    if entry.off:
        return "it is off"
    if not labels_fit(entry.match, labels):
        return "its match does not fit the labels of this run"
    if entry.params.get("for_steps", 1) != 1 or entry.params.get("only_nan", False):
        return "its parameters for_steps or only_nan make it wait"
    if entry.severity not in (None, "critical"):
        return f"its severity is {entry.severity}"
    if entry.actions is None:
        return StopOptions()
    stop = next((action for action in entry.actions if action.kind == "stop"), None)
    return "its actions have no stop" if stop is None else stop.options or StopOptions()
