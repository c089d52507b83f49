"""Deliveries a second and their delay, beside Alertmanager: `python benchmarks/delivery.py`.

20,000 issues, ungrouped, to one webhook: ours signed and through the ledger on an embedded bus;
Alertmanager's (Debian's package prometheus-alertmanager, if it is installed) in memory. Service,
receiver and sender are a process each. First all at once, in batches of 50 as the others do; then
at a steady rate of a quarter of that. The delay is from before the issue is handed in until its
POST has arrived. Processor time is that of the service alone; the issues are made beforehand.

With `--workers`, several of ours share the partitions as one consumer group.

    --issues N    --rate N a second    --workers N    --profile FILE (of ours, for pstats)    --json
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import SecretStr

from tocsin.actions.composition import build_actions_service
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import Outgoing, Partition
from tocsin.runtime.heap import rare_collections
from tocsin.runtime.worker import Worker
from tocsin.schemas.configuration.file import SectionRegistry, check_config
from tocsin.schemas.ids import incarnation_id, issue_id
from tocsin.schemas.records.events import Data, Event
from tocsin.schemas.records.issues import IssueFiring, Subject
from tocsin.schemas.records.wire import meta_of
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import ISSUE_PARTITIONS, Topics, issue_partition

BATCH = 50
RUNS = 100
TOPICS = Topics()
SENT = re.compile(rb"sent=(\d+)ns")
UNSENT = b"sent=0ns"
CONFIG = """version: 1
secrets: {{hook: {{env: HOOK}}}}
receivers:
  hook: {{type: webhook, url: "{url}", sign: {{key: {{secret: hook}}}}, concurrency: 64}}
rules:
  - nonfinite: [hook]
"""
ALERTMANAGER = """route: {{receiver: hook, group_by: ['...'], group_wait: 0s, group_interval: 5m}}
receivers:
  - name: hook
    webhook_configs: [{{url: "{url}", send_resolved: false}}]
"""


@dataclass(frozen=True)
class Row:
    """One system under one load."""

    system: str
    load: str
    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Of the service, for one delivery."""


# -- the receiver: a process that answers 200 and notes the delay of each POST


class Answering(asyncio.Protocol):
    """HTTP/1.1, as much of it as both senders need."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self._seen = seen
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"(?i)content-length: (\d+)", self._buffer[:head])
            end = head + 4 + int(found[1] if found else b"0")
            if len(self._buffer) < end:
                return
            now_ns = time.monotonic_ns()
            self._seen += [
                (now_ns, now_ns - int(sent))
                for sent in dict.fromkeys(SENT.findall(self._buffer[head:end]))
            ]
            self._buffer = self._buffer[end:]
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


async def receive() -> None:
    """Print the port; for each line on stdin the number of POSTs; at its end all delays."""
    loop, seen = asyncio.get_running_loop(), list[tuple[int, int]]()
    server = await loop.create_server(lambda: Answering(seen), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(len(seen), flush=True)
    print(json.dumps(seen), flush=True)


@dataclass
class Receiver:
    """The receiver's process."""

    process: subprocess.Popen[str]
    url: str

    def count(self) -> int:
        """How many POSTs have arrived."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def delays(self) -> list[tuple[int, int]]:
        """When each arrived, and how late, nanoseconds. Ends it."""
        text, _ = self.process.communicate()
        found: list[tuple[int, int]] = json.loads(text)
        return found


def start_receiver() -> Receiver:
    """Start it."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--receive"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return Receiver(process, f"http://127.0.0.1:{int(process.stdout.readline())}/")


# -- ours


async def serve(path: Path, url: str, profile: str | None) -> None:
    """The action worker, until SIGTERM."""
    config, problems = check_config(
        CONFIG.format(url=url), "tocsin.yaml", SectionRegistry(ReceiverKinds())
    )
    assert config is not None, problems
    async with EmbeddedBus(path) as bus:
        service = build_actions_service(
            TOPICS,
            config,
            bus=bus,
            key=SigningKey.generate(),
            secrets={"hook": SecretStr("a-signing-secret")},
            embedded=True,
        )
        worker = Worker(bus, service, topics=TOPICS, group="actions")
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        profiler = cProfile.Profile() if profile else None
        if profiler is not None:
            profiler.enable()
        with rare_collections():
            await worker.run()
        if profiler is not None and profile is not None:
            profiler.disable()
            profiler.dump_stats(profile)


def issue_record(number: int) -> Outgoing:
    """An issue that says when it was made."""
    run = f"run-{number % RUNS}"
    incarnation = incarnation_id(run, "job", 0, 0)
    issue = IssueFiring(
        run_id=run,
        incarnation=incarnation,
        issue_id=issue_id(run, incarnation, "nonfinite", 1, str(number)),
        rule="nonfinite",
        use="nonfinite",
        rule_version=1,
        severity="warning",
        subject=Subject(kind="loss", name="loss"),
        reason=f"NaN in the loss, {UNSENT.decode()}",
        first_step=max(0, number),
        at_ms=time.time_ns() // 1_000_000,
    )
    event: Event[Data] = Event.wrap(
        issue, id=f"{issue.issue_id}/firing/0", source=f"/runs/{run}/rules", time_ms=issue.at_ms
    )
    return Outgoing(
        Partition(TOPICS.issues, issue_partition(run)),
        run.encode(),
        event.encode(),
        meta_of(event).headers(),
    )


def wait_for_claims(path: Path, workers: int) -> None:
    """Until each worker has partitions, and nothing that is under way changes its owner."""
    deadline = time.monotonic() + 60
    with closing(sqlite3.connect(path)) as db:
        while True:
            counts = db.execute("SELECT count(*) FROM claims GROUP BY member").fetchall()
            if len(counts) == workers and sum(count for (count,) in counts) == ISSUE_PARTITIONS:
                return
            assert time.monotonic() < deadline, f"the workers did not share the work: {counts}"
            time.sleep(0.05)


