"""One rule instance at work for one run: its isolation against exceptions, episodes, snapshot."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tocsin.schemas.errors import MalformedRecord
from tocsin.schemas.ids import issue_id
from tocsin.schemas.records.events import clip
from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Subject
from tocsin.schemas.records.run_view import RuleStatus
from tocsin.schemas.topics import MAX_RECORD_BYTES
from tocsin.stream_rules.engine.causes import Attribution, Known
from tocsin.stream_rules.engine.episodes import Episodes, Reported
from tocsin.stream_rules.engine.packing import pack, unpack
from tocsin.stream_rules.engine.rule_spec import RuleSpec
from tocsin.stream_rules.engine.rule_times import RuleTimes
from tocsin.stream_rules.outcomes import Finding, Holds, Moment, Outcome
from tocsin.stream_rules.reading.restarts import Fault
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.rule import AnyRule, Rule
from tocsin.stream_rules.rules.about_rules.rule_failed import RuleFailed

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")

MAX_STATE_BYTES: Final = MAX_RECORD_BYTES - 64 * 1024
"""Of a rule's state for one run: more than that is no record of the bus, and could not be saved."""


@dataclass(slots=True)
class _Shell:
    """What the engine remembers of an instance, beside the rule's own state. `untold` is its
    `unreported`, in a snapshot.

    Of a rule that reads by parts: which rank the rule itself reads, for a snapshot the bytes of its
    copies by rank, and which ranks have found what is open, by `about`.
    """

    episodes: Episodes = field(default_factory=Episodes)
    input_seen: bool = False
    failed: str | None = None
    untold: bool = False
    cold: bool = False
    cold_from: int | None = None
    part: int | None = None
    copies: dict[int, int] = field(default_factory=dict)
    found_by: dict[str, list[int]] = field(default_factory=dict)


class StateTooLarge(Exception):
    """A rule remembers more of a run than can be saved."""


class RuleHangs(Exception):
    """A call into a rule did not return."""


