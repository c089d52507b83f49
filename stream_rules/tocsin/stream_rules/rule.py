"""What a rule is: values that describe it, and five kinds of call that it may answer.

A rule sees one run. It is told what its `inputs` name, record by record, and yields outcomes: the
condition holds (`Finding`), still holds (`Holds`), does not hold (`Clear`). Everything else,
episodes and ids, states and repeats, is the engine's.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tocsin.schemas.records.frames import Mode, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Severity
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Moment, Outcomes
from tocsin.stream_rules.reading.state_codec import dump_state, load_state

if TYPE_CHECKING:
    from tocsin.stream_rules.reading.other_runs import References


MINUTE_MS: Final = 60_000

Family = Literal["numerical", "progress", "data", "large_models", "system", "trees", "about_rules"]


class Params(BaseModel):
    """Base of the parameter models: frozen, strict, and unknown names are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


_PATTERN: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Input:
    """One kind of telemetry that a rule reads.

    `kind` says which records: `scalar` (a column of the step scalars, in `mode`), `tensors` (a
    collection, in `mode`), `system` (a column of the system samples), `event` (an event type).
    `pattern` may have `*` and `?`. `beside`: of use only together with an input that is not; a rule
    that has seen nothing else watches nothing.
    """

    kind: Literal["scalar", "tensors", "system", "event"]
    pattern: str
    mode: Mode | None = "train"
    beside: bool = False

    def fits(self, name: str) -> bool:
        """Whether a column, collection or event type is meant."""
        return self.pattern == name or fnmatchcase(name, self.pattern)

    def fits_any(self, names: Set[str]) -> bool:
        """Whether one of them is meant; a plain name is looked up, however many there are."""
        if self.pattern in names:
            return True
        if not _PATTERN.search(self.pattern):
            return False
        return any(fnmatchcase(name, self.pattern) for name in names)

    def __str__(self) -> str:
        where = f" in {self.mode}" if self.mode in ("eval", "predict", "global") else ""
        return f"{self.kind} {self.pattern}{where}"


def scalar(pattern: str, mode: Mode | None = "train", *, beside: bool = False) -> Input:
    """A column of the step scalars; `mode` None: in any mode."""
    return Input("scalar", pattern, mode, beside)


def tensors(pattern: str, mode: Mode | None = "train", *, beside: bool = False) -> Input:
    """A collection of tensor summaries; `mode` None: in any mode.

    What an evaluation shows does not compare with what training does: a rule is given one of them,
    unless it asks for both.
    """
    return Input("tensors", pattern, mode, beside)


def system(pattern: str, *, beside: bool = False) -> Input:
    """A column of the system samples."""
    return Input("system", pattern, None, beside)


