"""What a worker asks a child to load, and what it makes of the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tocsin.schemas.configuration.problems import Finding
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.stream_rules.custom.call_limits import MEBIBYTE, Limits
from tocsin.stream_rules.custom.description import stand_in
from tocsin.stream_rules.custom.exit_cause import Death, ending
from tocsin.stream_rules.custom.loading import Loaded, not_loaded
from tocsin.stream_rules.custom.protocol import Loaded as LoadedHead
from tocsin.stream_rules.custom.protocol import Wanted
from tocsin.stream_rules.engine.spec import RuleSpec
from tocsin.stream_rules.rule import Params


def wanted(entry: RuleEntry) -> Wanted:
    """An entry for the child."""
    return Wanted.model_validate(
        {
            "name": entry.name,
            "use": entry.use,
            "preset": entry.preset,
            "params": dict(entry.params),
            "severity": entry.severity,
            "match": dict(entry.match),
        }
    )


def loaded_from(entries: Sequence[RuleEntry], head: LoadedHead) -> Loaded:
    """What the child has loaded, as specs of stand-ins, and its problems at their places."""
    findings = [
        Finding(
            (*entries[problem.entry].loc, *problem.loc),
            problem.message,
            problem.code,
            problem.hint,
            at="key" if problem.at_key else "value",
            hide_value=problem.hide_value,
        )
        for problem in head.problems
    ]
    specs = {
        entry.name: RuleSpec(
            name=entry.name,
            rule=stand_in(described),
            params=Params(),
            severity=entry.severity,
            match=entry.match,
            listed=True,
            custom=True,
        )
        for entry in entries
        if isinstance(described := head.described.get(entry.name), dict)
    }
    return Loaded(specs, findings)


def unloadable(entries: Sequence[RuleEntry], death: Death, limits: Limits) -> Loaded:
    """The child has not survived loading: the finding is of the entry that it was at."""
    at = death.mark.rule if death.mark is not None else ""
    if death.kind == "load" and death.detail:
        why = f"takes more than {limits.load_bytes // MEBIBYTE:,} MiB of memory"
    elif death.kind == "load":
        why = f"does not end within {limits.load_s:g} s"
    else:
        why = f"ends the process ({ending(death.returncode)})"
    entry = next((entry for entry in entries if entry.name == at), entries[0])
    return Loaded({}, [not_loaded(entry, f"loading {entry.use} {why}")])