class Instance:
    """A rule of one run and incarnation.

    `covers` is the offset below which records are in its state already, after a restore; `touched`
    whether the state may have changed since it was saved or restored; `unreported` whether it
    failed where no issue could be returned: `report_failure` has it; `in_call` is the moment
    of a call into the rule that has not returned.
    """

    def __init__(self, spec: RuleSpec, times: RuleTimes | None = None) -> None:
        self.spec: Final = spec
        self._times: Final = times
        self.rule: AnyRule = spec.build()
        self.covers = 0
        self.touched = True
        self.unreported = False
        self.in_call: Moment | None = None
        self._shell = _Shell()
        self._copies: dict[int, AnyRule] = {}
        self._read: Collection[int] | None = None

    @property
    def version(self) -> int:
        """The rule's version."""
        return self.spec.rule.meta.version

    @property
    def found(self) -> int:
        """Episodes so far, its own failure included."""
        return self._shell.episodes.found + (self._shell.failed is not None)

    @property
    def failed(self) -> bool:
        """Whether it raised, and is quarantined for this run."""
        return self._shell.failed is not None

    def release(self) -> bool:
        """Try the rule again that failed, with nothing of its state; whether it had failed."""
        if not self.failed:
            return False
        self.touched = True
        self.rule, self._copies, self._read = self.spec.build(), {}, None
        shell = self._shell
        shell.failed, shell.part, self.unreported = None, None, False
        shell.copies, shell.found_by = {}, {}
        return True

    def start_cold(self) -> bool:
        """Start in the middle of a run. Whether the rule depends on earlier records."""
        self._shell.cold = self.spec.rule.meta.history_steps > 0
        self.touched = True
        return self._shell.cold

    def _is_cold(self, at: Moment) -> bool:
        """Whether one that began in the middle has not seen enough since."""
        shell, step = self._shell, at.run.last_step
        if step is None:
            return True
        if shell.cold_from is None:
            shell.cold_from = step
        shell.cold = step - shell.cold_from < self.spec.rule.meta.history_steps
        return shell.cold

    def report_failure(self, at: Moment, *, fails_as: RuleSpec | None) -> list[Reported]:
        """The issue of a failure that was not reported yet, once."""
        why, self.touched = self._shell.failed, True
        self.unreported = False
        if why is None or fails_as is None:
            return []
        return [_failure(self.spec, fails_as, why, at)]

    @property
    def has_timer(self) -> bool:
        """Whether it may ever have a time at which it is due."""
        return type(self.rule).next_due_ms is not Rule.next_due_ms

    def due_ms(self) -> int | None:
        """When its timer is due."""
        if self.failed:
            return None
        try:
            return self.rule.next_due_ms()
        except Exception as error:
            self._fail_unreported(error)
            return None

    def status(self, *, ended: bool, stopped: bool) -> RuleStatus:
        """What a reader sees of it."""
        if self.failed:
            return "error"
        if self._shell.episodes.found:
            return "issues_found"
        if not self._shell.input_seen and self.spec.rule.meta.inputs:
            return "waiting_for_input"
        if not ended:
            return "in_progress"
        return "stopped" if stopped else "no_issues_found"

    def reads(self, frame: TensorFrame) -> bool:
        """Whether the rule does anything with a summary; one that raises is called, and fails."""
        try:
            return self.rule.reads(frame)
        except Exception:
            return True

    def call(
        self,
        method: Callable[[AnyRule], Iterable[Outcome]],
        at: Moment,
        *,
        fails_as: RuleSpec | None,
        input_seen: bool = True,
        part: int | None = None,
        scalars_of: int | None = None,
    ) -> list[Reported]:
        """Let the rule take something in. It may raise: then it is quarantined for this run.

        `fails_as` is the instance of `rule_failed` that reports it; None: it is off. `part`
        is the rank whose summaries it takes in, if it is some; `scalars_of` that whose scalars it
        takes in, where they concern no other part.
        """
        spec, shell, times = self.spec, self._shell, self._times
        if shell.failed is not None:
            return []
        self.touched = True
        shell.input_seen |= input_seen
        try:
            began_s = 0.0 if times is None else times.start()
            self.in_call = at
            if spec.rule.by_part:
                outcomes = self._by_part(method, at, part, scalars_of)
            else:
                outcomes = list(method(self.rule))
            self.in_call = None
            if times is not None:
                times.end(spec.name, began_s)
        except Exception as error:
            self.in_call = None
            why = self._quarantine(error)
            return [_failure(spec, fails_as, why, at)] if fails_as is not None else []
        cold = shell.cold and self._is_cold(at)
        # A rule is called for each record of each rank, and nearly always has found nothing.
        if not outcomes and not shell.episodes.open:
            return []
        taken = (
            shell.episodes.apply(
                outcome,
                at,
                name=spec.name,
                meta=spec.rule.meta,
                severity=spec.severity,
                held=cold,
            )
            for outcome in outcomes
        )
        reported = [one for one in taken if one is not None]
        for one in reported:
            shell.episodes.note_fault(one.issue)
        return [*reported, *shell.episodes.settle(at, name=spec.name, meta=spec.rule.meta)]

    def _by_part(
        self,
        method: Callable[[AnyRule], Iterable[Outcome]],
        at: Moment,
        part: int | None,
        scalars_of: int | None,
    ) -> list[Outcome]:
        """What the rule and its copies have found: of a part, or each of what concerns all.

        With one copy for each of many ranks, scalars of all ranks in each of them would cost the
        square of these.
        """
        read = at.run.ranks_read()
        if part is not None:
            reader = self._reader(part, read)
            return self._together(part, method(reader), read)
        if self._copies and read is not self._read:
            for gone in [rank for rank in self._copies if rank not in read]:
                del self._copies[gone]
            self._read = read
        outcomes = self._together(self._shell.part or 0, method(self.rule), read)
        if scalars_of is None:
            copies = list(self._copies.items())
        else:
            copies = [(scalars_of, self._copies[scalars_of])] if scalars_of in self._copies else []
        for rank, copy in copies:
            outcomes += self._together(rank, method(copy), read)
        return outcomes

    def _reader(self, part: int, read: Collection[int]) -> AnyRule:
        """The rule that reads the part of that rank."""
        shell = self._shell
        if part in self._copies:
            return self._copies[part]
        mine = shell.part
        # A lower rank with the same names leads from now on.
        if mine is None or mine == part or (part < mine and mine not in read):
            shell.part = part
            return self.rule
        copy = self._copies[part] = self.spec.build()
        copy.restore_for_another_part(self.rule.snapshot())
        return copy

    def _together(
        self, rank: int, outcomes: Iterable[Outcome], read: Collection[int]
    ) -> list[Outcome]:
        """The outcomes of one reader as those of the rule: an episode is open for as long as any of
        them finds its condition, and is reported as the one does that found it first."""
        found_by = self._shell.found_by
        kept: list[Outcome] = []
        for outcome in outcomes:
            ranks = found_by.get(outcome.about, [])
            if isinstance(outcome, Finding):
                if rank not in ranks:
                    found_by[outcome.about] = ranks = [*ranks, rank]
                graver = self._shell.episodes.is_graver(outcome, self.spec.rule.meta)
                kept.append(outcome if ranks[0] == rank or graver else Holds(about=outcome.about))
            elif isinstance(outcome, Holds):
                kept += [outcome] if not ranks or rank in ranks else []
            else:
                left = [one for one in ranks if one != rank and one in read]
                if left:
                    found_by[outcome.about] = left
                else:
                    found_by.pop(outcome.about, None)
                    kept.append(outcome)
        return kept

    def attribute(self, found: Attribution, reported: Reported, at: Moment) -> Reported | None:
        """An issue of it is the consequence of another. `reported` is what made that known: the
        issue itself, which then names its cause, or the cause, and the issue is published again.

        None: it is another's, or is over.
        """
        episode = self._shell.episodes.attribute(found)
        if episode is None:
            return None
        self.touched = True
        if reported.issue.issue_id == found.issue:
            evidence = reported.issue.evidence.model_copy(update={"cause": clip(found.why)})
            update = {
                "consequence_of": found.cause,
                "evidence": evidence,
                "remedy": episode.advice,
            }
            return replace(reported, issue=reported.issue.model_copy(update=update))
        meta = self.spec.rule.meta
        return self._shell.episodes.repeat(episode, at, name=self.spec.name, meta=meta)

    @property
    def faults(self) -> Sequence[Fault]:
        """Its first issue that was worth a stop, of each incarnation."""
        return self._shell.episodes.faults

    def remember(self, faults: Iterable[Fault]) -> None:
        """Begin with the faults of earlier incarnations."""
        self._shell.episodes.faults = list(faults)
        self.touched = True

    def open_issues(self) -> list[Known]:
        """The instance's open issues that may have a cause."""
        name = self.spec.rule.meta.name
        return [episode.known(name) for episode in self._shell.episodes.open.values()]

    def snapshot(self) -> bytes:
        """The instance's state as the payload of a snapshot record."""
        packed = pack(self._state())
        if len(packed) <= MAX_STATE_BYTES or self.failed:
            return packed
        size, limit = f"{len(packed):,} bytes", f"{MAX_STATE_BYTES:,}"
        self._fail_unreported(
            StateTooLarge(f"its state has {size}, more than {limit} cannot be saved")
        )
        self._shell.copies = {}
        return pack(self._state())

    def abandon(self) -> bytes:
        """Quarantine the rule though a call into it has not returned; its state as the payload of a
        snapshot record. From any thread. The process must not use the instance any more."""
        self._fail_unreported(RuleHangs("a call into it did not return"))
        self._shell.copies = {}
        return pack(self._state())

    def _state(self) -> bytes:
        own = b""
        if not self.failed:
            try:
                copies = {rank: copy.snapshot() for rank, copy in self._copies.items()}
                self._shell.copies = {rank: len(state) for rank, state in copies.items()}
                own = b"".join([*copies.values(), self.rule.snapshot()])
            except Exception as error:
                self._fail_unreported(error)
                self._shell.copies = {}
        self._shell.untold = self.unreported
        shell = dump_state(self._shell)
        return _LENGTH.pack(len(shell)) + shell + own

    def restore(self, payload: bytes, *, covers: int, version: int | None = None) -> None:
        """Take a snapshot back, of another `version` of the rule if it can read that. Raises
        MalformedRecord, and is then as it was."""
        migrates = version is not None and version != self.version

        def read(rule: AnyRule, payload: bytes) -> None:
            if migrates and version is not None:
                rule.migrate(payload, version)
            else:
                rule.restore(payload)

        payload = unpack(payload)
        if len(payload) < _LENGTH.size:
            raise MalformedRecord("snapshot of a rule is shorter than its length field")
        (length,) = _LENGTH.unpack_from(payload)
        start = _LENGTH.size + length
        shell = load_state(_Shell, payload[_LENGTH.size : start])
        copies: dict[int, AnyRule] = {}
        if shell.failed is None:
            for rank, size in shell.copies.items():
                copies[rank] = self.spec.build()
                read(copies[rank], payload[start : start + size])
                start += size
            read(self.rule, payload[start:])
        self._shell, self._copies, self._read = shell, copies, None
        self.unreported = shell.untold
        self.covers, self.touched = covers, migrates

    def _fail_unreported(self, error: Exception) -> None:
        self._quarantine(error)
        self.unreported = True

    def _quarantine(self, error: Exception) -> str:
        logger.error(
            "rule failed, quarantined for this run",
            exc_info=error,
            extra={"action": "rules", "rule": self.spec.name},
        )
        why = clip(f"{type(error).__name__}: {error}", 500)
        self._shell.failed, self.touched = why, True
        return why


def _failure(spec: RuleSpec, fails_as: RuleSpec, why: str, at: Moment) -> Reported:
    meta = RuleFailed.meta
    run = at.run
    issue = IssueFiring(
        run_id=run.run_id,
        incarnation=run.incarnation,
        rank=at.rank,
        world_size=run.world_size,
        issue_id=issue_id(
            run.run_id,
            run.incarnation,
            fails_as.name,
            meta.version,
            f"{spec.name}|{at.boot}/{at.seq}",
        ),
        rule=fails_as.name,
        use=meta.name,
        rule_version=meta.version,
        severity=fails_as.severity or meta.severity,
        subject=Subject(kind="rule", name=spec.name),
        reason=clip(f"rule {spec.name} failed and is off for the rest of this run: {why}", 1000),
        remedy=meta.remedy,
        step=run.last_step,
        onset_ms=at.now_ms,
        at_ms=at.now_ms,
        labels=dict(run.labels),
        evidence=Evidence(facts=(Fact(name="error", value=clip(why, 500)),)),
    )
    return Reported(issue, 0)
