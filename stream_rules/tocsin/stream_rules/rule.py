"""What a rule is: values that describe it, and five kinds of call that it may answer.

A rule sees one run. It receives what its `inputs` name, record by record, and yields outcomes: the
condition is true (`Finding`), still true (`Holds`), or false (`Clear`). The engine does the rest:
episodes, ids, states, repeats.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import ConfigDict

from tocsin.schemas.configuration.docstrings import Documented
from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.records.frames import Mode, StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.issues import Severity
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.outcomes import Moment, Outcomes
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.reading.tensor_rows import reset_ranks

if TYPE_CHECKING:
    from tocsin.stream_rules.reading.other_runs import References


MINUTE_MS: Final = 60_000

Family = Literal["numerical", "progress", "data", "large_models", "system", "trees", "about_rules"]


class Params(Documented):
    """Base class of a rule's parameters: a frozen, strict pydantic model without unknown names."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


_PATTERN: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Input:
    """One kind of telemetry that a rule reads.

    Attributes:
        kind: `scalar` (a column of the step scalars), `tensors` (a collection), `system` (a column
            of the system samples) or `event` (an event type).
        pattern: its name; may contain `*` and `?`.
        mode: of scalars and tensors: in which mode of the model. None: in any.
        optional: useful only together with another input. A rule that has seen only such inputs has
            no input.
    """

    kind: Literal["scalar", "tensors", "system", "event"]
    pattern: str
    mode: Mode | None = "train"
    optional: bool = False

    def fits(self, name: str) -> bool:
        """Whether the pattern matches a column, collection or event type."""
        return self.pattern == name or fnmatchcase(name, self.pattern)

    def fits_any(self, names: Set[str]) -> bool:
        """Whether the pattern matches one of them. A plain name takes one look-up."""
        if self.pattern in names:
            return True
        if not _PATTERN.search(self.pattern):
            return False
        return any(fnmatchcase(name, self.pattern) for name in names)

    def __str__(self) -> str:
        where = f" in {self.mode}" if self.mode in ("eval", "predict", "global") else ""
        return f"{self.kind} {self.pattern}{where}"


def scalar(pattern: str, mode: Mode | None = "train", *, optional: bool = False) -> Input:
    """An input: a column of the step scalars, such as `loss`. `mode` None: in any mode."""
    return Input("scalar", pattern, mode, optional)


def tensors(pattern: str, mode: Mode | None = "train", *, optional: bool = False) -> Input:
    """An input: a collection of tensor summaries, such as `gradients`. `mode` None: in any mode.

    Summaries of an evaluation are not comparable with those of training, so a rule gets only one
    kind unless it requests both.
    """
    return Input("tensors", pattern, mode, optional)


def system(pattern: str, *, optional: bool = False) -> Input:
    """An input: a column of the system samples, such as `cpu.percent`."""
    return Input("system", pattern, None, optional)


