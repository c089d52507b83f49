import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tocsin.emitter.process import runtime_folder
from tocsin.emitter.stop import datagrams


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[datagrams.Endpoint]:
    made = datagrams.Endpoint(tmp_path / "e.sock")
    yield made
    made.close()


def test_a_message_arrives_as_it_was_sent(endpoint: datagrams.Endpoint) -> None:
    message: datagrams.Message = {
        "kind": "hello",
        "pid": 7,
        "socket": "/x",
        "ok": True,
        "none": None,
    }
    assert datagrams.send(endpoint.path, message)
    assert endpoint.receive() == message
    assert endpoint.receive() is None


def test_what_is_no_message_is_left_aside(endpoint: datagrams.Endpoint) -> None:
    for raw in (b"", b"{", b"[1]", b'{"no":"kind"}', b'{"kind":{}}', b'{"kind":"a","x":[1]}'):
        assert datagrams.decode(raw) is None
    assert datagrams.decode(b"[" * 50_000) is None
    assert datagrams.decode(json.dumps({"kind": "x" * datagrams.MAX_BYTES}).encode()) is None


def test_sending_never_waits_and_never_raises(tmp_path: Path) -> None:
    assert not datagrams.send(tmp_path / "nobody.sock", {"kind": "hello"})
    assert not datagrams.send("/" + "x" * 300, {"kind": "hello"})
    full = datagrams.Endpoint(tmp_path / "full.sock")
    results = {datagrams.send(full.path, {"kind": "a", "text": "x" * 50_000}) for _ in range(200)}
    full.close()
    assert False in results
    assert not datagrams.send(
        tmp_path / "full.sock", {"kind": "a", "text": "x" * datagrams.MAX_BYTES}
    )


def test_drain_takes_all_and_skips_rubbish(endpoint: datagrams.Endpoint) -> None:
    datagrams.send(endpoint.path, {"kind": "a"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        raw.sendto(b"rubbish", str(endpoint.path))
    datagrams.send(endpoint.path, {"kind": "b"})
    assert [message["kind"] for message in endpoint.drain()] == ["a", "b"]


def test_a_closed_endpoint_leaves_no_file_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(path))
    endpoint = datagrams.Endpoint(path)
    endpoint.close()
    endpoint.close()
    assert not path.exists()


def test_the_folder_of_a_job_is_private_and_short() -> None:
    # Not tmp_path: with several workers of the tests that is longer than a socket's path may be.
    with tempfile.TemporaryDirectory() as short:
        folder = runtime_folder.job_folder({"XDG_RUNTIME_DIR": short})
        assert folder.parent == Path(short) / f"tocsin-{os.getuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        runtime_folder.remove_folder(folder)
        assert not folder.exists()


def test_a_long_or_foreign_runtime_folder_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    assert runtime_folder.private_folder({"XDG_RUNTIME_DIR": str(deep)}) == Path(
        f"/tmp/tocsin-{os.getuid()}"
    )
    open_to_all = tmp_path / f"tocsin-{os.getuid()}"
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    assert runtime_folder.private_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) != open_to_all


def test_processes_of_a_job_find_the_same_folder(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime_folder.shared_job_folder(environ, "a") == runtime_folder.shared_job_folder(
        environ, "a"
    )
    assert runtime_folder.shared_job_folder(environ, "a") != runtime_folder.shared_job_folder(
        environ, "b"
    )


def test_fields_of_the_wrong_type_count_as_missing() -> None:
    message: datagrams.Message = {"kind": "x", "pid": "7", "rank": True, "socket": 3}
    assert datagrams.number(message, "pid") == 0
    assert datagrams.number(message, "rank", 5) == 5
    assert datagrams.text(message, "socket") == ""
