"""A file that a person has named: whole or not at all, and never in the place of a pipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tocsin.schemas.whole_file import whole_file


def test_a_pipe_that_is_open_already_is_written_to() -> None:
    """`-o /dev/stdout | less` and `-o >(gzip)`: the link leads to no path, only to the pipe."""
    reading, writing = os.pipe()
    try:
        with whole_file(Path(f"/dev/fd/{writing}")) as draft:
            draft.write_text("all of it")
        assert os.read(reading, 100) == b"all of it"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with whole_file(link) as draft:
        draft.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_after_an_error_the_file_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half() -> None:
        with whole_file(path) as draft:
            draft.write_text("half")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        half()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
