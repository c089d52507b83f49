"""Services with custom rules, as tests want them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.waiting import HANGS_S
from tocsin.bus.port import Record
from tocsin.runtime.service import Attachment, Tick
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.topics import Topics
from tocsin.stream_rules.custom.call_limits import MEBIBYTE, Limits
from tocsin.stream_rules.custom.host import CustomHost
from tocsin.stream_rules.engine.configured_rules import custom_entries, rule_specs
from tocsin.stream_rules.engine.episodes import Reported
from tocsin.stream_rules.service import RulesService

FILE = Path(__file__).with_name("sick_rules.py")
QUICK = Limits(call_s=3.0, call_cpu_s=0.5, behind_s=2.0, memory_bytes=96 * MEBIBYTE, save_s=0.05)


def entries(*rules: str) -> tuple[RuleEntry, ...]:
    """The entries of a configuration with these, like `{name: mine, use: FILE:HighLoss}`."""
    listed = "".join(f"- {rule.replace('FILE', str(FILE))}\n" for rule in rules)
    text = f"version: 1\nrules:\n{listed}"
    config, problems = check_config(text, "test")
    assert config is not None, problems
    return config.rules


class Customs:
    """A service with custom rules, driven by hand as a worker does."""

    def __init__(self, *rules: str, limits: Limits = QUICK) -> None:
        listed = entries(*rules)
        failing = next(spec for spec in rule_specs() if spec.name == "rule_failed")
        self.host = CustomHost(
            custom_entries(listed), Path.cwd(), failing=failing, software="test", limits=limits
        )
        loaded = self.host.start()
        assert not loaded.problems, loaded.problems
        specs = rule_specs(listed, customs=loaded.specs)
        self.service = RulesService(Topics(), specs, customs=self.host)
        self.told: list[Reported] = []
        self._nudged = threading.Event()
        self.service.attached(Attachment(nudge=self._nudged.set))
        self._number = 0
        self._now_ms = 0

    def give(self, records: Sequence[Record]) -> None:
        """A round with these records."""
        if records:
            self._number = records[0].partition.number
            self._now_ms = records[-1].append_ms
        self.service.apply(records, Tick(self._now_ms, frozenset([self._number])))
        self.told += self.service._reported
        self.service._reported.clear()

    def settle(self, timeout_s: float = HANGS_S) -> list[Reported]:
        """Rounds until all is answered. Everything told so far."""
        deadline = time.monotonic() + timeout_s
        while not self.service.settled():
            assert time.monotonic() < deadline, "not settled in time"
            self._nudged.wait(0.05)
            self._nudged.clear()
            self.give([])
        self.give([])
        return self.told

    def issues(self, rule: str) -> list[IssueFiring]:
        """Those that fire, of one rule."""
        found = [told.issue for told in self.told]
        return [issue for issue in found if issue.rule == rule and issue.state == "firing"]

    def failures(self) -> dict[str, str]:
        """What was said of rules that failed, by their names."""
        return {issue.subject.name: issue.reason for issue in self.issues("rule_failed")}

    def statuses(self, run_id: str = "made") -> dict[str, str]:
        """Those that the child has saved."""
        run = self.host.run(self._number, run_id)
        return {} if run is None else dict(run.statuses)


@contextmanager
def customs(*rules: str, limits: Limits = QUICK) -> Iterator[Customs]:
    """A service with these custom rules, ended at the end."""
    made = Customs(*rules, limits=limits)
    try:
        yield made
    finally:
        made.host.close()
