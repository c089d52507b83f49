"""`tocsin demo`: real trainings, healthy and going bad, watched as a user's own would be.

Nothing here knows the outcome. The trainings are started with `tocsin run`, the webhooks arrive
at a real receiver, and the closing table is read from the records on the bus.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tocsin.bus.port import Bus, Partition
from tocsin.bus.urls import open_bus
from tocsin.console.demo.mailbox import DemoMailbox
from tocsin.console.demo.timeline import Moment, TimelineEntry, timeline
from tocsin.console.demo.webhook_receiver import DemoReceiver
from tocsin.console.views.bus_view import read_all
from tocsin.schemas.errors import RecordError
from tocsin.schemas.exit_codes import STOPPED
from tocsin.schemas.process.own_python import python_command, python_environment
from tocsin.schemas.records.wire import decode, read_meta
from tocsin.schemas.topics import Topics, issue_partition, telemetry_partition

FAULT_STEP: Final = 40
DRAIN_S: Final = 60
"""How long the mail is waited for: drawing its first plot takes seconds on a busy machine."""

PAGE_AT: Final = "127.0.0.1:8470"
"""The default address of `tocsin serve`."""

HOOK_VARIABLE: Final = "TOCSIN_DEMO_HOOK_KEY"
_QUESTION: Final = re.compile(r"stop the job\? `tocsin (?P<words>approve \w+)`")
_TRAININGS: Final = "tocsin.console.demo.trainings"

ScenarioName = Literal["healthy", "nan", "diverge", "stall"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One training and what should become of it."""

    name: ScenarioName
    style: str
    says: str
    module: str
    arguments: tuple[str, ...]
    fault: str | None = None
    rule: str | None = None
    """Which rule should stop it; None: it should be left alone."""


def _resnet(name: ScenarioName, style: str, fault: str, says: str, rule: str) -> Scenario:
    """A ResNet on handwritten digits, 2,000 steps if nobody stops it."""
    length = ("--steps", "2000", "--print-every", "10")
    arguments = (*length, "--fault", fault, "--fault-at", str(FAULT_STEP))
    text = f"a ResNet learns handwritten digits; at step {FAULT_STEP} {says}"
    return Scenario(name, style, text, f"{_TRAININGS}.resnet", arguments, says, rule)


SCENARIOS: Final[Mapping[ScenarioName, Scenario]] = {
    "healthy": Scenario(
        "healthy",
        "green",
        "a small GPT learns English text; nothing is wrong with it",
        f"{_TRAININGS}.gpt",
        ("--steps", "200", "--print-every", "50"),
    ),
    "nan": _resnet("nan", "red", "nan_batch", "its batch holds a corrupt image, NaN", "nonfinite"),
    # Its stop asks first.
    "diverge": _resnet(
        "diverge", "yellow", "diverge", "the learning rate goes from 0.05 to 50", "loss_diverged"
    ),
    "stall": _resnet("stall", "magenta", "stall", "its data loader hangs", "stalled-soon"),
}

