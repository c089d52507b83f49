"""`tocsin run`: starts a job, watches it, tells about it, and ends with its exit code.

The order is in `_Launch.run`. The job comes first: what fails on our side costs a line on stderr
and the watching, never the job, whose exit code is passed on in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Final

from tocsin.bus.port import Bus, BusError, Producer, Reader, Record
from tocsin.emitter import facts, launcher_report, link
from tocsin.emitter.escalation import Stopper
from tocsin.emitter.helper_process import HelperProcess
from tocsin.emitter.identity import restart_count
from tocsin.emitter.job import CannotStart, Job
from tocsin.emitter.launcher_view import OwnRun, open_reader, partitions_of, read_to_end
from tocsin.emitter.launcher_voice import Voice, wall_ms
from tocsin.emitter.listener import Listener
from tocsin.emitter.members import Members
from tocsin.emitter.plan import LaunchPlan, job_environment
from tocsin.emitter.process_group import Reaper, become_subreaper, process_lives
from tocsin.emitter.settings import HEARTBEAT_S
from tocsin.emitter.signals import ENDING, ForwardedSignals
from tocsin.emitter.stop_command import read_keys, trusted_paths
from tocsin.emitter.summary import StopFigures, Summary, decide_end
from tocsin.emitter.terminal import Terminal
from tocsin.schemas.deliveries import Delivery
from tocsin.schemas.errors import TocsinError
from tocsin.schemas.events import Data
from tocsin.schemas.identity import incarnation_id
from tocsin.schemas.issues import IssueFiring
from tocsin.schemas.runs import Heartbeat, Outcome, RunEnded, RunStarted
from tocsin.schemas.topics import Topics

logger = logging.getLogger(__name__)

USAGE: Final = 2
"""Exit code when nothing was started."""

OPEN_S: Final = 15.0
FLUSH_S: Final = 5.0
UNHEARD_S: Final = 10.0
"""A job that ran this long without a word from the hook gets a line that says why."""

HELPER_CLOSE_S: Final = 3.0
CLOSE_S: Final = 5.0

_DRAIN_LOOK_S: Final = 0.05
_REAP_S: Final = 1.0
_POLL_S: Final = 5.0


def launch(plan: LaunchPlan) -> int:
    """Run the job to its end; returns the exit code. Blocks; main thread only.

    Never raises for what the job or the bus does. 2 means that nothing was started.
    """
    launcher = _Launch(plan)
    try:
        return asyncio.run(launcher.run())
    except Exception:
        # The launcher's wall: the job goes on, unwatched, and its exit code is passed on.
        logger.exception("the launcher failed")
        job = launcher.job
        if job is None:
            raise
        launcher.say("watching ended by a failure of tocsin itself; the job goes on")
        return job.wait_blocking()


class _Watch:
    """What exists only while a bus is open: reading, saying, listening."""

    def __init__(self, bus: Bus, voice: Voice, view: Reader) -> None:
        self.bus = bus
        self.voice = voice
        self.view = view
        self.tasks: list[asyncio.Task[None]] = []


class _Launch:
    """One launch, on one event loop."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self.job: Job | None = None
        self._topics = Topics(plan.bus_prefix)
        self._restarts = restart_count(os.environ)
        first = incarnation_id(plan.run_id, plan.job_id, self._restarts, 0)
        self._members = Members(first, process_lives)
        self._own = OwnRun(plan.run_id)
        self._reaper = Reaper()
        self._helper: HelperProcess | None = None
        self._watch: _Watch | None = None
        self._cancelled: signal.Signals | None = None
        self._hurry = asyncio.Event()
        self._starting: asyncio.Task[Job | None] | None = None
        self._bus_lost = ""
        self._settled = True
        self._key_paths = trusted_paths(os.environ, plan.trusted_keys)
        self._stopper = Stopper(
            plan.run_id,
            self._members,
            lambda: self.job,
            self._answer,
            key_paths=self._key_paths,
            stops_off=not plan.stop,
            keeping=self._keeping,
        )

    def say(self, line: str) -> None:
        """One line for the person at the terminal."""
        if self.plan.say is not None:
            self.plan.say(line)
            return
        with contextlib.suppress(OSError):
            print(f"{launcher_report.PREFIX}{line}", file=sys.stderr, flush=True)

    def note(self, line: str | None) -> None:
        """The same, unless `--quiet`."""
        if line is not None and not self.plan.quiet:
            self.say(line)

    async def run(self) -> int:
        """The order of a launch, from start to end."""
        loop = asyncio.get_running_loop()
        terminal = Terminal.controlling()
        become_subreaper()
        handlers = ForwardedSignals(loop, self._signalled, self._reaper.reap)
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    runtime = link.job_folder(os.environ)
                    stack.callback(link.remove_folder, runtime)
                    return await self._launched(stack, handlers, terminal, runtime)
                finally:
                    await self._let_go()
        finally:
            handlers.restore()
            if terminal is not None:
                terminal.close()

    async def _launched(
        self,
        stack: contextlib.AsyncExitStack,
        handlers: ForwardedSignals,
        terminal: Terminal | None,
        runtime: Path,
    ) -> int:
        self._starting = asyncio.create_task(
            self._start(stack, terminal, runtime), name="start the job"
        )
        try:
            job = await self._starting
        except CannotStart as error:
            self.say(str(error))
            await self._tell_end(error.exit_code, 0.0, str(error))
            return self._sum_up(error.exit_code, 0.0)
        except asyncio.CancelledError:
            if self._cancelled is None:
                raise
            return 128 + self._cancelled
        if job is None:
            return USAGE
        job.use(handlers)
        housekeeping = asyncio.create_task(self._housekeep(job), name="housekeeping")
        try:
            await job.wait()
            await job.sweep(
                everything=self._stopper.stopped or bool(job.passed_on & ENDING),
                keeping=self._keeping(),
            )
        finally:
            housekeeping.cancel()
        self._end_task("heartbeats")
        self._take_datagrams()
        self._stopper.job_gone()
        assert job.returncode is not None
        await self._tell_end(job.returncode, job.duration_s())
        try:
            if self._watch is not None:
                await self._drain(self._watch)
        finally:
            exit_code = self._sum_up(job.returncode, job.duration_s())
        return exit_code

    # Start

    async def _start(
        self, stack: contextlib.AsyncExitStack, terminal: Terminal | None, runtime: Path
    ) -> Job | None:
        """Bus, helper, RunStarted, job; None if there is no bus and one is required."""
        plan, environ = self.plan, dict(os.environ)
        try:
            self._watch = await self._open_watch(stack)
        except (TocsinError, TimeoutError, OSError) as error:
            reason = str(error) or f"{plan.bus_url} did not answer within {OPEN_S:g} s"
            if plan.require_bus:
                self.say(f"the bus cannot be opened: {reason}")
                return None
            self._bus_lost = reason
            self.say(launcher_report.unwatched_line(reason))
        else:
            self._endpoint = link.Endpoint(runtime / link.LAUNCHER_SOCKET)
            asyncio.get_running_loop().add_reader(self._endpoint.fileno(), self._take_datagrams)
            environ = job_environment(plan, environ, runtime, self._endpoint.path)
            environ["TOCSIN_BUS"] = self._watch.bus.url
            self._start_helper(environ, runtime)
            self._begin_tasks(self._watch)
            await self._tell_start(self._watch)
        self.job = Job(plan.command, environ, self._reaper, terminal)
        if self._helper is not None:
            self._helper.job_started(self.job.pid)
        return self.job

    async def _open_watch(self, stack: contextlib.AsyncExitStack) -> _Watch:
        plan = self.plan
        async with asyncio.timeout(OPEN_S):
            bus = await stack.enter_async_context(_bounded(plan.open_bus()))
            if bus.url.startswith("embedded:"):
                await bus.init(self._topics.specs())
            notice = getattr(bus, "notice", None)
            if isinstance(notice, str):
                self.note(notice)
            view = await open_reader(bus, self._topics, plan.run_id)
            stack.push_async_callback(_close, view)
            producer = await bus.producer()
            stack.push_async_callback(_close, producer)
        voice = Voice(producer, self._topics, plan.run_id, observe=plan.observe)
        return _Watch(bus, voice, view)

    def _start_helper(self, environ: dict[str, str], runtime: Path) -> None:
        plan = self.plan
        if not plan.helper:
            return
        log = plan.helper_log or runtime / "helper.log"
        # Our hook is for the job's pythons; the helper would watch itself.
        own = {**environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        self._helper = HelperProcess(plan.helper, own, self._reaper, log, self.say)
        try:
            self._helper.start()
        except OSError as error:
            self._helper = None
            self.say(f"the helper cannot be started: {error}; records are kept, nobody reads them")

    def _begin_tasks(self, watch: _Watch) -> None:
        self._begin("publish", watch.voice.publish())
        self._begin("listen", self._listen(watch))
        self._begin("follow", self._follow(watch))
        self._begin("heartbeats", self._heartbeats(watch))
        if self._helper is not None:
            self._begin("helper", self._helper.keep())

    def _begin(self, name: str, coroutine: Coroutine[None, None, None]) -> None:
        """Start a task whose failure costs a line, not the job."""

        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:
                # The launcher's wall, per task: the others and the job go on.
                logger.exception("a task of the launcher failed", extra={"task": name})
                self.say(f"{name} ended: {launcher_report.one_line(str(error))}; the job goes on")

        assert self._watch is not None
        self._watch.tasks.append(asyncio.create_task(guarded(), name=name))

    def _end_task(self, name: str) -> asyncio.Task[None] | None:
        tasks = [] if self._watch is None else self._watch.tasks
        found = next((task for task in tasks if task.get_name() == name), None)
        if found is not None:
            found.cancel()
        return found

    async def _tell_start(self, watch: _Watch) -> None:
        plan = self.plan
        stop: Final = "off" if not plan.stop else "trusted_key"
        trusted = stop == "off" or len(read_keys(self._key_paths)) > 0
        if not trusted:
            self.note("no trusted key: stops of this run will be refused")
        folder = Path.cwd()
        watch.voice.say(
            RunStarted(
                run_id=plan.run_id,
                incarnation=self._members.first,
                role="launcher",
                job_id=plan.job_id,
                restart_count=self._restarts,
                labels=dict(plan.labels),
                node=platform.node(),
                pid=os.getpid(),
                command=facts.command_line(plan.command),
                folder=str(folder),
                git_commit=facts.git_commit(folder),
                versions=facts.versions({}),
                heartbeat_s=HEARTBEAT_S,
                stop=stop if trusted else "no_trusted_key",
            )
        )
        await watch.voice.flush(FLUSH_S)

    # While it runs

    def _signalled(self, number: signal.Signals) -> None:
        if self.job is not None and self.job.returncode is None:
            self.job.forward(number)
        elif number in ENDING and self.job is None:
            self._cancelled = number
            if self._starting is not None:
                self._starting.cancel()
        elif number in ENDING:
            # The job is over: whoever is in a hurry need not wait for the drain.
            self._hurry.set()

    def _take_datagrams(self) -> None:
        if self._watch is not None:
            for message in self._endpoint.drain():
                self._members.heard(message)

    async def _housekeep(self, job: Job) -> None:
        told = self._watch is None
        while True:
            await asyncio.sleep(_REAP_S)
            self._reaper.reap()
            if not told and job.duration_s() > UNHEARD_S:
                told = True
                if self._members.pythons == 0:
                    interpreter = launcher_report.interpreter_of(self.plan.command)
                    self.note(launcher_report.unheard_line(interpreter))

    async def _heartbeats(self, watch: _Watch) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            watch.voice.say(
                Heartbeat(
                    run_id=self.plan.run_id,
                    incarnation=self._members.incarnation,
                    world_size=self._members.world_size,
                    role="launcher",
                )
            )

    async def _listen(self, watch: _Watch) -> None:
        listener = Listener(self._topics, self.plan.run_id, self._stopper)
        await listener.listen(watch.bus)

    async def _follow(self, watch: _Watch) -> None:
        while True:
            try:
                records = await watch.view.poll(timeout_s=_POLL_S)
            except BusError:
                logger.warning("the bus cannot be read now", exc_info=True)
                await asyncio.sleep(_REAP_S)
                continue
            for record in records:
                self._take_record(record)

    def _take_record(self, record: Record) -> None:
        news = self._own.apply(record, self._members.incarnations(), wall_ms())
        if news is None:
            return
        if isinstance(news, IssueFiring) and news.state != "ongoing":
            self.note(launcher_report.issue_line(news))
        elif isinstance(news, Delivery):
            self.note(launcher_report.delivery_line(news))
        if self.plan.observe is not None:
            self.plan.observe(news, record.append_ms)

    def _answer(self, data: Data) -> None:
        """What the stop has to say: on the bus and on the terminal."""
        if self._watch is not None:
            self._watch.voice.say(data)
        command = self._stopper.command
        self.note(launcher_report.stop_line(data, reason="" if command is None else command.reason))

    def _keeping(self) -> frozenset[int]:
        """Children of ours that are not the job's."""
        pid = None if self._helper is None else self._helper.pid
        return frozenset() if pid is None else frozenset({pid})

    # The end

    async def _tell_end(self, returncode: int, duration_s: float, reason: str = "") -> None:
        if self._watch is None:
            return
        outcome, exit_code = self._end(returncode)
        steps = self._members.steps()
        self._watch.voice.say(
            RunEnded(
                run_id=self.plan.run_id,
                incarnation=self._members.incarnation,
                world_size=self._members.world_size,
                role="launcher",
                outcome=outcome,
                exit_code=exit_code,
                reason=reason,
                last_step=steps - 1 if steps else None,
                duration_s=duration_s,
            )
        )
        await self._watch.voice.flush(FLUSH_S)

    async def _drain(self, watch: _Watch) -> None:
        """Wait until rules and deliveries are done with this run, for `--drain` at most."""
        helper, drain_s = self._helper, self.plan.drain_s
        if helper is not None:
            helper.drain(drain_s)
        self._settled = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while not self._hurry.is_set():
                    if self._own.settled(self._members.incarnation, wall_ms()):
                        self._settled = True
                        break
                    if helper is not None and helper.has_drained:
                        break
                    await asyncio.sleep(_DRAIN_LOOK_S)
        with contextlib.suppress(TimeoutError, BusError):
            await self._read_the_rest(watch)
        ended = self._own.ended(self._members.incarnation)
        if helper is not None and helper.returncode == 0 and ended:
            self._settled = True
        if self._own.settled(self._members.incarnation, wall_ms()):
            self._settled = True
        if not self._settled:
            self.note(
                launcher_report.left_over_line(
                    self._own.open_deliveries(),
                    ended,
                    drain_s,
                    watch.bus.url,
                    embedded=watch.bus.url.startswith("embedded:"),
                )
            )

    async def _read_the_rest(self, watch: _Watch) -> None:
        """What rules and actions wrote last, whatever the follower has read so far."""
        follower = self._end_task("follow")
        if follower is not None:
            await asyncio.gather(follower, return_exceptions=True)
        async with asyncio.timeout(FLUSH_S):
            partitions = partitions_of(self._topics, self.plan.run_id)
            await read_to_end(watch.view, partitions, self._take_record)

    def _sum_up(self, returncode: int, duration_s: float) -> int:
        plan, stopper = self.plan, self._stopper
        outcome, exit_code = self._end(returncode)
        steps = max(self._own.steps(), self._members.steps())
        stop = None
        if stopper.command is not None:
            stop = StopFigures(
                command=stopper.command,
                how=stopper.how,
                step=stopper.step,
                exit_code=stopper.exit_code,
            )
        summary = Summary(
            run_id=plan.run_id,
            outcome=outcome,
            exit_code=exit_code,
            steps=steps,
            duration_s=duration_s,
            issues=list(self._own.issues.values()),
            rules=self._own.rules(),
            deliveries=list(self._own.deliveries.values()),
            stop=stop,
            capture=self._own.capture(),
        )
        if plan.summary is not None:
            try:
                summary.write(plan.summary)
            except OSError as error:
                self.say(f"the summary cannot be written: {error}")
        if not self._bus_lost:
            issues = len(self._own.issues)
            self.note(launcher_report.end_line(steps, issues, self._own.capture()))
        return exit_code

    def _end(self, returncode: int) -> tuple[Outcome, int]:
        passed_on = frozenset() if self.job is None else frozenset(self.job.passed_on)
        return decide_end(returncode, stopped=self._stopper.stopped, passed_on=passed_on)

    async def _let_go(self) -> None:
        """End what runs still, in the order in which it was needed. Bounded by about 10 s."""
        await self._stopper.close()
        if self._helper is not None:
            await self._helper.close(HELPER_CLOSE_S)
        if self._watch is None:
            return
        await self._watch.voice.flush(FLUSH_S)
        for task in self._watch.tasks:
            task.cancel()
        await asyncio.gather(*self._watch.tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._endpoint.fileno())
        self._endpoint.close()


@contextlib.asynccontextmanager
async def _bounded(bus: Bus) -> AsyncIterator[Bus]:
    """The bus, entered; leaving it cannot hold up the exit."""
    await bus.__aenter__()
    try:
        yield bus
    finally:
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(CLOSE_S):
                await bus.__aexit__(None, None, None)


async def _close(part: Reader | Producer) -> None:
    with contextlib.suppress(TimeoutError, BusError):
        async with asyncio.timeout(CLOSE_S):
            await part.close()
