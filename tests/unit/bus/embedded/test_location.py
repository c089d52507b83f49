"""Where an embedded bus lies, and what a bus URL means."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tocsin.bus.embedded import location as place_module
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.location import Place, default_place, explicit_place
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import UnusableBus
from tocsin.bus.urls import open_bus
from tocsin.schemas.process import private_folders

LOCAL = "/dev/vda / ext4 rw 0 0\n"


def mounted(folder: Path, kind: str) -> str:
    escaped = str(folder).replace(" ", "\\040")
    return f"{LOCAL}server:/x {escaped} {kind} rw 0 0\n"


def test_the_default_place_is_in_the_folder(tmp_path: Path) -> None:
    assert default_place(tmp_path, mounts=LOCAL) == Place(tmp_path / ".tocsin" / "bus.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "9p", "fuse.sshfs", "gpfs", "ceph"]
)
def test_a_network_folder_falls_back_to_this_machine_and_says_so(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "my home"
    home.mkdir()
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}

    found = default_place(home, mounts=mounted(home, kind), env=env)
    again = default_place(home, mounts=mounted(home, kind), env=env)

    assert found.path.is_relative_to(tmp_path / f"tocsin-{os.getuid()}")
    assert found.path.name == "bus.db"
    assert found == again
    assert found.notice is not None
    assert kind in found.notice
    assert str(found.path) in found.notice
    with pytest.raises(UnusableBus, match=f"network file system \\({kind}\\)"):
        explicit_place(home / "bus.db", mounts=mounted(home, kind))


def test_the_innermost_and_latest_mount_counts(tmp_path: Path) -> None:
    inner = tmp_path / "scratch"
    inner.mkdir()
    mounts = mounted(tmp_path, "nfs4") + f"/dev/vdb {inner} xfs rw 0 0\n"
    assert place_module.network_type(inner / "bus.db", mounts=mounts) is None
    assert place_module.network_type(tmp_path / "bus.db", mounts=mounts) == "nfs4"
    assert place_module.network_type(Path(f"{tmp_path}x"), mounts=mounts) is None


def test_an_unwritable_folder_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.access
    # The tests may run as root, whom permissions do not hold.
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path and real(path, mode)
    )
    found = default_place(tmp_path, mounts=LOCAL, env={"XDG_RUNTIME_DIR": str(tmp_path / "run")})
    assert found.notice is not None
    assert "not writable" in found.notice
    with pytest.raises(UnusableBus, match="not writable"):
        explicit_place(tmp_path / "bus.db", mounts=LOCAL)


def test_a_runtime_folder_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run" / "user" / "1")}
    found = default_place(tmp_path, mounts=mounted(tmp_path, "nfs"), env=env)
    assert found.path.parts[:3] == ("/", "tmp", f"tocsin-{os.getuid()}")


def test_where_every_fallback_folder_is_taken_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folders, "SHARED", tmp_path)
    folder = tmp_path / f"tocsin-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnusableBus, match="not this user's alone"):
        default_place(
            tmp_path, mounts=mounted(tmp_path, "nfs"), env={"XDG_RUNTIME_DIR": str(tmp_path)}
        )


def test_an_explicit_place_in_a_missing_folder_or_at_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableBus, match="does not exist"):
        explicit_place(tmp_path / "a" / "b" / "bus.db", mounts=LOCAL)
    with pytest.raises(UnusableBus, match="is a folder"):
        explicit_place(tmp_path, mounts=LOCAL)


async def test_the_folder_is_private_and_ignored_by_git(tmp_path: Path) -> None:
    bus = open_bus(None, folder=tmp_path, explicit=False)
    assert isinstance(bus, EmbeddedBus)
    async with bus:
        folder = tmp_path / ".tocsin"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / ".gitignore").read_text() == "*\n"
        assert bus.url == f"embedded:{folder / 'bus.db'}"
        assert bus.notice is None


@pytest.mark.parametrize(
    "url",
    [
        *("", "bus.db", "embedded:", "kafka:broker:9092", "kafka://", "kafka://broker"),
        *("redis://x:1", "kafka://a:1,,b:2", "kafka://a:70000", "kafka://user:word@a:1"),
    ],
)
def test_a_bad_url_says_what_is_expected(url: str) -> None:
    with pytest.raises(UnusableBus, match="expected embedded:PATH or kafka://HOST:PORT"):
        open_bus(url)


def test_a_kafka_url_names_all_its_servers() -> None:
    assert open_bus("kafka://a:9092,[::1]:9093").url == "kafka://a:9092,[::1]:9093"


def test_security_is_for_kafka_and_complete(tmp_path: Path) -> None:
    with pytest.raises(UnusableBus, match="not for an embedded"):
        open_bus(f"embedded:{tmp_path / 'bus.db'}", security=KafkaSecurity(tls=True))
    with pytest.raises(UnusableBus, match="username and a password"):
        KafkaSecurity("PLAIN", "me")
    with pytest.raises(UnusableBus, match="needs a mechanism"):
        KafkaSecurity(username="me", password="x")
    with pytest.raises(UnusableBus, match="tls: true"):
        KafkaSecurity(ca_file=tmp_path / "ca.pem")
    with pytest.raises(UnusableBus, match="cannot use the TLS files"):
        KafkaSecurity(tls=True, ca_file=tmp_path / "missing.pem").ssl_context()


def test_the_protocol_follows_from_the_options() -> None:
    assert KafkaSecurity().protocol == "PLAINTEXT"
    assert KafkaSecurity(tls=True).protocol == "SSL"
    assert KafkaSecurity("PLAIN", "a", "b").protocol == "SASL_PLAINTEXT"
    assert KafkaSecurity("SCRAM-SHA-512", "a", "b", tls=True).protocol == "SASL_SSL"
    assert KafkaSecurity().ssl_context() is None
    assert KafkaSecurity(tls=True).ssl_context() is not None