def event(model: type[RunData], *, optional: bool = False) -> Input:
    """An input: a type of event, such as a checkpoint."""
    return Input("event", model.event_type, None, optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMeta:
    """Description of a rule, for the engine, the catalogue and the documentation.

    Attributes:
        name: snake_case.
        version: part of each issue's id; increase it when the same data would give other issues.
        meaning: one sentence.
        severity: severity of its findings, unless a finding or the configuration overrides it.
        stop_worthy: whether its critical issues stop the run by default.
        inputs: what it reads. The rule has input once it has seen one that is not `optional`.
        available: when a run provides this input: in the first steps of every run ("always"), in
            the first steps or never ("maybe": not every run has a PyTorch optimizer), or at any
            time or never ("later": an evaluation, a GPU). Decides whether missing input is
            reported.
        capture_hint: how to capture missing input.
        remedy: what to try, in one or two sentences.
        alias: name of the same rule in SageMaker Debugger.
        params: model of its parameters.
        presets: named sets of parameters; "sagemaker" has those that SageMaker Debugger documents.
        branches: the meaning of each of its conditions, by the `branch` of its findings.
        by_default: whether it runs without being listed in the configuration; False for rules that
            need parameters.
        stops_because: why a critical issue is worth a stop.
        history_steps: number of past steps on which its findings depend. After a loss of its state,
            findings do not stop a run before the rule has seen that many again.
        does_not_see: similar conditions that it does not find, for the documentation.
        repeat_ms: shortest time between two `ongoing` records, in append time, milliseconds.
        resolve_after_steps: an issue resolves after this many steps without its condition; 0: at
            once.
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
    available: Literal["always", "maybe", "later"] = "always"
    stop_worthy: bool = False
    stops_because: str = ""
    history_steps: int = 100
    does_not_see: str = ""
    capture_hint: str = ""
    alias: str | None = None
    repeat_ms: int = 10 * MINUTE_MS
    resolve_after_steps: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """Another rule instance of the run, as a rule about rules sees it."""

    name: str
    inputs: tuple[Input, ...]
    capture_hint: str
    listed: bool
    available: Literal["always", "maybe", "later"] = "always"
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


P = TypeVar("P", bound=Params)
S = TypeVar("S")


class Rule(ABC, Generic[P, S]):
    """Base class of rules. One object is one instance of a rule, for one run.

    All methods run in one thread, must be fast (milliseconds) and must not block. If one raises,
    the instance is switched off for this run; others continue. The same calls in the same order
    must give the same outcomes: no clock, no random numbers, no I/O.

    A subclass is `class MyRule(Rule[MyParams, MyState])` with `meta` and `state_type`: a dataclass
    whose fields pydantic can write to JSON and read back. A rule keeps its whole state in
    `self.state`.
    """

    meta: ClassVar[RuleMeta]
    state_type: ClassVar[type[Any]]
    by_part: ClassVar[bool] = False
    """Whether the rule reads the summaries of one rank. The engine passes those of the lowest rank
    that has their names; if other ranks have parts of the model, a copy of the rule reads each
    part, and all copies share their episodes."""
    by_presence: ClassVar[bool] = False
    """Whether the rule only asks which summaries came, not what is in them. It is also given those
    that a worker which cannot keep up leaves out."""

    def __init__(self, name: str, params: P) -> None:
        self.name = name
        self.params = params
        self.state: S = self.state_type()

    def other_instances(self, instances: tuple[InstanceFacts, ...]) -> None:
        """Called once, first, with all rule instances of the run. For rules about rules."""

    def other_runs(self) -> Sequence[str]:
        """The ids of other runs that the rule compares this run with."""
        return ()

    def on_references(self, references: References) -> None:
        """Called once, before any record of the run, if `other_runs` names any.

        Args:
            references: data of those runs, updated as they proceed. Read only.
        """

    def on_steps(self, frame: StepFrame, at: Moment) -> Outcomes:
        """Called with the scalars of some steps of one rank, if `inputs` names one of them."""
        return ()

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        """Called with the summaries of a collection in `inputs`, at one step of one rank."""
        return ()

    def reads(self, frame: TensorFrame) -> bool:
        """Whether `on_tensors` uses this frame. If not, it is not called, and a rule that reads by
        part needs no copy for the rank."""
        return True

    def on_system(self, frame: SystemFrame, at: Moment) -> Outcomes:
        """Called with system samples of one node."""
        return ()

    def on_event(self, data: RunData, at: Moment) -> Outcomes:
        """Called with an event in `inputs`. Every rule gets the end of a rank and of the run."""
        return ()

    def on_timer(self, at: Moment) -> Outcomes:
        """Called at the time that `next_due_ms` returned; `at.now_ms` is exactly that time."""
        return ()

    def next_due_ms(self) -> int | None:
        """When to call `on_timer`: append time, Unix milliseconds. None: never."""
        return None

    def grace_ms(self) -> int:
        """How long a worker must have had no lag before the timer may fire, milliseconds.

        For rules that draw conclusions from missing records. A replay has all records and needs no
        grace.
        """
        return 0

    def snapshot(self) -> bytes:
        """The whole state, as bytes. `restore` reads it back, bit for bit."""
        return dump_state(self.state)

    def restore(self, payload: bytes) -> None:
        """Set the state from a snapshot of the same rule version.

        Raises:
            MalformedRecord: the bytes are not such a snapshot.
        """
        self.state = load_state(self.state_type, payload)

    def restore_for_another_part(self, payload: bytes) -> None:
        """Set the state from a snapshot of the instance that reads another part of the model: as
        `restore`, but which rank it reads is open.

        Raises:
            MalformedRecord: the bytes are not such a snapshot.
        """
        self.restore(payload)
        reset_ranks(self.state)

    def migrate(self, payload: bytes, version: int) -> None:
        """Set the state from a snapshot of another version of the rule, after an upgrade or while
        workers of two releases share the runs. Without it, the rule starts cold, and reports that.

        Raises:
            MalformedRecord: it cannot be read.
        """
        raise MalformedRecord(f"version {self.meta.version} cannot read that of version {version}")


AnyRule = Rule[Any, Any]