CONFIG: Final = """\
version: 1
bus: {{url: "{bus}", prefix: {prefix}}}
labels: {{demo: "yes"}}
secrets:
  demo-key: {{env: {variable}}}
receivers:
  demo-hook: {{type: webhook, url: "{hook}", sign: {{key: {{secret: demo-key}}}}}}
  demo-mail: {{type: email, to: [you@example.com], smtp: {{host: 127.0.0.1, port: {smtp_port}}}}}
rules:
  - nonfinite: [stop, demo-hook, demo-mail]
  - loss_diverged: [{{stop: {{mode: ask, approve: {{timeout: 5m}}}}}}, demo-hook, demo-mail]
  - exploding_gradient: [demo-hook, demo-mail]
  # Made impatient, so that nobody waits for five minutes; a loop that hangs needs the signals.
  - name: stalled-soon
    use: stalled_training
    match: {{scenario: stall}}
    params: {{threshold: 5s}}
    actions: [{{stop: {{grace: 1s}}}}, demo-hook, demo-mail]
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """One training of the demo, over."""

    scenario: Scenario
    run_id: str
    exit_code: int
    summary: Mapping[str, Any]
    report: Path

    @property
    def as_announced(self) -> bool:
        """Whether what should have happened did: stopped and told, or left alone."""
        summary = self.summary
        if self.scenario.rule is None:
            return self.exit_code == 0 and not any(
                issue["severity"] != "info" for issue in summary.get("issues", [{"severity": "?"}])
            )
        stop = summary.get("stop") or {}
        notified = {
            delivery["action"]
            for delivery in summary.get("deliveries", [])
            if delivery["issue"] == stop.get("issue") and delivery["state"] == "delivered"
        }
        return (
            self.exit_code == STOPPED
            and summary.get("outcome") == "stopped"
            and stop.get("rule") == self.scenario.rule
            and notified >= {"demo-hook", "demo-mail"}
        )


class Demo:
    """Runs scenarios side by side. `bus_url` None makes an embedded bus in a fresh folder."""

    def __init__(
        self, names: Sequence[ScenarioName], bus_url: str | None, console: Console
    ) -> None:
        self._scenarios = [SCENARIOS[name] for name in names]
        self._console = console
        self._folder = Path(tempfile.mkdtemp(prefix="tocsin-demo-"))
        self._embedded = bus_url is None or bus_url.startswith("embedded:")
        self._url = bus_url or f"embedded:{self._folder}/bus.db"
        # On a shared Kafka the demo keeps to topics of its own.
        self._topics = Topics("tocsin" if self._embedded else f"tocsin-demo-{uuid.uuid4().hex[:8]}")

    async def run(self) -> bool:
        """Run all scenarios to their end and show what happened. Whether all went as announced.

        Raises:
            UnusableBus, BusUnavailable: the bus cannot be used.
        """
        async with (
            open_bus(self._url) as bus,
            DemoReceiver().listening() as receiver,
            DemoMailbox(self._folder).listening() as mailbox,
        ):
            await bus.init(self._topics.specs())
            config = self._folder / "tocsin.yaml"
            config.write_text(
                CONFIG.format(
                    bus=self._url,
                    prefix=self._topics.prefix,
                    hook=receiver.url,
                    smtp_port=mailbox.port,
                    variable=HOOK_VARIABLE,
                )
            )
            environ = {
                **python_environment(os.environ),
                HOOK_VARIABLE: receiver.secret,
                "TOCSIN_CONFIG": str(config),
                # A variable of the user's would come before the file.
                "TOCSIN_BUS": self._url,
                # The trainings share the machine: one thread each.
                "OMP_NUM_THREADS": "1",
            }
            self._announce(receiver.url, mailbox.port)
            workers = [] if self._embedded else await self._start_workers(environ)
            try:
                ended = await asyncio.gather(
                    *(self._train(scenario, environ) for scenario in self._scenarios)
                )
            finally:
                await _end(workers)
            for one in ended:
                self._show(one, await self._moments(bus, one, receiver, mailbox))
            for mail in mailbox.mails:
                self._print(f"mail {mail.subject!r}: {mail.html}")
        for one in ended:
            if one.report.exists():
                self._print(f"report of {one.scenario.name}: {one.report}")
        if self._embedded:
            self._print(f"look around: tocsin issues --bus {self._url}")
        self._print(f"records: {self._url}; configuration, summaries and logs: {self._folder}")
        return all(one.as_announced for one in ended)

    def _announce(self, hook: str, smtp_port: int) -> None:
        for scenario in self._scenarios:
            self._console.print(
                f"[{scenario.style}]{scenario.name:>8}[/] {scenario.says}",
                highlight=False,
                soft_wrap=True,
            )
        self._print(f"webhooks go to a receiver on {hook}, which verifies their signatures")
        self._print(f"mail goes to an SMTP server on 127.0.0.1:{smtp_port}")
        if self._embedded:
            self._print(f"see it live at http://{PAGE_AT}/ with: tocsin serve --bus {self._url}")

    async def _start_workers(self, environ: Mapping[str, str]) -> list[asyncio.subprocess.Process]:
        self._print("starting a rules worker and an action worker on Kafka")
        log = (self._folder / "workers.log").open("wb")
        return [
            await asyncio.create_subprocess_exec(
                *python_command("tocsin.console", *command),
                env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )
            for command in (["rules"], ["actions", "--allow-cidr", "127.0.0.0/8"])
        ]  # fmt: skip

    async def _train(self, scenario: Scenario, environ: Mapping[str, str]) -> Ended:
        run_id = f"demo-{scenario.name}-{uuid.uuid4().hex[:6]}"
        summary, report = (self._folder / f"{run_id}.{suffix}" for suffix in ("json", "html"))
        process = await asyncio.create_subprocess_exec(
            *python_command("tocsin.console"), "run",
            "--run-id", run_id, "--label", f"scenario={scenario.name}",
            "--summary", str(summary), "--report", str(report), "--drain", str(DRAIN_S),
            "--", *python_command(scenario.module), "--threads", "1", *scenario.arguments,
            env=environ, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        async with asyncio.TaskGroup() as answers:
            async for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                self._console.print(
                    f"[{scenario.style}]{scenario.name:>8}[/] {escape(text)}",
                    highlight=False,
                    soft_wrap=True,
                )
                if (question := _QUESTION.search(text)) is not None:
                    words = question["words"].split()
                    answers.create_task(self._answer(words, environ), name="answer")
        exit_code = await process.wait()
        facts = json.loads(summary.read_text()) if summary.exists() else {}
        return Ended(scenario, run_id, exit_code, facts, report)

    async def _answer(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """What a person would type to approve a stop, and what it prints."""
        self._print(f"you would decide now; the demo approves for you: tocsin {' '.join(words)}")
        approval = await asyncio.create_subprocess_exec(
            *python_command("tocsin.console", *words), "--why", "the loss is lost",
            env=environ, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        printed, _ = await approval.communicate()
        self._print(printed.decode(errors="replace").strip())

    async def _moments(
        self, bus: Bus, ended: Ended, receiver: DemoReceiver, mailbox: DemoMailbox
    ) -> list[Moment]:
        if ended.scenario.fault is None:
            return []
        entries: list[TimelineEntry] = []
        run_id = ended.run_id
        partitions = [
            Partition(self._topics.telemetry, telemetry_partition(run_id)),
            Partition(self._topics.issues, issue_partition(run_id)),
            Partition(self._topics.actions, issue_partition(run_id)),
        ]
        async for record in read_all(bus, partitions):
            if record.value is None or f'"{run_id}"'.encode() not in record.value:
                continue
            try:
                value = decode(read_meta(record.headers), record.value)
            except RecordError:
                continue
            entries.append(TimelineEntry(record.append_ms, value))
        return timeline(
            entries,
            receiver.received,
            mailbox.mails,
            fault_step=FAULT_STEP,
            fault=ended.scenario.fault,
        )

    def _show(self, ended: Ended, moments: Sequence[Moment]) -> None:
        scenario, summary = ended.scenario, ended.summary
        mark = "[green]as announced[/]" if ended.as_announced else "[red]NOT as announced[/]"
        issues = len(summary.get("issues", []))
        outcome, steps = summary.get("outcome", "no summary"), summary.get("steps", 0)
        overhead = (summary.get("capture") or {}).get("overhead_percent", 0.0)
        self._console.print(
            f"\n[{scenario.style} bold]{scenario.name}[/] {outcome} after {steps:,} steps, "
            f"{issues} issue{'' if issues == 1 else 's'}, exit code {ended.exit_code}, "
            f"overhead {overhead:.1f} %: {mark}",
            highlight=False,
            soft_wrap=True,
        )
        if not moments:
            return
        table = Table("ms", "what", "", box=None, pad_edge=False)
        table.columns[1].no_wrap = True
        table.columns[0].justify = "right"
        start = moments[0].at_ms
        for moment in moments:
            table.add_row(f"{moment.at_ms - start:,.0f}", moment.what, escape(moment.detail))
        self._console.print(table)

    def _print(self, text: str) -> None:
        self._console.print(f"[bold]  tocsin[/] {escape(text)}", highlight=False, soft_wrap=True)


async def _end(workers: Sequence[asyncio.subprocess.Process]) -> None:
    for worker in workers:
        if worker.returncode is None:
            worker.terminate()
    for worker in workers:
        try:
            await asyncio.wait_for(worker.wait(), 10)
        except TimeoutError:
            worker.kill()
            await worker.wait()
