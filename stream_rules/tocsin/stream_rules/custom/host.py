"""The worker's side of the custom rules: a thread that keeps their process going, and ends it where
a call of a rule takes longer than it may.

Nothing here waits for the child, except `start`, and `save` for as long as its caller allows. What
the rules find comes with `drain`, after a nudge.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from tocsin.bus.port import Record
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.stream_rules.custom.backlog import Backlog, Output
from tocsin.stream_rules.custom.call_limits import MEBIBYTE, Limits
from tocsin.stream_rules.custom.child_process import ChildProcess
from tocsin.stream_rules.custom.description import stand_ins
from tocsin.stream_rules.custom.exit_cause import ExitCauses, ProcessExit, ending
from tocsin.stream_rules.custom.loading import Loaded, names_taken, not_loaded
from tocsin.stream_rules.custom.protocol import (
    Answer,
    Hello,
    LoadedRules,
    Message,
    OutOfMemoryNotice,
    SavedRun,
    pack,
)
from tocsin.stream_rules.engine.configured_rules import RuleSpec

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
"""How often a child at work is looked at."""

_GAP_S: Final = 0.5
"""A longer pause between two looks was ours: the machine slept, or we were not let run."""

_HEALTHY_S: Final = 60.0
"""A child that lived so long was not one of a series that died."""

_PAUSES_S: Final = (0.0, 0.2, 1.0, 5.0)
_END_S: Final = 2.0


class CustomHost:
    """Keeps the process of the custom rules. One for a worker, or for one check.

    Args:
        entries: those of the configuration that name custom rules.
        folder: where their relative paths start.
        failing: the instance of `rule_failed`; None: it is off.
        software: name and version, for the snapshots.
    """

    def __init__(
        self,
        entries: Sequence[RuleEntry],
        folder: Path,
        *,
        failing: RuleSpec | None = None,
        software: str = "",
        limits: Limits | None = None,
    ) -> None:
        self.broken = False
        """Whether the thread has ended by an error of ours: nothing comes any more."""
        self._entries = tuple(entry.model_copy(update={"actions": None}) for entry in entries)
        self._folder = folder
        self._failing = None if failing is None else (failing.name, failing.severity)
        self._software = software
        self._limits = limits or Limits()
        self._causes = ExitCauses(self._limits, [entry.name for entry in self._entries])
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._backlog = Backlog(self._limits)
        self._described: Mapping[str, JsonValue] = {}
        self._loaded: Loaded | None = None
        self._nudge: Callable[[], None] = _nobody
        self._watched_s = 0.0
        self._last_check_s = time.monotonic()
        self._saved_s = 0.0
        self._closing = self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._keep, name="tocsin-custom-rules", daemon=True)

    def start(self) -> Loaded:
        """Load the rules in the child. Blocks until that is done, `load_s` at most and a little.

        With problems, nothing runs: `close` is all that is left to do.
        """
        self._thread.start()
        with self._answered:
            # The thread has the deadline; this one is for a thread that has died of a bug.
            self._answered.wait_for(lambda: self._loaded is not None, self._limits.load_s + 30.0)
            if self._loaded is None:
                raise RuntimeError("the thread of the custom rules does not answer (a bug)")
            return self._loaded

    def attached(self, nudge: Callable[[], None]) -> None:
        """Whom to nudge, from the thread, when there is something to take."""
        self._nudge = nudge

    # -- orders ----------------------------------------------------------------------------

    def feed(self, records: Sequence[Record]) -> None:
        """Telemetry, in order per partition."""
        if records:
            with self._lock:
                for record in records:
                    self._backlog.feed(record, self._watched_s)
            self._wake()

    @contextlib.contextmanager
    def orders(self) -> Iterator[Backlog]:
        """The backlog, to be given other orders. Whoever has it has the lock."""
        with self._lock:
            yield self._backlog
        self._wake()

    def save(self, timeout_s: float) -> None:
        """Have the child save what it was given, and wait for it, so long at most."""
        with self._answered:
            self._answered.wait_for(self._is_saved, timeout_s)

    def _is_saved(self) -> bool:
        """Whether there is nothing left to save; asks for it else. Under the lock."""
        backlog = self._backlog
        if self.broken or not (backlog.unsaved or backlog.waiting):
            return True
        backlog.save()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")
        return False

    # -- what came of them -----------------------------------------------------------------

    def drain(self) -> Output:
        """What was found and saved since the last time."""
        with self._lock:
            return self._backlog.drain()

    def due_ms(self) -> int | None:
        """When a timer of a custom rule is due."""
        with self._lock:
            return self._backlog.due_ms

    def settled(self) -> bool:
        """Whether all that was given is answered, and taken."""
        with self._lock:
            return self.broken or not (self._backlog.waiting or self._backlog.untaken)

    def run(self, partition: int, run_id: str) -> SavedRun | None:
        """A run, as a child of ours has saved it last."""
        with self._lock:
            run = self._backlog.runs.get((partition, run_id))
            return None if run is None else run.by_child

    def close(self) -> None:
        """End the child and the thread. 2 s at most."""
        self._closing = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        with self._lock:
            gone = not self._closed and not self._thread.is_alive()
            self._closed = True
        if gone:
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with self._lock:
            if not self._closed:
                # Full: it is awake.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b".")

    # -- the thread ------------------------------------------------------------------------

    def _keep(self) -> None:
        """Start a child, serve it until it ends, disable its culprit, and again."""
        try:
            while not self._closing:
                began_s = time.monotonic()
                ended = self._live()
                if ended is None:
                    return
                if time.monotonic() - began_s > _HEALTHY_S:
                    self._causes.unexplained = 0
                if not self._after(ended):
                    return
                self._rest()
        except Exception:
            # A bug here must not look as if the rules had found nothing.
            logger.exception("the custom rules have ended (a bug)", extra={"action": "rules"})
            with self._answered:
                self.broken = True
                self._answered.notify_all()

    def _live(self) -> ProcessExit | None:
        """The life of one child."""
        try:
            child = ChildProcess.start(self._hello())
        except OSError as error:
            logger.warning("no process for the custom rules: %s", error, extra={"action": "rules"})
            return ProcessExit("exit")
        try:
            return self._serve(child)
        finally:
            child.end()

    def _hello(self) -> Hello:
        with self._lock:
            return Hello(
                entries=self._entries,
                folder=str(self._folder.absolute()),
                taken=names_taken(),
                software=self._software,
                failing=self._failing,
                memory_bytes=self._limits.memory_bytes,
                disabled=tuple(self._backlog.disabled.values()),
                described=self._described,
                unloaded=self._causes.why_none_runs(),
            )

    def _serve(self, child: ChildProcess) -> ProcessExit | None:
        """Until it dies, or is killed for what it does; None: there is no need of it any more."""
        with selectors.DefaultSelector() as selector:
            selector.register(child.link, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            began_s = self._watched_now_s()
            while not self._closing:
                self._hand_over(child)
                events = selectors.EVENT_READ
                if child.outgoing:
                    events |= selectors.EVENT_WRITE
                selector.modify(child.link, events)
                ready = {key.fd for key, _ in selector.select(self._patience_s(child))}
                now_s = self._watched_now_s()
                if self._wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                try:
                    child.send()
                    for message in child.receive():
                        self._apply(child, message)
                except OSError as error:
                    logger.info("custom rules: %s", error, extra={"action": "rules"})
                    return child.ended()
                if child.over():
                    return child.ended()
                if child.loaded is None:
                    if now_s - began_s > self._limits.load_s:
                        return ProcessExit("load", child.marker.read())
                    if child.memory_bytes() > self._limits.load_bytes:
                        return ProcessExit("load", child.marker.read(), detail="memory")
                    continue
                if self._loaded is not None and self._loaded.problems:
                    return None
                ended = self._exceeded(child, now_s)
                if ended is not None:
                    return ended
        return None

    def _watched_now_s(self) -> float:
        """The seconds that the child was watched, now."""
        now_s = time.monotonic()
        self._watched_s += min(now_s - self._last_check_s, _GAP_S)
        self._last_check_s = now_s
        return self._watched_s

    def _patience_s(self, child: ChildProcess) -> float | None:
        with self._lock:
            busy = child.loaded is None or self._backlog.under_way
            unsaved = self._backlog.unsaved
        if busy:
            return _POLL_S
        return self._limits.save_s if unsaved else None

    def _hand_over(self, child: ChildProcess) -> None:
        """Fill what goes to the child, and ask for its states from time to time."""
        if child.loaded is None:
            return
        with self._lock:
            backlog = self._backlog
            long_ago = time.monotonic() - self._saved_s > self._limits.save_s
            if backlog.unsaved and (long_ago or backlog.full):
                self._saved_s = time.monotonic()
                backlog.save()
            while not child.outgoing and (message := backlog.next_message()) is not None:
                child.outgoing += pack(message)

    def _apply(self, child: ChildProcess, message: Message) -> None:
        with self._answered:
            if isinstance(message, LoadedRules):
                child.loaded = message
                self._backlog.ready(self._watched_s)
                if self._loaded is None:
                    self._described = message.described
                    self._loaded = self._loaded_from(message)
            elif isinstance(message, OutOfMemoryNotice):
                child.out_of_memory = message
            elif isinstance(message, Answer):
                self._backlog.answered(message)
                if message.saved is not None:
                    self._causes.fruitless = 0
            self._answered.notify_all()
            nudge = self._backlog.untaken or not self._backlog.waiting
        if nudge:
            self._nudge()

    def _exceeded(self, child: ChildProcess, now_s: float) -> ProcessExit | None:
        """Whether the child is at one call for too long, or too far behind."""
        mark = child.marker.read()
        if mark is None or child.call is None or mark.number != child.call.number:
            child.call, child.call_since_s = mark, now_s
            child.call_cpu_s = child.cpu_s() if mark is not None else 0.0
        elif now_s - child.call_since_s > self._limits.call_s:
            return ProcessExit("wall", mark)
        elif child.cpu_s() - child.call_cpu_s > self._limits.call_cpu_s:
            return ProcessExit("cpu", mark)
        with self._lock:
            return self._backlog.behind(now_s)

    def _after(self, ended: ProcessExit) -> bool:
        """Who was it; whether another child is to be started."""
        if self._loaded is None:
            if self._causes.was_killed(ended):
                return True
            with self._answered:
                self._loaded = self._unloadable(ended)
                self._answered.notify_all()
            return False
        disabled = self._causes.rules_to_disable(ended)
        named = [(each.rule, each.run_id, each.why) for each in disabled]
        logger.warning(
            "the process of the custom rules is started again: %s",
            named or f"{ended.kind}, {ending(ended.returncode)}",
            extra={"action": "rules"},
        )
        with self._lock:
            self._backlog.restart(disabled, self._watched_s)
        return True

    def _loaded_from(self, head: LoadedRules) -> Loaded:
        """What the child has loaded, as specs of stand-ins, and its problems at their places."""
        problems = [
            replace(one, loc=(*self._entries[int(one.loc[0])].loc, *one.loc[1:]))
            for one in head.problems
        ]
        return Loaded(stand_ins(self._entries, head.described), problems)

    def _unloadable(self, ended: ProcessExit) -> Loaded:
        """The child has not survived loading: the problem is of the entry that it was at."""
        at = ended.mark.rule if ended.mark is not None else ""
        if ended.kind == "load" and ended.detail:
            why = f"takes more than {self._limits.load_bytes // MEBIBYTE:,} MiB of memory"
        elif ended.kind == "load":
            why = f"does not end within {self._limits.load_s:g} s"
        else:
            why = f"ends the process ({ending(ended.returncode)})"
        entry = next((entry for entry in self._entries if entry.name == at), self._entries[0])
        return Loaded({}, [not_loaded(entry, f"loading {entry.use} {why}")])

    def _rest(self) -> None:
        pause_s = _PAUSES_S[min(self._causes.unexplained, len(_PAUSES_S) - 1)]
        end_s = time.monotonic() + pause_s
        while not self._closing and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


def load_apart(
    entries: Sequence[RuleEntry], *, folder: Path, limits: Limits | None = None
) -> Loaded:
    """Load custom rules in a process that ends with this call: for checks, and before a start."""
    if not entries:
        return Loaded()
    host = CustomHost(entries, folder, limits=limits)
    try:
        return host.start()
    finally:
        host.close()


def _nobody() -> None:
    """Whom nobody has attached."""
