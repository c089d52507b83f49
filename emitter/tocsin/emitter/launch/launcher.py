"""`tocsin run`: starts a job, watches it, reports on it, and ends with its exit code.

The order is in `_Launch.run`. The job comes first: what fails on our side costs a line on stderr
and the watching, never the job, whose exit code is passed on in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.child_reader import Child, UnmappedBus
from tocsin.bus.port import BusError, Record, RunBus
from tocsin.emitter.checkpoints.pins import Pins
from tocsin.emitter.checkpoints.reader import CheckpointReader
from tocsin.emitter.launch import messages
from tocsin.emitter.launch.bus_session import FLUSH_S, Watch
from tocsin.emitter.launch.end_budget import EndBudget
from tocsin.emitter.launch.escalation import Stopper
from tocsin.emitter.launch.forked import can_fork, fork
from tocsin.emitter.launch.forwarded_signals import ENDING, ForwardedSignals, Interrupted
from tocsin.emitter.launch.helper import HelperProcess, helper_environment
from tocsin.emitter.launch.job import CannotStart, Job, check_program, inherited_descriptors
from tocsin.emitter.launch.options import LaunchOptions, job_environment
from tocsin.emitter.launch.own_run import OwnRun
from tocsin.emitter.launch.predecessor import Predecessor, stopped_before
from tocsin.emitter.launch.printer import Printer
from tocsin.emitter.launch.run_records import StopState, keep_beating, run_ended, run_started
from tocsin.emitter.launch.summary import LEFT_EARLY, Summary, decide_end
from tocsin.emitter.launch.terminal import Terminal
from tocsin.emitter.process import environment, runtime_folder
from tocsin.emitter.process.identity import restart_count
from tocsin.emitter.process.process_group import Reaper, become_subreaper, process_lives
from tocsin.emitter.stop import before_update
from tocsin.emitter.stop.datagrams import Message
from tocsin.emitter.stop.detail_requests import DetailRequests
from tocsin.emitter.stop.listener import Listener
from tocsin.emitter.stop.processes import Members, Trainer
from tocsin.emitter.stop.unwatched import LINES
from tocsin.emitter.stop.verification import read_keys, trusted_paths, untrusted_places
from tocsin.schemas.compute_estimates import saved_by_stop
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.exit_codes import STOPPED
from tocsin.schemas.ids import incarnation_id
from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.process.own_python import python_environment
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.issues import IssueFiring
from tocsin.schemas.records.runs import Outcome
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

USAGE: Final = 2
"""Exit code when nothing was started."""

OPEN_S: Final = 15.0
UNHEARD_S: Final = 10.0
"""A job that ran this long without a word from the hook gets a line with the reason."""

CHECKPOINTS_S: Final = 5.0
"""How long, after the job, the checkpoints that it saved last are read, seconds."""

HISTORY_S: Final = 5.0
"""How long to find out whether the run was stopped before, seconds."""

CONFIRM_S: Final = 5.0
"""How long, after a job that has left before an update, its confirmation is waited for, seconds."""

HELPER_CLOSE_S: Final = 3.0
_DRAIN_POLL_S: Final = 0.05
_REAP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended. `interrupted`: by Ctrl-C, so that whoever is done calls
    `die_of_interrupt`. Exit code 2 means that nothing was started.
    """

    exit_code: int
    interrupted: Interrupted | None = None


def launch(options: LaunchOptions) -> Ended:
    """Run the job to its end. Blocks; main thread only.

    Never raises for what the job or the bus does.
    """
    launcher = _Launch(options)
    printer = launcher.printer
    try:
        check_program(options.command, os.environ)
    except CannotStart as error:
        # A command that was mistyped is no run: nobody hears of it.
        printer.line(str(error))
        return Ended(launcher.sum_up(None, error.exit_code))
    launcher.fork()
    try:
        exit_code = asyncio.run(launcher.run())
    except Exception:
        # The launcher's isolation: the job goes on, unwatched, and its exit code is passed on.
        logger.exception("the launcher failed")
        job = launcher.job
        if job is None:
            raise
        printer.line("monitoring stopped because of an internal error; the job is not affected")
        job.wait_blocking()
        exit_code = launcher.sum_up(job)
    return Ended(exit_code, None if launcher.job is None else launcher.job.interrupted)


class _Held(Exception):
    """The job is not started, as it was stopped before."""


