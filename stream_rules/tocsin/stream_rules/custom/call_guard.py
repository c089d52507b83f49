"""The child's isolation around each call of a custom rule: marked, measured, perhaps refused.

A call that never returns is ended from outside, by the worker's `host`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from tocsin.schemas.errors import MalformedRecord, TocsinError
from tocsin.schemas.records.frames import StepFrame, SystemFrame, TensorFrame
from tocsin.schemas.records.runs import RunData
from tocsin.stream_rules.custom.current_call import Marker
from tocsin.stream_rules.custom.protocol import DisabledRule, Used
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.outcomes import Moment, Outcome
from tocsin.stream_rules.rule import AnyRule, Params, Rule

T = TypeVar("T")


class RuleEnded(TocsinError):
    """The rule has made the process of the custom rules unusable, and is not called again."""


class OutOfMemory(BaseException):
    """The process has reached its limit; `culprit` is the run and rule that took most of it."""

    def __init__(self, culprit: tuple[str, str] | None) -> None:
        super().__init__("out of memory")
        self.culprit = culprit


class Guard:
    """Where in the telemetry the child stands, and what each rule has used. One per child."""

    def __init__(self, marker: Marker, disabled: Iterable[DisabledRule], memory_bytes: int) -> None:
        self.run_id = ""
        self.partition = 0
        self.offset = -1
        self._marker = marker
        self._memory_bytes = memory_bytes
        self._disabled: dict[tuple[str, str | None], DisabledRule] = {
            (one.rule, one.run_id): one for one in disabled
        }
        self._seconds: dict[tuple[str, str], float] = {}
        self._grown: dict[tuple[str, str], int] = {}
        self._memory = _Memory()

    def at(self, run_id: str, partition: int, offset: int) -> None:
        """What follows is about this run, at this record."""
        self.run_id, self.partition, self.offset = run_id, partition, offset

    def refused(self, rule: str, run_id: str, born: int) -> str | None:
        """Why a rule must not be called now; None: it may be.

        `born`: the offset at which the instance was made. A rule that was disabled at an earlier
        record may be called again: that was in the training before.
        """
        everywhere = self._disabled.get((rule, None))
        if everywhere is not None:
            return everywhere.why
        found = self._disabled.get((rule, run_id))
        if found is None or (found.offset >= 0 and born > found.offset):
            return None
        if self.offset < found.offset:
            return None
        # The engine does not call this instance again; one of the next training it may.
        del self._disabled[rule, run_id]
        return found.why

    def call(self, names: tuple[str, str, bytes, bytes], made: Callable[[], T]) -> T:
        """Call into a rule; `names` are the run's and the rule's, and both as UTF-8.

        Raises:
            OutOfMemory: it, or another before it, has used up the memory.
        """
        run_id, rule, run_bytes, rule_bytes = names
        before = self._memory.now()
        began = time.perf_counter()
        self._marker.start(rule_bytes, run_bytes, self.partition, self.offset)
        try:
            return made()
        except MemoryError:
            culprit = self.culprit()
            if culprit is None:
                # One request was too large, and nothing was taken: an error like others.
                raise
            raise OutOfMemory(culprit) from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise RuntimeError(f"it raised {type(error).__name__}") from error
        finally:
            self._marker.end()
            key = (run_id, rule)
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - began
            self._grown[key] = self._grown.get(key, 0) + self._memory.now() - before

    def culprit(self) -> tuple[str, str] | None:
        """In whose calls the memory has grown by a good part of the limit, most of all."""
        if not self._grown:
            return None
        most = max(self._grown, key=lambda key: self._grown[key])
        return most if 4 * self._grown[most] >= self._memory_bytes else None

    def used(self) -> tuple[Used, ...]:
        """What was used since this was asked last."""
        seconds, self._seconds = self._seconds, {}
        return tuple(
            Used(run_id=run_id, rule=rule, seconds=spent)
            for (run_id, rule), spent in seconds.items()
        )


class _Memory:
    """The resident memory of this process, bytes; 0 where there is no `/proc`."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        try:
            self._fd: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def now(self) -> int:
        if self._fd is None:
            return 0
        return int(os.pread(self._fd, 80, 0).split(b" ", 2)[1]) * self._page


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedSpec(RuleSpec):
    """Makes instances behind the guard."""

    guard: Guard

    def build(self) -> AnyRule:
        return Guarded(self, self.guard)


class Guarded(Rule[Params, None]):
    """A rule behind the guard: all calls of the engine go through it."""

    def __init__(self, spec: RuleSpec, guard: Guard) -> None:
        self.name = spec.name
        self.params = spec.params
        self._guard: Final = guard
        # It is made while the guard stands at its run.
        self._run_id = guard.run_id
        self._born = guard.offset
        self._names = (self._run_id, self.name, self._run_id.encode(), self.name.encode())
        self._rule: AnyRule | None = None
        self._failed: Exception | None = None
        self._spec = spec
        try:
            self._made()
        except Exception as error:
            # Told at the next call, where the engine can hold it.
            self._failed = error

    def _made(self) -> AnyRule:
        if self._failed is not None:
            raise self._failed
        why = self._guard.refused(self.name, self._run_id, self._born)
        if why is not None:
            self._failed = RuleEnded(why)
            raise self._failed
        if self._rule is None:
            spec = self._spec
            self._rule = self._guard.call(self._names, lambda: RuleSpec.build(spec))
        return self._rule

    def _outcomes(self, method: Callable[[AnyRule], Iterable[Outcome]]) -> list[Outcome]:
        rule = self._made()
        return self._guard.call(self._names, lambda: list(method(rule)))

    def on_steps(self, frame: StepFrame, at: Moment) -> Iterable[Outcome]:
        return self._outcomes(lambda rule: rule.on_steps(frame, at))

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Iterable[Outcome]:
        return self._outcomes(lambda rule: rule.on_tensors(frame, at))

    def reads(self, frame: TensorFrame) -> bool:
        rule = self._made()
        return self._guard.call(self._names, lambda: rule.reads(frame))

    def on_system(self, frame: SystemFrame, at: Moment) -> Iterable[Outcome]:
        return self._outcomes(lambda rule: rule.on_system(frame, at))

    def on_event(self, data: RunData, at: Moment) -> Iterable[Outcome]:
        return self._outcomes(lambda rule: rule.on_event(data, at))

    def on_timer(self, at: Moment) -> Iterable[Outcome]:
        return self._outcomes(lambda rule: rule.on_timer(at))

    def next_due_ms(self) -> int | None:
        rule = self._made()
        return self._guard.call(self._names, rule.next_due_ms)

    def grace_ms(self) -> int:
        # The engine asks for it outside its isolation: an error is raised at the next call.
        try:
            rule = self._made()
            return self._guard.call(self._names, rule.grace_ms)
        except Exception as error:
            self._failed = error
            return 0

    def snapshot(self) -> bytes:
        rule = self._made()
        return self._guard.call(self._names, rule.snapshot)

    def restore(self, payload: bytes) -> None:
        self._set_state(lambda rule: rule.restore(payload))

    def restore_for_another_part(self, payload: bytes) -> None:
        self._set_state(lambda rule: rule.restore_for_another_part(payload))

    def migrate(self, payload: bytes, version: int) -> None:
        self._set_state(lambda rule: rule.migrate(payload, version))

    def _set_state(self, method: Callable[[AnyRule], None]) -> None:
        try:
            rule = self._made()
            self._guard.call(self._names, lambda: method(rule))
        except MalformedRecord:
            raise
        except Exception as error:
            self._failed = error
