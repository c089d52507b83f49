"""Addresses of `--notify` beside the bus: who may read them, for which issues, and how long."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tocsin.console.services.notify_addresses import KEEP_S, KeptAddresses, kept_addresses

HOOK = "https://hooks.example.com/ml?token=SECRET"


def launch(tmp_path: Path, name: str = "a1", *notify: str) -> KeptAddresses:
    return KeptAddresses(tmp_path / "bus.db", name, notify or (HOOK,))


def file_of(tmp_path: Path, name: str = "a1") -> Path:
    return tmp_path / "left-over" / f"{name}.json"


def test_they_count_for_the_incarnations_of_their_launch_until_it_forgets(tmp_path: Path) -> None:
    first, second = launch(tmp_path), launch(tmp_path, "b2", "me@example.com")
    first.keep({"i1"})
    second.keep({"i2", "i3"})
    first.keep({"i1", "i4"})

    found = kept_addresses(tmp_path / "bus.db")
    assert found == {
        "i1": (HOOK,),
        "i4": (HOOK,),
        "i2": ("me@example.com",),
        "i3": ("me@example.com",),
    }
    first.remove()
    first.remove()
    assert set(kept_addresses(tmp_path / "bus.db")) == {"i2", "i3"}


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    launch(tmp_path).keep({"i1"})
    path = file_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"incarnations": "i1", "notify": []}',
        json.dumps({"incarnations": ["i1"], "notify": [1]}),
        "[" * 50_000,
    ],
)
def test_what_is_no_file_of_ours_is_passed_over(tmp_path: Path, content: str) -> None:
    launch(tmp_path).keep({"i1"})
    bad = file_of(tmp_path, "bad")
    bad.write_text(content)
    bad.chmod(0o600)
    assert set(kept_addresses(tmp_path / "bus.db")) == {"i1"}


def test_files_that_others_may_change_and_links_are_passed_over(tmp_path: Path) -> None:
    launch(tmp_path).keep({"i1"})
    file_of(tmp_path, "link").symlink_to(file_of(tmp_path))
    file_of(tmp_path).chmod(0o660)
    assert kept_addresses(tmp_path / "bus.db") == {}


def test_old_ones_are_removed(tmp_path: Path) -> None:
    launch(tmp_path).keep({"i1"})
    path = file_of(tmp_path)
    old = path.stat().st_mtime - KEEP_S - 60
    os.utime(path, (old, old))
    assert kept_addresses(tmp_path / "bus.db") == {}
    assert not path.exists()
