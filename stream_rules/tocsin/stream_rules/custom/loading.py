"""Custom rules from the place in the configuration: a file of the user's, or an installed package.

`use: rules/my_rule.py:MyRule` is the class `MyRule` of a file; its path starts at the folder of the
configuration. `use: my_rule` is what a package offers under that name in the entry point group
`tocsin.rules`. Loading runs the code: a worker does it in a child process (`host`), and a test or a
replay of one's own in its own process (`load_specs`).
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pydantic import ValidationError

from tocsin.schemas.configuration.problems import Problem, did_you_mean
from tocsin.schemas.configuration.sections import CUSTOM_USE, RuleEntry
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.process.private_folders import why_shared
from tocsin.stream_rules.engine.rule_spec import CUSTOM_GROUP, RuleSpec
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rule import AnyRule, Params, Rule, RuleMeta

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,99}")
# Problems about parameters are made as if these stood there, so that no value is shown that may be
# a secret.
_PARAMS: Final = ("rules", "params")


class RuleNotLoaded(ConfigurationError):
    """A custom rule cannot be loaded; `hint` is what to try."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of loading: the specs by instance name, and what is wrong, at its place."""

    specs: Mapping[str, RuleSpec] = field(default_factory=dict)
    problems: Sequence[Problem] = ()


def load_rule(use: str, folder: Path, used_names: Collection[str] = ()) -> type[AnyRule]:
    """The class of a custom rule. Runs its module, in this process.

    Args:
        use: as in the configuration.
        folder: where a relative path starts.
        used_names: names that it must not have.

    Raises:
        RuleNotLoaded: it is not there, raises, or is no rule.
    """
    if CUSTOM_USE.fullmatch(use):
        path, _, name = use.rpartition(":")
        module = _run(folder / path, path)
        found = getattr(module, name, None)
        if found is None:
            there = [key for key, value in vars(module).items() if _is_rule(value)]
            hint = did_you_mean(name, there)
            raise RuleNotLoaded(f"there is no class {name!r} in {path}", hint)
    else:
        found = _offered(use)
    return _checked(found, use, used_names)


def load_spec(entry: RuleEntry, folder: Path, used_names: Collection[str] = ()) -> RuleSpec:
    """The instance that an entry asks for; its rule is loaded in this process.

    Raises:
        RuleNotLoaded: as `load_rule`.
        WrongSetting: the entry's preset or parameters do not fit the rule.
    """
    rule = load_rule(entry.use, folder, used_names)
    meta = rule.meta
    if entry.preset is not None and entry.preset not in meta.presets:
        has = f"it has {', '.join(sorted(meta.presets))}" if meta.presets else "it has none"
        message = f"the rule {entry.name!r} has no preset {entry.preset!r}"
        raise WrongSetting([Problem(("preset",), message, "unknown_preset", has)])
    preset = meta.presets[entry.preset] if entry.preset is not None else {}
    try:
        params = meta.params.model_validate({**preset, **entry.params})
    except ValidationError as error:
        # Where all is well the words for what is not are not loaded: each restart costs their time.
        from tocsin.schemas.configuration.validation import problems_of_model

        found = problems_of_model(error, meta.params, _PARAMS)
        raise WrongSetting([replace(one, loc=one.loc[1:]) for one in found]) from error
    spec = RuleSpec(
        name=entry.name,
        rule=rule,
        params=params,
        severity=entry.severity,
        match=entry.match,
        listed=True,
        custom=True,
    )
    _try_out(spec)
    return spec


class WrongSetting(ConfigurationError):
    """An entry asks a custom rule for what it does not have; `problems` start at the entry."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(one.message for one in problems))
        self.problems = problems


def names_taken() -> tuple[str, ...]:
    """The names that rules of tocsin's own have, or had."""
    # Not at the top: the process of the custom rules gets them, and starts without the rules.
    from tocsin.stream_rules.catalogue import built_in

    return (*(own := built_in()).names(), *own.aliases())


