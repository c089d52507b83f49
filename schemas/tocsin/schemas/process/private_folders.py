"""Folders of one user on a machine that others use too: made, checked, and emptied with care.

A name below a folder that all may write to (/tmp) can be taken by anybody before us, by a folder or
by a link. So each such folder is made with mode 0700, its owner and mode are looked at without
following a link, and in it only sockets of this user are removed. Standard library only, so that it
can be used before anything else of ours is imported.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

SHARED: Final = Path("/tmp")
"""Where a user without a folder of the session has one."""

_WHOLE_MAP: Final = ["0", "0", "4294967295"]
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def user_folder(environ: Mapping[str, str], *, longest: int | None = None) -> Path | None:
    """`tocsin-UID` in XDG_RUNTIME_DIR, else in /tmp: the first that can be used; makes nothing.

    A base is passed over that does not exist (a variable handed on by Slurm, sudo or cron), that
    somebody else could exchange the folder in, or that makes a path of more than `longest` bytes;
    and a folder that is there already and not this user's alone. None: no base is left.
    """
    name = f"tocsin-{os.getuid()}"
    for base in (environ.get("XDG_RUNTIME_DIR"), str(SHARED)):
        if not base or not os.path.isabs(base) or not _holds_safely(base):
            continue
        folder = Path(base) / name
        if longest is not None and len(os.fsencode(folder)) > longest:
            continue
        if is_private(folder) if os.path.lexists(folder) else os.access(base, os.W_OK | os.X_OK):
            return folder
    return None


def make_private(folder: Path) -> Path:
    """Make the folder if it is not there (0700, its parent exists), and make sure of it.

    Raises:
        PermissionError: there is something else: a link, or a folder that is not this user's alone.
        OSError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(
                f"{folder} is not a folder of this user alone: expected mode 0700 and no link; "
                "remove it"
            ) from None
    return folder


def is_private(folder: Path) -> bool:
    """Whether it is a real folder, of this user, into which nobody else can look."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return False
    return _is_own_folder(facts) and not facts.st_mode & 0o077


def open_private(folder: Path) -> int:
    """A descriptor of a folder of this user's that nobody else can write to.

    What is done through it (`dir_fd`) happens in that folder, whatever becomes of its name.

    Raises:
        OSError: it is not there, is a link, or is not such a folder.
    """
    fd = os.open(folder, _OPEN)
    if _is_own_folder(facts := os.fstat(fd)) and not others_write(facts):
        return fd
    os.close(fd)
    raise PermissionError(f"{folder} is not a folder that only this user can write to")


def remove_socket(name: str, *, dir_fd: int | None = None) -> None:
    """Remove it if it is a socket of this user's: no other file, and no link. Raises OSError."""
    with suppress(FileNotFoundError):
        facts = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if stat.S_ISSOCK(facts.st_mode) and facts.st_uid == os.getuid():
            os.unlink(name, dir_fd=dir_fd)


def why_shared(path: Path) -> str | None:
    """Why what lies there is not this user's alone, as a clause; None: it is, or is not there.

    What a link leads to is looked at. Nobody writes to what is mounted read-only: there Kubernetes
    leaves its folders at mode 0777.
    """
    try:
        facts = os.stat(path)
        if not others_write(facts) or os.statvfs(path).f_flag & os.ST_RDONLY:
            return None
    except OSError:
        return None
    owner = "" if facts.st_uid in (os.getuid(), 0) else f", owner {facts.st_uid}"
    return f"others can write to {path} (mode {stat.S_IMODE(facts.st_mode):04o}{owner})"


def why_open(path: Path) -> str | None:
    """As `why_shared`, but whoever owns it may write to it: a service's user, for example."""
    try:
        facts = os.stat(path)
        if not _mode_is_open(facts) or os.statvfs(path).f_flag & os.ST_RDONLY:
            return None
    except OSError:
        return None
    return f"others can write to {path} (mode {stat.S_IMODE(facts.st_mode):04o})"


def others_own(path: Path) -> bool:
    """Whether it is there and neither this user's nor root's."""
    try:
        return os.stat(path).st_uid not in (os.getuid(), 0)
    except OSError:
        return False


def others_write(facts: os.stat_result) -> bool:
    """Whether somebody else may write what has these facts: its owner, its group, or anybody.

    Root may in any case. A group of this user's own name with nobody else in it is the user: where
    each user has one, files are made with mode 0664.
    """
    return facts.st_uid not in (os.getuid(), 0) or _mode_is_open(facts)


def _mode_is_open(facts: os.stat_result) -> bool:
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_own_group(facts.st_gid)


def _is_own_group(gid: int) -> bool:
    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(gid)
    except (KeyError, OSError):
        return False
    return group.gr_name in (name, "root") and set(group.gr_mem) <= {name}


def _is_own_folder(facts: os.stat_result) -> bool:
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _holds_safely(base: str) -> bool:
    """Whether nobody else can rename what is made in this folder."""
    try:
        facts = os.stat(base)
    except OSError:
        return False
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in {os.getuid(), 0, _foreign_root()}:
        return False
    return bool(facts.st_mode & stat.S_ISVTX) or not facts.st_mode & 0o022


def _foreign_root() -> int:
    """As whom this process sees the machine's root: another user within a user namespace."""
    try:
        if Path("/proc/self/uid_map").read_text().split() != _WHOLE_MAP:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        pass
    return 0
