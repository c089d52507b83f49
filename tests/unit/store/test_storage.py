"""What keeps a store's files: the same promises from a folder and from a bucket."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from tocsin.store.errors import StoreUnavailable, UnusableStore
from tocsin.store.storage.local import LocalStorage
from tocsin.store.storage.opening import open_storage
from tocsin.store.storage.port import Content, Overtaken, Storage

Opened = Callable[[], Storage]


@pytest.fixture(params=["folder", "bucket"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Opens the same storage each time, as another process would."""
    if request.param == "folder":
        return lambda: open_storage(tmp_path / "store")
    endpoint = request.getfixturevalue("endpoint")
    prefix = f"s3://runs/{tmp_path.name}"
    return lambda: open_storage(prefix, {"endpoint": endpoint})


def put(storage: Storage, path: str, data: bytes) -> None:
    made = storage.scratch() / "made"
    made.write_bytes(data)
    storage.move_in(path, made)
    assert not made.exists()


def test_a_small_file_is_replaced_only_by_who_has_read_it(opened: Opened) -> None:
    first, second = opened(), opened()
    assert first.read("run=a%3Ab/one.json") is None

    first.replace("run=a%3Ab/one.json", b"1", expected=None)
    found = second.read("run=a%3Ab/one.json")

    assert found is not None
    assert found.data == b"1"
    with pytest.raises(Overtaken):
        second.replace("run=a%3Ab/one.json", b"x", expected=None)
    second.replace("run=a%3Ab/one.json", b"2", expected=found.version)
    with pytest.raises(Overtaken):
        first.replace("run=a%3Ab/one.json", b"3", expected=found.version)
    again = first.read("run=a%3Ab/one.json")
    assert again is not None
    assert again.data == b"2"


def test_a_write_to_a_bucket_that_is_sent_again_is_its_own(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"s3://runs/{tmp_path.name}", {"endpoint": endpoint})
    put = obstore.put

    def unanswered(*args: Any, **options: Any) -> Any:
        put(*args, **options)
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", unanswered)
    first = storage.replace("run=a/one.json", b"1", expected=None)
    second = storage.replace("run=a/one.json", b"2", expected=first)

    assert storage.read("run=a/one.json") == Content(b"2", second)


def test_files_are_listed_fetched_and_deleted(opened: Opened) -> None:
    storage = opened()
    put(storage, "run=a/incarnation=1/one.parquet", b"one")
    put(storage, "run=a/incarnation=2/two.parquet", b"two")
    put(storage, "run=b%40c/three.parquet", b"three")

    assert opened().local("run=b%40c/three.parquet").read_bytes() == b"three"
    assert list(opened().files("run=a")) == [
        "run=a/incarnation=1/one.parquet",
        "run=a/incarnation=2/two.parquet",
    ]
    assert {"run=a", "run=b%40c"} <= set(opened().folders())
    assert list(opened().folders("run=a")) == ["incarnation=1", "incarnation=2"]

    assert storage.local("run=a/incarnation=1/one.parquet").read_bytes() == b"one"
    storage.delete(["run=a/incarnation=1/one.parquet", "run=a/not/there.parquet"])

    assert list(opened().folders("run=a")) == ["incarnation=2"]
    for one in (storage, opened()):  # what was fetched of it is gone, too
        with pytest.raises(FileNotFoundError):
            one.local("run=a/incarnation=1/one.parquet")


def test_what_is_not_there_is_empty(opened: Opened) -> None:
    assert list(opened().folders("run=none")) == []
    assert list(opened().files("run=none")) == []


def test_a_folder_is_private_and_holds_nothing_that_is_half_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    put(storage, "run=a/one.parquet", b"one")

    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    left = storage.scratch() / "left"
    left.write_bytes(b"")
    written_s = left.stat().st_mtime
    storage.tidy(written_s + 3_600)
    assert left.exists()
    storage.tidy(written_s + 25 * 3_600)
    assert not left.exists()


def test_a_small_file_is_discarded_only_as_it_was_read(opened: Opened) -> None:
    storage = opened()
    path = "run=a/one.json"
    read = storage.replace(path, b"1", expected=None)
    written = opened().replace(path, b"2", expected=read)

    storage.discard(path, expected=read)
    assert storage.read(path) is not None
    storage.discard(path, expected=written)
    assert storage.read(path) is None
    assert "run=a" not in storage.folders()
    storage.discard(path, expected=written)


def test_a_folder_is_made_anew_if_it_is_deleted_before_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock goes with it, and another one is taken: two writers never hold one each."""
    first, second = LocalStorage(tmp_path / "store"), LocalStorage(tmp_path / "store")
    version = first.replace("run=a/one.json", b"1", expected=None)
    deleted: list[bool] = []

    def lock(descriptor: int, operation: int) -> None:
        if not deleted:
            deleted.append(True)
            second.discard("run=a/one.json", expected=version)
        os_lock(descriptor, operation)

    os_lock = fcntl.flock
    monkeypatch.setattr("tocsin.store.storage.local.fcntl.flock", lock)
    with pytest.raises(Overtaken):
        first.replace("run=a/one.json", b"2", expected=version)
    first.replace("run=a/one.json", b"3", expected=None)

    found = second.read("run=a/one.json")
    assert found is not None
    assert found.data == b"3"


def test_a_full_disk_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "store")
    storage.scratch()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(StoreUnavailable, match="No space left"):
        put_anyway(storage)


def put_anyway(storage: LocalStorage) -> None:
    made = storage.scratch() / "made"
    made.write_bytes(b"x")
    storage.move_in("run=a/one.parquet", made)


def test_a_bucket_that_is_away_is_no_mistake_either() -> None:
    with pytest.raises(StoreUnavailable, match="does not answer"):
        open_storage(
            "s3://runs/x",
            {
                "endpoint": "http://127.0.0.1:9",
                "region": "us-east-1",
                "access_key_id": "a",
                "secret_access_key": "b",
            },
        ).read("x")


@pytest.mark.parametrize("url", ["ftp://runs", ""])
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(UnusableStore, match="expected a folder, or s3://"):
        open_storage(url)