def load_specs(
    entries: Iterable[RuleEntry],
    *,
    folder: Path,
    used_names: Collection[str] | None = None,
    marked: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Loaded:
    """Load rules into this process. Called for its own sake by tests and replays of one's own.

    Args:
        entries: those of the configuration that name custom rules.
        folder: where their relative paths start.
        used_names: names that they must not have; None: those of tocsin's own.
        marked: entered around the loading of each, with the name of its entry.
    """
    used_names = names_taken() if used_names is None else used_names
    specs: dict[str, RuleSpec] = {}
    problems: list[Problem] = []
    for entry in entries:
        try:
            with marked(entry.name):
                specs[entry.name] = load_spec(entry, folder, used_names)
        except RuleNotLoaded as error:
            problems.append(not_loaded(entry, str(error), error.hint))
        except WrongSetting as error:
            problems += [replace(one, loc=(*entry.loc, *one.loc)) for one in error.problems]
    return Loaded(specs, problems)


def not_loaded(entry: RuleEntry, why: str, hint: str | None = None) -> Problem:
    """The problem that an entry's rule cannot be loaded."""
    return Problem(entry.at("use"), why, "rule_not_loaded", hint)


# -- from a file ---------------------------------------------------------------------------


def _run(path: Path, shown: str) -> ModuleType:
    if not path.is_file():
        raise RuleNotLoaded(f"there is no file {shown}", f"looked for {path}")
    _refuse_shared(path, shown)
    # A name of its own: two folders may each have a `rules.py`, and so may the standard library.
    name = f"tocsin_custom_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # For modules beside it; last, so that none of them stands in for another.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RuleNotLoaded(f"{shown} cannot be imported: {_error_text(error, path)}") from error
    return module


def _refuse_shared(path: Path, shown: str) -> None:
    """Raises RuleNotLoaded: others could have written what would be run."""
    real = path.resolve()
    for one in (path, path.parent, real.parent, path.parent / "__pycache__"):
        why = why_shared(one)
        if why is not None:
            hint = f"chmod go-w {one}, or copy the rule into your own folder"
            raise RuleNotLoaded(f"{shown} is not run: {why}", hint)


def _error_text(error: BaseException, path: Path | None = None) -> str:
    """An error of somebody else's code, with the line of the file if it is known."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if path is not None and frame.filename == str(path):
            line = frame.lineno
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    what = f"{type(error).__name__}: {text}".removesuffix(": ")[:300]
    return what if line is None else f"{what} (line {line})"


# -- from a package ------------------------------------------------------------------------


def _offered(name: str) -> object:
    offers = list(entry_points(group=CUSTOM_GROUP, name=name))
    if not offers:
        raise RuleNotLoaded(f"no installed package offers a rule {name!r}")
    if len({offer.value for offer in offers}) > 1:
        by = ", ".join(sorted(offer.dist.name if offer.dist else offer.value for offer in offers))
        raise RuleNotLoaded(f"several packages offer a rule {name!r}: {by}", "uninstall one")
    try:
        return offers[0].load()
    except (Exception, SystemExit) as error:
        raise RuleNotLoaded(
            f"{offers[0].value} cannot be imported: {_error_text(error)}"
        ) from error


# -- whether it is a rule ------------------------------------------------------------------


def _is_rule(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Rule) and value is not Rule


def _checked(found: object, use: str, used_names: Collection[str]) -> type[AnyRule]:
    if not (isinstance(found, type) and issubclass(found, Rule)):
        hint = "class MyRule(tocsin.stream_rules.rule.Rule[MyParams, MyState])"
        raise RuleNotLoaded(f"{use} is not a rule: expected a subclass of Rule", hint)
    rule: type[AnyRule] = found
    meta: Any = getattr(rule, "meta", None)
    if not isinstance(meta, RuleMeta):
        raise RuleNotLoaded(f"{use} has no `meta`: expected a RuleMeta", "meta = RuleMeta(…)")
    if not _NAME.fullmatch(meta.name):
        raise RuleNotLoaded(f"{use}: expected a name in snake_case in its meta, not {meta.name!r}")
    if meta.name in used_names:
        raise RuleNotLoaded(f"{use}: {meta.name!r} is a built-in rule: use another name")
    if not (isinstance(meta.params, type) and issubclass(meta.params, Params)):
        raise RuleNotLoaded(f"{use}: expected a subclass of Params as `params` of its meta")
    if not isinstance(getattr(rule, "state_type", None), type):
        raise RuleNotLoaded(f"{use} has no `state_type`: expected a dataclass", "state_type = …")
    return rule


def _try_out(spec: RuleSpec) -> None:
    """Make one, and its state into bytes and back, as each checkpoint does."""
    use = f"{spec.rule.__module__}.{spec.rule.__qualname__}"
    use = spec.rule.__qualname__ if use.startswith("tocsin_custom_") else use
    try:
        made = spec.build()
        load_state(type(made.state), dump_state(made.state))
        made.restore(made.snapshot())
    except Exception as error:
        why = _error_text(error)
        raise RuleNotLoaded(f"{use}: its state cannot be saved and restored: {why}") from error