def event(model: type[RunData], *, beside: bool = False) -> Input:
    """A type of event."""
    return Input("event", model.event_type, None, beside)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMeta:
    """What the catalogue, the documentation and the engine know of a rule.

    Attributes:
        name: snake_case.
        version: part of each issue's id: raised when the same data would give other issues.
        meaning: one sentence.
        severity: of its findings, unless a finding or the configuration says otherwise.
        stop_worthy: whether a critical issue of it may stop the run by default.
        inputs: what it reads; it has input once any of them was seen that is not `beside`.
        comes: when the input of a run comes: in the first steps of every run ("always"), in the
            first steps or not at all ("maybe": not every run has an optimizer of PyTorch), or at
            any time, if at all ("later": an evaluation, a GPU). Whether and when its absence is
            worth a word.
        capture_hint: how to capture what is missing.
        remedy: what to try, one or two sentences.
        alias: the name of the same rule in SageMaker Debugger.
        params: its parameter model.
        presets: other values of the parameters under a name; "sagemaker": what SageMaker Debugger
            documents for the rule of that alias.
        branches: what each of its conditions means, by the word that its findings have as `branch`.
        by_default: whether it runs where the configuration does not list it; False for a rule that
            must be told what to watch.
        stops_because: why a critical issue of it is worth a stop.
        history_steps: how many steps of its past it judges by: so many it must see anew after its
            state was lost, before what it finds may stop a run. 0: it is as sure without.
        does_not_see: what like its condition it does not find, for the documentation.
        repeat_ms: `ongoing` at most this often, in append time, milliseconds.
        resolve_after_steps: resolved when the condition was false for so many steps; 0: at once.
    """

    name: str
    version: int
    family: Family
    meaning: str
    severity: Severity
    inputs: tuple[Input, ...]
    remedy: str
    params: type[Params]
    presets: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    branches: Mapping[str, str] = field(default_factory=dict)
    by_default: bool = True
    comes: Literal["always", "maybe", "later"] = "always"
    stop_worthy: bool = False
    stops_because: str = ""
    history_steps: int = 100
    does_not_see: str = ""
    capture_hint: str = ""
    alias: str | None = None
    repeat_ms: int = 10 * MINUTE_MS
    resolve_after_steps: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a rule about rules knows of another instance."""

    name: str
    inputs: tuple[Input, ...]
    capture_hint: str
    listed: bool
    comes: Literal["always", "maybe", "later"] = "always"
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def labels_fit(match: Mapping[str, tuple[str, ...]], labels: Mapping[str, str]) -> bool:
    """Whether each label that `match` names is there, and like one of its patterns."""
    return all(
        key in labels and any(fnmatchcase(labels[key], pattern) for pattern in patterns)
        for key, patterns in match.items()
    )


P = TypeVar("P", bound=Params)
S = TypeVar("S")


class Rule(ABC, Generic[P, S]):
    """One instance of a rule, for one run.

    All methods run in one thread, must be quick (milliseconds) and must not block. They may raise:
    the instance is then quarantined for this run, and the others go on. The same calls in the same
    order must give the same outcomes: no clock, no chance, no I/O.

    A subclass is `class MyRule(Rule[MyParams, MyState])` with `meta` and `state_type`, a dataclass
    whose fields pydantic can write as JSON and read back; all that it remembers is in `self.state`.
    """

    meta: ClassVar[RuleMeta]
    state_type: ClassVar[type[Any]]
    by_part: ClassVar[bool] = False
    """Whether it reads the summaries of one rank. The engine then gives it those of the lowest rank
    that has their names; where other ranks have parts of the model, a copy of the rule reads each,
    and all of them have the same episodes."""

    def __init__(self, name: str, params: P) -> None:
        self.name = name
        self.params = params
        self.state: S = self.state_type()

    def beside(self, watched: tuple[Watched, ...]) -> None:
        """Called once, before anything else, with all instances of the run. For rules on rules."""

    def other_runs(self) -> Sequence[str]:
        """The ids of other runs that this one is compared with, by its parameters."""
        return ()

    def on_references(self, references: References) -> None:
        """Called once, before anything of the run, if it names `other_runs`: what is known of them,
        now and from then on. Read only."""

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        """Scalars of some steps of one rank; the frame has a column that `inputs` name."""
        return ()

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        """Summaries of a collection that `inputs` name, at one step of one rank."""
        return ()

    def looks_at(self, frame: TensorFrame) -> bool:
        """Whether `on_tensors` does anything with a frame; asked before, and where it reads by
        part, no copy is made for the rank if not."""
        return True

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        """System samples of one node."""
        return ()

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        """An event that `inputs` name. The end of a rank or of the run comes to every rule."""
        return ()

    def on_timer(self, at: Moment) -> Outcomes:
        """`next_due_ms` has come; `at.now_ms` is exactly that time, live as in replay."""
        return ()

    def next_due_ms(self) -> int | None:
        """When `on_timer` is to be called, in append time, Unix milliseconds; None: not."""
        return None

    def grace_ms(self) -> int:
        """How long a live worker must have been without lag before the timer may fire.

        For rules that draw conclusions from silence; replay needs none, its records are the proof.
        """
        return 0

    def snapshot(self) -> bytes:
        """All that the rule remembers; `restore` gives it back bit for bit."""
        return dump_state(self.state)

    def restore(self, payload: bytes) -> None:
        """Take back a snapshot of the same rule version.

        Raises:
            MalformedRecord: it is not one.
        """
        self.state = load_state(self.state_type, payload)


AnyRule = Rule[Any, Any]
