"""What `start()` runs on a node without a launcher."""

from __future__ import annotations

import asyncio
import os
import types
from pathlib import Path
from typing import cast

import pytest

from support.trainings.captured import said
from support.waiting import SOON_S, wait_until
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.emitter.launch import in_process
from tocsin.emitter.launch.helper_child import HelperChild
from tocsin.emitter.launch.in_process import Services
from tocsin.emitter.node.registry import NODE_FOLDER, NodeFolder
from tocsin.emitter.node.sampler import Node, Sample
from tocsin.emitter.process import environment
from tocsin.emitter.stop.listener import ThreadListener
from tocsin.emitter.training.training import Training
from tocsin.schemas.configuration.file import load_config
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.topics import Topics


async def make(path: Path) -> None:
    async with EmbeddedBus(path) as bus:
        await bus.init(Topics().specs())


@pytest.mark.parametrize("wanted", [True, False])
def test_the_node_is_sampled_where_there_is_no_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(
        in_process, "kafka_opener", lambda *_: lambda: EmbeddedBus(tmp_path / "bus.db")
    )
    taken: list[float] = []
    sample = Node.sample

    def noted(self: Node, now_s: float) -> Sample:
        taken.append(now_s)
        return sample(self, now_s)

    monkeypatch.setattr(Node, "sample", noted)
    asyncio.run(make(tmp_path / "bus.db"))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    added = {
        environment.RUN_ID: "r1", environment.JOB_ID: "j1", environment.PREFIX: "tocsin",
        environment.BUS: "kafka://nowhere:9092", environment.RUNTIME_DIR: str(runtime),
    }  # fmt: skip
    node = NodeFolder(tmp_path / "node")
    environ = {NODE_FOLDER: str(node.path)}
    running = Services(environ, added, load_config(None, {}, folder=tmp_path), helper=wanted)
    training = types.SimpleNamespace(
        sender=types.SimpleNamespace(records=1),
        origin=RecordOrigin(run_id="r1", incarnation="i1"),
        emit=lambda data: None,
    )
    running.listen(cast(Training, training))
    listener = running._listener
    assert isinstance(listener, ThreadListener)
    # The second sample begins when the first one is there.
    wait_until(lambda: listener.listener.ready.is_set() and (len(taken) > 1 or not wanted))
    # Whoever samples or does not, `tocsin sample` finds the run.
    (found,) = node.registrations()
    assert (found.run_id, found.incarnation, found.job_pid) == ("r1", "i1", os.getpid())
    running.close()
    assert node.registrations() == []
    samples = said(tmp_path).samples
    assert bool(samples) is wanted
    assert all(frame.origin.incarnation == "i1" for frame in samples)


def test_a_helper_that_drains_for_too_long_sees_the_end_of_its_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = tmp_path / "ended"
    monkeypatch.setattr(
        in_process,
        "helper_command",
        lambda *_, **__: ("sh", "-c", f"cat > {tmp_path / 'orders'}; touch {ended}"),
    )
    drain, close = HelperChild.drain, HelperChild.close
    monkeypatch.setattr(HelperChild, "drain", lambda self: drain(self, 0.1))
    monkeypatch.setattr(HelperChild, "close", lambda self: close(self, SOON_S))
    asyncio.run(make(tmp_path / "bus.db"))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    added = {
        environment.RUN_ID: "r1", environment.JOB_ID: "j1", environment.PREFIX: "tocsin",
        environment.BUS: f"embedded:{tmp_path / 'bus.db'}", environment.RUNTIME_DIR: str(runtime),
    }  # fmt: skip
    running = Services({}, added, load_config(None, {}, folder=tmp_path), helper=True)
    training = types.SimpleNamespace(origin=RecordOrigin(run_id="r1", incarnation="i1"))
    running.listen(cast(Training, training))
    running.close()
    assert ended.exists()
    assert "drain 0.1\n" in (tmp_path / "orders").read_text()
    assert "did not finish" in capsys.readouterr().err
