"""A real Apache Kafka for the tests: one broker on loopback, run from its jars (Maven Central).

`TOCSIN_TEST_KAFKA=host:port` uses a running one instead. Without Java, Maven and that, tests that
need Kafka are skipped, unless `TOCSIN_REQUIRE_KAFKA=1`: then they fail.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.servers.certificates import Authority

POM = Path(__file__).with_name("kafka-pom.xml")
START_S = 240.0
STOP_S = 30.0
SESSION_MS = 3_000
"""For a broker that is to be frozen and killed on a machine that has much else to do."""

LASTING_MS = 120_000
"""For a broker that nobody restarts: silent for as long as a busy machine may make it, it keeps its
place. One that has lost it is in no metadata, and its partitions have no leader."""

CLASSES = "classes.jsa"
"""Beside the jars: the classes of a broker as Java has them in memory, which halves its start."""

_LOADING = re.compile(
    "(Scheduling loading|Finished loading|Failed to load"
    "|Scheduling unloading|Ignored load completion)"
    r".*?(__consumer_offsets-\d+)"
)

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30

DELETED_MS = 1_000
"""How long a broker takes to note which records were deleted: one that is killed before has them
back."""


def jars() -> Path:
    """The folder with the broker's jars, fetched once per version of the pom, and its classes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tocsin"
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:16]
    folder = cache / f"kafka-{digest}"
    if (folder / CLASSES).exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kafka.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            part = cache / f"kafka-{digest}.part"
            shutil.rmtree(part, ignore_errors=True)
            fetched = subprocess.run(
                [
                    *("mvn", "-B", "-q", "-f", str(POM), "dependency:copy-dependencies"),
                    *("-DincludeScope=runtime", f"-DoutputDirectory={part}"),
                ],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if fetched.returncode != 0 or not part.is_dir():
                raise RuntimeError(f"Maven could not fetch Kafka: {fetched.stdout[-2000:]}")
            part.rename(folder)
        if not (folder / CLASSES).exists():
            _archive_classes(folder)
    return folder


def _archive_classes(folder: Path) -> None:
    """Have a broker note what it has loaded. An empty file says that this Java cannot do that."""
    part = folder / f"{CLASSES}.part"
    with tempfile.TemporaryDirectory(prefix="tocsin-kafka-") as place:
        flag = f"-XX:ArchiveClassesAtExit={part}"
        broker = Broker(Path(place), jars=folder, flags=[flag])
        broker.start()
        broker.stop()
    part.touch()
    part.rename(folder / CLASSES)


def in_memory() -> Path | None:
    """Where a broker that nobody kills may have its data, None for where temporary files are: each
    team has 183 partitions, and to make the files of one takes milliseconds on a disk."""
    if not _MEMORY.is_dir():
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free >= _ROOM else None


def unavailable() -> str | None:
    """Why no broker can be started here, or None. Fetches the jars."""
    for tool in ("java", "mvn"):
        if shutil.which(tool) is None:
            return f"Kafka needs {tool}, which is not installed; or set TOCSIN_TEST_KAFKA=host:port"
    try:
        jars()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def skip_or_fail(reason: str) -> None:
    """Skip this test; where Kafka is required, fail it."""
    if os.environ.get("TOCSIN_REQUIRE_KAFKA") == "1":
        pytest.fail(f"TOCSIN_REQUIRE_KAFKA=1: {reason}")
    pytest.skip(reason)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@dataclass
class Broker:
    """One broker and controller in one process, with its data in `folder`.

    `users` (name to password) are let in at a second port, by SCRAM-SHA-256 or PLAIN. With
    `certificates` there are two more, with TLS: for users, and for those who have a certificate of
    that authority. With `acls` they may do only what was granted; at the first port all is
    permitted. One with a `leader` is a
    further broker of its cluster; where there are `voters`, each of these is a controller, too.
    With an `advertised_port`, which is a proxy's, clients that came through it are sent there, and
    the proxy finds the broker at `proxied_port`.
    """

    folder: Path
    users: Mapping[str, str] = field(default_factory=dict)
    acls: bool = False
    certificates: Authority | None = None
    node: int = 1
    leader: Broker | None = None
    voters: Sequence[Broker] = field(default=(), repr=False, compare=False)
    advertised_port: int = 0
    session_ms: int = SESSION_MS
    jars: Path = field(default_factory=jars, repr=False, compare=False)
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    cluster: str = field(
        default_factory=lambda: base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    )
    controller_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    guarded_port: int = 0
    proxied_port: int = 0
    encrypted_port: int = 0
    certified_port: int = 0

    @property
    def server(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The bus URL."""
        return f"kafka://{self.server}"

    @property
    def guarded_url(self) -> str:
        """The bus URL where one has to log in."""
        return f"kafka://127.0.0.1:{self.guarded_port}"

    @property
    def encrypted_url(self) -> str:
        """The bus URL where one has to log in over TLS."""
        return f"kafka://127.0.0.1:{self.encrypted_port}"

    @property
    def certified_url(self) -> str:
        """The bus URL where one needs a certificate."""
        return f"kafka://127.0.0.1:{self.certified_port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None
        return self.process.pid

    def take_ports(self) -> None:
        """Choose its ports, which are then its own for good."""
        if not self.port:
            self.port, self.guarded_port, self.controller_port, self.proxied_port = free_ports(4)
            self.encrypted_port, self.certified_port = free_ports(2)

    def start(self) -> None:
        """Start it, the first time with an empty store, and wait until it answers."""
        self.launch()
        self.wait_until_it_answers()

    def launch(self) -> None:
        """Start it, and do not wait: of several controllers none answers alone."""
        properties = self.folder / "server.properties"
        if not properties.exists():
            self.take_ports()
            self.folder.mkdir(parents=True, exist_ok=True)
            properties.write_text("\n".join(self._properties()) + "\n")
            cluster = self.cluster if self.leader is None else self.leader.cluster
            scram: list[str] = []
            for name, password in self.users.items():
                scram += ["--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]"]
            # With "=", for an id may begin with "-".
            format_ = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}"]
            formatting = self._java([*format_, "-c", str(properties), *scram])
            if formatting.wait(START_S) != 0:
                properties.unlink()
                raise RuntimeError(f"Kafka could not format its store:\n{self._log()}")
        self.process = self._java(["kafka.Kafka", str(properties)])

    def wait_until_it_answers(self) -> None:
        """Raises RuntimeError: it did not start."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        self.stop()
        raise RuntimeError(f"Kafka did not start:\n{self._log()}")

    def stop(self, *, hard: bool = False) -> None:
        """End it, by SIGTERM, or by SIGKILL if `hard` or if it takes too long."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the block it holds its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    @property
    def log(self) -> Path:
        """What it has to say."""
        return self.folder / "broker.log"

    def failed_coordinators(self) -> list[str]:
        """Partitions of groups whose load has failed at last, as its log has it. Kafka 4.3.1 may
        leave one so after it was killed, until another broker leads it: its groups do nothing."""
        last = {
            partition: what for what, partition in _LOADING.findall(self.log.read_text("latin-1"))
        }
        failed = ("Failed to load", "Ignored load completion")
        return [f"{what}: {place}" for place, what in sorted(last.items()) if what in failed]

    def _log(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _java(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        archive = self.jars / CLASSES
        archived = archive.exists() and archive.stat().st_size
        flags = [*self.flags, *([f"-XX:SharedArchiveFile={archive}"] if archived else ())]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [
                    *("java", "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"),
                    *(*flags, "-cp", f"{self.jars}/*", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ},
                start_new_session=True,
            )

    def _properties(self) -> list[str]:
        own = f"PLAINTEXT://127.0.0.1:{self.port}"
        if self.users:
            own += f",SASL_PLAINTEXT://127.0.0.1:{self.guarded_port}"
        if self.certificates is not None:
            own += f",SASL_SSL://127.0.0.1:{self.encrypted_port}"
            own += f",SSL://127.0.0.1:{self.certified_port}"
        listens, advertises = own, own
        if self.advertised_port:
            listens += f",PROXIED://127.0.0.1:{self.proxied_port}"
            advertises += f",PROXIED://127.0.0.1:{self.advertised_port}"
        voters = self.voters or (self.leader or self,)
        votes = any(voter is self for voter in voters)
        if votes:
            listens += f",CONTROLLER://127.0.0.1:{self.controller_port}"
        quorum = ",".join(f"{one.node}@127.0.0.1:{one.controller_port}" for one in voters)
        copies = len(voters)
        # What nobody kills or freezes need not say and note so often that it is there.
        lasts = self.session_ms >= LASTING_MS
        lines = [
            f"process.roles=broker{',controller' if votes else ''}",
            f"node.id={self.node}",
            f"controller.quorum.voters={quorum}",
            f"listeners={listens}",
            f"advertised.listeners={advertises}",
            "controller.listener.names=CONTROLLER",
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
            "PROXIED:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL",
            "inter.broker.listener.name=PLAINTEXT",
            f"log.dirs={self.folder / 'data'}",
            f"offsets.topic.replication.factor={copies}",
            "offsets.topic.num.partitions=6",
            f"transaction.state.log.replication.factor={copies}",
            "transaction.state.log.min.isr=1",
            "group.initial.rebalance.delay.ms=0",
            # A broker that was killed is let in again only when its last session is over.
            f"broker.session.timeout.ms={self.session_ms}",
            f"broker.heartbeat.interval.ms={2_000 if lasts else 200}",
            "group.min.session.timeout.ms=1000",
            # As a broker is by default: nothing of ours may create a topic by asking for it.
            "auto.create.topics.enable=true",
            "log.cleaner.backoff.ms=1000",
            "log.cleaner.dedupe.buffer.size=16777216",
            "log.retention.check.interval.ms=2000",
            "log.initial.task.delay.ms=500",
            f"log.flush.start.offset.checkpoint.interval.ms={60_000 if lasts else DELETED_MS}",
            f"replica.high.watermark.checkpoint.interval.ms={60_000 if lasts else 5_000}",
        ]
        if self.users:
            logins = " ".join(f'user_{name}="{word}"' for name, word in self.users.items())
            lines.append("sasl.enabled.mechanisms=SCRAM-SHA-256,PLAIN")
            for listener in ("sasl_plaintext", "sasl_ssl"):
                jaas = f"listener.name.{listener}"
                lines += [
                    f"{jaas}.scram-sha-256.sasl.jaas.config="
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;",
                    f"{jaas}.plain.sasl.jaas.config="
                    f"org.apache.kafka.common.security.plain.PlainLoginModule required {logins};",
                ]
        if self.certificates is not None:
            lines += [
                "ssl.keystore.type=PEM",
                f"ssl.keystore.location={self.certificates.server}",
                "ssl.truststore.type=PEM",
                f"ssl.truststore.location={self.certificates.ca}",
                "listener.name.ssl.ssl.client.auth=required",
            ]
        if self.acls:
            lines += [
                "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users=User:ANONYMOUS",
                "allow.everyone.if.no.acl.found=false",
            ]
        return lines


@contextmanager
def running_cluster(folder: Path, brokers: int) -> Iterator[list[Broker]]:
    """So many brokers of one cluster, the first of which is its controller, too."""
    first = Broker(folder / "broker-1")
    rest = [Broker(folder / f"broker-{n}", node=n, leader=first) for n in range(2, brokers + 1)]
    with _stopped_at_last([first, *rest]) as started:
        for broker in started:
            broker.start()
        yield started


@contextmanager
def running_quorum(folder: Path, advertised_ports: Sequence[int]) -> Iterator[list[Broker]]:
    """A broker for each of these ports of proxies, all of which are controllers: the cluster works
    as long as more than half of them do. What they keep has as many copies."""
    voters: list[Broker] = []
    for node, port in enumerate(advertised_ports, 1):
        leader = voters[0] if voters else None
        place = folder / f"broker-{node}"
        voters.append(Broker(place, node=node, leader=leader, voters=voters, advertised_port=port))
    for broker in voters:
        broker.take_ports()
    with _stopped_at_last(voters):
        for broker in voters:
            broker.launch()
        for broker in voters:
            broker.wait_until_it_answers()
        yield voters


@contextmanager
def _stopped_at_last(brokers: list[Broker]) -> Iterator[list[Broker]]:
    try:
        yield brokers
    finally:
        for broker in reversed(brokers):
            broker.stop(hard=True)