class _Launch:
    """One launch, on one event loop."""

    def __init__(self, options: LaunchOptions) -> None:
        self.options = options
        self._descriptors = inherited_descriptors()
        self.printer = Printer(options, now_s=time.monotonic())
        self.job: Job | None = None
        self._topics = Topics(options.bus_prefix)
        self._restarts = restart_count(os.environ)
        first = incarnation_id(options.run_id, options.job_id, self._restarts, 0)
        self._members = Members(first, process_lives)
        self._own = OwnRun(options.run_id)
        self._reaper = Reaper()
        self._helper = self._own_helper()
        self._bus: UnmappedBus | None = None
        self._reading: Child | None = None
        self._watch: Watch | None = None
        self._cancelled: signal.Signals | None = None
        self._hurry = asyncio.Event()
        self._budget = EndBudget(options.drain_s)
        self._checkpoints = CheckpointReader(options.run_id, self._publish)
        self._pins = Pins(options.run_id, options.pin, self._publish)
        self._after_stop = ""
        self._listener: Listener | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[Job | None] | None = None
        self._key_paths = trusted_paths(os.environ, options.trusted_keys)
        self._stopper = Stopper(
            options.run_id,
            self._members,
            lambda: self.job,
            self._answer,
            key_paths=self._key_paths,
            stops_off=not options.stop,
            keeping=self._keeping,
        )

    async def run(self) -> int:
        """The order of a launch, from start to end."""
        loop = asyncio.get_running_loop()
        terminal = Terminal.controlling()
        become_subreaper()
        handlers = ForwardedSignals(loop, self._signalled, self._reaper.reap)
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    return await self._launched(stack, handlers, terminal)
                finally:
                    await self._let_go()
        finally:
            handlers.restore()
            if self._reading is not None:
                self._reading.close()
            if terminal is not None:
                terminal.close()

    async def _launched(
        self,
        stack: contextlib.AsyncExitStack,
        handlers: ForwardedSignals,
        terminal: Terminal | None,
    ) -> int:
        self._starting = asyncio.create_task(self._start(stack, terminal), name="start the job")
        try:
            job = await self._starting
        except _Held as error:
            # It gets no record: the stopped one stays the newest that the bus knows of.
            self.printer.line(str(error))
            return STOPPED
        except CannotStart as error:
            self.printer.line(str(error))
            return await self._not_started(error.exit_code, str(error))
        except asyncio.CancelledError:
            if self._cancelled is None:
                raise
            self._hurry.set()
            reason = "interrupted before the job was started"
            return await self._not_started(-self._cancelled, reason)
        if job is None:
            return USAGE
        job.use(handlers)
        housekeeping = asyncio.create_task(self._housekeep(job), name="housekeeping")
        try:
            outcome, _ = self._end(await job.wait())
            await job.sweep(
                # Where somebody ended it; a terminal's signal does not come through us.
                everything=outcome in ("stopped", "interrupted") or bool(job.passed_on & ENDING),
                keeping=self._keeping(),
                saving=self._saving,
                hurry=self._hurry,
            )
        finally:
            housekeeping.cancel()
        self._budget.start()
        if self._watch is not None:
            # The last samples stand before the end of the run.
            await self._watch.end("heartbeats", "sample", timeout_s=self._budget.left_s(FLUSH_S))
            self._watch.drain_datagrams()
            # The checkpoints that were saved last stand before it, too.
            await self._checkpoints.settled(self._budget.left_s(CHECKPOINTS_S))
            await self._pins.settled(self._budget.left_s(CHECKPOINTS_S))
            await self._watch.publish_behind()
            await self._confirmed_early(self._budget.left_s(CONFIRM_S))
        self._stopper.job_gone()
        assert job.returncode is not None
        await self._report_end(job.returncode, job.duration_s())
        try:
            if self._watch is not None:
                await self._drain(self._watch)
        finally:
            exit_code = self.sum_up(job)
        return exit_code

    async def _not_started(self, returncode: int, reason: str) -> int:
        """What was announced does not come: say so, and let the rules close the run."""
        self._budget.start()
        await self._report_end(returncode, 0.0, reason)
        if self._watch is not None:
            await self._drain(self._watch)
        return self.sum_up(None, returncode)

    async def _confirmed_early(self, timeout_s: float) -> None:
        """Where the ranks have left before an update, wait for the command of the run's own rule:
        it stands before the end of the run then.
        """
        until = time.monotonic() + timeout_s
        while self._stopper.awaits_command and time.monotonic() < until:
            if self._hurry.is_set():
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    # Start

    async def _start(
        self, stack: contextlib.AsyncExitStack, terminal: Terminal | None
    ) -> Job | None:
        """Bus, helper, RunStarted, job; None if there is no bus and one is required."""
        options, environ = self.options, dict(os.environ)
        for line in options.warnings:
            self.printer.line(line)
        try:
            environ = await self._start_watching(stack, environ)
        except _Held:
            raise
        except Exception as error:
            # The launcher's isolation: what fails on our side costs the watching, never the job.
            if not isinstance(error, (TocsinError, TimeoutError, OSError)):
                logger.exception("watching cannot begin")
            reason = str(error) or f"{options.bus_url} did not answer within {OPEN_S:g} s"
            if options.require_bus:
                self.printer.line(f"cannot open the bus: {reason}")
                return None
            await self._let_go()
            self._watch = self._helper = None
            self.printer.line(messages.unwatched_line(reason))
        self.job = Job(
            options.command, environ, self._reaper, terminal, descriptors=self._descriptors
        )
        for looking in (self._helper, self._watch):
            if looking is not None:
                looking.job_started(self.job.pid)
        return self.job

    async def _start_watching(
        self, stack: contextlib.AsyncExitStack, base: dict[str, str]
    ) -> dict[str, str]:
        """Open what is needed to watch; the job's environment. Raises whatever went wrong."""
        options = self.options
        runtime = runtime_folder.job_folder(os.environ)
        stack.callback(runtime_folder.remove_folder, runtime)
        bus = self._own_bus()
        watch = await Watch.open(
            stack,
            bus,
            options,
            self._topics,
            self.printer.line,
            timeout_s=OPEN_S,
            left=self._budget.left_s,
        )
        notice = getattr(bus, "notice", None)
        self.printer.note(notice if isinstance(notice, str) else None)
        await self._check_predecessor(watch)
        endpoint = watch.listen_to_processes(runtime, self._on_message)
        self._watch = watch
        environ = job_environment(options, base, runtime, endpoint.path)
        if self._after_stop:
            environ[environment.AFTER_STOP] = self._after_stop
        environ[environment.BUS] = bus.url
        self._start_helper()
        await self._start_tasks(watch).wait_ready()
        await self._report_start(watch)
        return environ

    async def _check_predecessor(self, watch: Watch) -> None:
        """Whether the incarnation before was stopped. Raises _Held: this one is not to start."""
        found: Predecessor | None = None
        try:
            async with asyncio.timeout(HISTORY_S):
                found = await stopped_before(watch.bus, self._topics, self.options.run_id)
        except (TocsinError, TimeoutError) as error:
            logger.warning("it is not known whether this run was stopped before: %s", error)
        if found is None:
            return
        self._after_stop = found.reason
        if self.options.hold:
            raise _Held(found.held("--run-id"))
        self.printer.note(found.line, wrong=True)

    def _own_helper(self) -> HelperProcess | None:
        options = self.options
        if not options.helper or options.helper_log is None:
            return None
        environ = helper_environment(os.environ)
        return HelperProcess(
            options.helper, environ, self._reaper, options.helper_log, self.printer.line
        )

    def fork(self) -> None:
        """Before the event loop: fork the helper, and what reads an embedded bus, if possible."""
        if self._helper is not None and self.options.serve is not None:
            self._helper.fork(self.options.serve)
        if self.options.bus_url.startswith("embedded:") and can_fork():
            environ = python_environment(os.environ)
            with contextlib.suppress(OSError):
                self._reading = Child.forked(
                    lambda serve, stdin: fork(serve, environ, stdin, "tocsin-reader")
                )

    def _own_bus(self) -> RunBus:
        """The bus of the options; of an embedded one this process maps nothing."""
        bus = self.options.open_bus()
        if not isinstance(bus, EmbeddedBus):
            return bus
        self._bus = UnmappedBus(bus.path, notice=bus.notice, child=self._reading)
        return self._bus

    def _start_helper(self) -> None:
        if self._helper is None or self._helper.pid is not None:
            return
        try:
            self._helper.start()
        except OSError as error:
            self._helper = None
            self.printer.line(
                f"cannot start the helper: {error}; records are kept, but no rule reads them"
            )

    def _start_tasks(self, watch: Watch) -> Listener:
        watch.start("publish", watch.publisher.run(watch.producer))
        watch.start("checkpoints", self._checkpoints.run())
        detail_requests = DetailRequests(self.options.run_id, self._members)
        listener = Listener(
            self._topics, self.options.run_id, self._stopper, detail_requests=detail_requests
        )
        self._listener = listener
        watch.start("listen", listener.keep_listening(watch.bus))
        watch.start("follow", watch.follow(self._apply_record))
        watch.start("heartbeats", keep_beating(self.options, self._members, watch.publisher))
        if self._helper is not None:
            watch.start("helper", self._helper.keep())
        if not self.options.helper:
            watch.sample_node(
                RecordOrigin(run_id=self.options.run_id, incarnation=self._members.first)
            )
        return listener

    async def _report_start(self, watch: Watch) -> None:
        stop: StopState = "off"
        if self.options.stop:
            stop = "trusted_key" if len(read_keys(self._key_paths)) else "no_trusted_key"
            for why in untrusted_places(self._key_paths):
                self.printer.note(why)
        if stop == "no_trusted_key":
            self.printer.note("no trusted key: stops of this run will be refused")
        self._keep({self._members.first})
        watch.publisher.publish(
            run_started(
                self.options,
                self._members.first,
                self._restarts,
                stop,
                after_stop=self._after_stop,
            )
        )
        await watch.publisher.flush(FLUSH_S)

    # While it runs

    def _on_message(self, message: Message) -> None:
        early = self._stopper.left_early
        if not self._members.receive(message):
            return
        self._checkpoints.receive(message)
        if self._stopper.left_early and not early:
            self.printer.note(f"the job left its loop: {LEFT_EARLY}", wrong=True)
        asking = before_update.who_asks(message, self._members)
        if asking is not None:
            leaves = before_update.leaves(message)
            task = asyncio.create_task(self._answer_question(asking, leaves), name="may leave")
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer_question(self, trainer: Trainer, leaves: bool) -> None:
        """Whether this rank may leave before an update; one that `leaves` is not started again."""
        listener, permitted = self._listener, False
        if self.options.before_update is not None and listener is not None:
            permitted = listener.ready.is_set() and self._stopper.may_leave(listener.stops_off)
        if leaves:
            # All ranks have agreed to that, whatever has changed since.
            await self._stopper.forbid_restarts()
        before_update.answer(trainer, permitted)

    def _signalled(self, number: signal.Signals) -> None:
        if self.job is not None and self.job.returncode is None:
            self.job.forward(number)
        elif number in ENDING and self.job is None:
            self._cancelled = number
            if self._starting is not None:
                self._starting.cancel()
        elif number in ENDING:
            # The job is over: whoever is in a hurry need not wait for what it left, and the drain.
            self._hurry.set()

    async def _housekeep(self, job: Job) -> None:
        warned = self._watch is None
        unwatched: set[str] = set()
        while True:
            await asyncio.sleep(_REAP_S)
            self._reaper.reap()
            for kind in self._members.unwatched.keys() - unwatched:
                unwatched.add(kind)
                self.printer.note(LINES[kind])
            if not warned and job.duration_s() > UNHEARD_S:
                warned = True
                if self._members.pythons == 0:
                    self.printer.note(messages.unheard_line(self.options.command), wrong=True)
            if self._watch is not None:
                log = None if self._helper is None else self._helper.log
                self.printer.judging(self._watch.bus.url, log, now_s=time.monotonic())

    def _apply_record(self, record: Record) -> None:
        news = self._own.apply(record, self._members.incarnations(), unix_ms())
        if news is None:
            return
        cause = None
        if isinstance(news, IssueFiring):
            cause = self._own.view.issue(news.consequence_of or "")
            if news.severity == "critical" and news.stop_worthy:
                # Before the stop is decided: people may take their time, and the job goes on
                # saving.
                self._pins.keep(news.last_good_checkpoint, news.incarnation)
        self.printer.news(news, cause, now_s=time.monotonic())
        if self.options.observe is not None and not isinstance(news, ConfigurationRefused):
            self.options.observe(news, record.append_ms)

    def _publish(self, data: Data) -> None:
        if self._watch is not None:
            self._watch.publisher.publish(data)

    def _answer(self, data: Data) -> None:
        """Publish an answer of the stop, and print it."""
        self._publish(data)
        command, figures = self._stopper.command, self._stopper.figures
        if command is not None:
            self._pins.keep(command.last_good_checkpoint, command.incarnation)
        step = None if figures is None else figures.step
        self.printer.note(messages.stop_line(data, command=command, step=step), wrong=True)

    def _saving(self) -> bool:
        members = self._members
        return any(trainer.saving for trainer in members.living(members.incarnation))

    def _keeping(self) -> frozenset[int]:
        """Children of ours that are not the job's."""
        ours = (self._helper, self._bus, self._checkpoints)
        return frozenset(one.pid for one in ours if one is not None and one.pid is not None)

    # The end

    async def _report_end(self, returncode: int, duration_s: float, reason: str = "") -> None:
        if self._watch is None:
            return
        outcome, exit_code = self._end(returncode)
        members = self._members
        self._watch.publisher.publish(
            run_ended(
                self.options,
                members.incarnation,
                outcome=outcome,
                exit_code=exit_code,
                reason=reason,
                steps=members.steps(),
                world_size=members.world_size,
                duration_s=duration_s,
            )
        )
        await self._watch.publisher.flush(self._budget.left_s(FLUSH_S))

    async def _drain(self, watch: Watch) -> None:
        """Wait until rules and deliveries are done with this run, for `--drain` at most."""
        helper, drain_s, left_s = self._helper, self.options.drain_s, self._budget.drain_s()
        if helper is not None:
            helper.drain(left_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                while not self._hurry.is_set() and not self._is_settled():
                    if helper is not None and helper.has_drained:
                        break
                    await asyncio.sleep(_DRAIN_POLL_S)
        with contextlib.suppress(TimeoutError, BusError):
            await watch.read_the_rest(self._apply_record, timeout_s=self._budget.left_s(FLUSH_S))
        ended = self._own.ended(self._members.incarnation)
        finished = helper is not None and helper.returncode == 0 and ended
        if not finished and not self._is_settled():
            left, options = self._own.open_deliveries(), self.options
            self._keep(self._members.incarnations())
            line = messages.left_over_line(left, ended, drain_s, watch.bus.url, options.again)
            self.printer.note(line, wrong=bool(left) or self._members.steps() > 0)
        elif self.options.kept is not None:
            with contextlib.suppress(OSError):
                self.options.kept.remove()

    def _keep(self, incarnations: Collection[str]) -> None:
        """Let another process go on with notices to the addresses of `--notify`."""
        if self.options.kept is None:
            return
        try:
            self.options.kept.keep(incarnations)
        except OSError as error:
            self.printer.line(
                f"cannot save the addresses of --notify ({error.strerror or error}): notices still "
                "pending at the end of this run are lost"
            )

    def _is_settled(self) -> bool:
        return self._own.settled(self._members.incarnation, unix_ms())

    def sum_up(self, job: Job | None, exit_code: int = 0) -> int:
        """Write the summary and the last line; returns the exit code of the launcher.

        `exit_code` is for a job that could not be started.
        """
        returncode = exit_code if job is None or job.returncode is None else job.returncode
        duration_s = 0.0 if job is None else job.duration_s()
        options = self.options
        outcome, exit_code = self._end(returncode)
        steps = max(self._own.steps(), self._members.steps())
        judged = self._own.judged_steps(self._members.incarnation, steps)
        newest = self._own.newest
        summary = Summary(
            run_id=options.run_id,
            outcome=outcome,
            exit_code=exit_code,
            steps=steps,
            judged_steps=judged,
            duration_s=duration_s,
            issues=self._own.view.issues,
            rules=self._own.rules(),
            deliveries=self._own.view.deliveries,
            stop=self._stopper.figures,
            capture=self._own.capture(),
            goodput=None if newest is None else newest.goodput,
            saved=None if newest is None else saved_by_stop(newest, options.prices),
        )
        if options.summary is not None:
            try:
                summary.write(options.summary)
            except (OSError, ValueError) as error:
                self.printer.line(f"cannot write the summary: {error}")
        if self._watch is not None and self.job is not None:
            unsent = self._watch.publisher.unpublished
            line = messages.end_line(
                summary, unsent=unsent, again=options.again, unwatched=self._members.unwatched
            )
            self.printer.note(line, wrong=judged < steps)
        return exit_code

    def _end(self, returncode: int) -> tuple[Outcome, int]:
        passed_on = frozenset() if self.job is None else frozenset(self.job.passed_on)
        return decide_end(returncode, stopped=self._stopper.stopped, passed_on=passed_on)

    async def _let_go(self) -> None:
        """End what runs still, in the order in which it was needed."""
        await self._stopper.close()
        if self._helper is not None:
            await self._helper.close(self._budget.left_s(HELPER_CLOSE_S))
            if self._helper.ended_well:
                self._helper.log.unlink(missing_ok=True)
        if self._watch is not None:
            await self._watch.close(self._budget.left_s(FLUSH_S))