@contextmanager
def ours(
    folder: Path, url: str, issues: int, workers: int, profile: str | None
) -> Iterator[tuple[list[int], Callable[..., None]]]:
    """The process ids of the workers, and what hands issues in."""
    path = folder / "bus.db"
    made = {number: issue_record(number) for number in range(-BATCH, issues)}
    loop = asyncio.new_event_loop()
    bus = EmbeddedBus(path)
    loop.run_until_complete(bus.__aenter__())
    loop.run_until_complete(bus.init(TOPICS.specs()))
    producer = loop.run_until_complete(bus.producer())
    command = [sys.executable, __file__, "--serve", str(path), url]
    more = ["--profile", profile] if profile else []
    processes = [subprocess.Popen([*command, *more]) for _ in range(workers)]

    def sent_now(record: Outgoing) -> Outgoing:
        assert record.value is not None
        sent = b"sent=%dns" % time.monotonic_ns()
        return replace(record, value=record.value.replace(UNSENT, sent))

    def send(numbers: Sequence[int]) -> None:
        records = [sent_now(made[number]) for number in numbers]
        loop.run_until_complete(producer.publish(records))

    try:
        wait_for_claims(path, workers)
        yield [process.pid for process in processes], send
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
        loop.run_until_complete(producer.close())
        loop.run_until_complete(bus.__aexit__(None, None, None))
        loop.close()


# -- Alertmanager


@contextmanager
def alertmanager(folder: Path, url: str) -> Iterator[tuple[list[int], Callable[..., None]]]:
    """Its process id, and what hands alerts in."""
    (folder / "am.yml").write_text(ALERTMANAGER.format(url=url))
    address = "127.0.0.1:19093"
    process = subprocess.Popen(
        [
            "prometheus-alertmanager",
            f"--config.file={folder / 'am.yml'}",
            f"--storage.path={folder / 'am'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
            "--log.level=error",
        ]
    )

    def send(numbers: Sequence[int]) -> None:
        alerts = [
            {
                "labels": {"alertname": "nonfinite", "run": f"run-{n % RUNS}", "issue": str(n)},
                "annotations": {"reason": f"NaN in the loss, sent={time.monotonic_ns()}ns"},
                "startsAt": datetime.now(UTC).isoformat(),
            }
            for n in numbers
        ]
        request = urllib.request.Request(
            f"http://{address}/api/v2/alerts",
            json.dumps(alerts).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200

    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "Alertmanager did not start"
                time.sleep(0.1)
        yield [process.pid], send
    finally:
        process.terminate()
        process.wait(30)


# -- measuring


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    system: str, issues: int, rate: float | None, profile: str | None = None, workers: int = 1
) -> Row:
    """One run: as fast as they are accepted, or at a steady rate."""
    receiver = start_receiver()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        under_test = (
            ours(folder, receiver.url, issues, workers, profile)
            if system == "tocsin"
            else alertmanager(folder, receiver.url)
        )
        with under_test as (pids, send):
            # The first ones find connections and imports, and are not counted.
            send(range(-BATCH, 0))
            wait_for(receiver, BATCH)
            used_s, began = sum(map(cpu_s, pids)), time.monotonic()
            for first in range(0, issues, BATCH):
                if rate is not None:
                    time.sleep(max(0.0, began + first / rate - time.monotonic()))
                send(range(first, min(first + BATCH, issues)))
            wait_for(receiver, issues + BATCH)
            used_s = sum(map(cpu_s, pids)) - used_s
    seen = receiver.delays()[BATCH:]
    assert len(seen) == issues, f"{len(seen):,} of {issues:,} arrived"
    late = sorted(delay / 1e6 for _, delay in seen)
    took_s = seen[-1][0] / 1e9 - began
    return Row(
        system if workers == 1 else f"{system} x{workers}",
        "at once" if rate is None else f"{rate:,.0f}/s",
        issues / took_s,
        statistics.median(late),
        late[int(len(late) * 0.99)],
        1e6 * used_s / issues,
    )


def wait_for(receiver: Receiver, count: int) -> None:
    """Until so many POSTs have arrived."""
    deadline = time.monotonic() + 300
    while receiver.count() < count:
        assert time.monotonic() < deadline, f"{receiver.count():,} of {count:,} arrived"
        time.sleep(0.05)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--issues", type=int, default=20_000)
    parser.add_argument("--rate", type=float, help="of the second load, for both")
    parser.add_argument("--workers", type=int, default=1, help="of ours")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        asyncio.run(receive())
        return 0
    if arguments.serve:
        path, url = arguments.serve
        asyncio.run(serve(Path(path), url, arguments.profile))
        return 0
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    workers = arguments.workers
    rows = [measure("tocsin", arguments.issues, None, arguments.profile, workers)]
    rate = arguments.rate or rows[0].per_second / 4
    if not arguments.profile:
        rows.append(measure("tocsin", arguments.issues // 4, rate, None, workers))
        if shutil.which("prometheus-alertmanager"):
            rows.append(measure("alertmanager", arguments.issues, None))
            rows.append(measure("alertmanager", arguments.issues // 4, rate))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"{'system':<14}{'load':<12}{'deliveries/s':>13}{'p50 ms':>9}{'p99 ms':>9}{'CPU µs':>9}")
    for row in rows:
        print(
            f"{row.system:<14}{row.load:<12}{row.per_second:>13,.0f}{row.p50_ms:>9,.0f}"
            f"{row.p99_ms:>9,.0f}{row.cpu_us:>9,.0f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
