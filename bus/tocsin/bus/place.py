"""Where the file of an embedded bus lies: default path, fallback, refusal.

SQLite in WAL mode needs shared memory between the processes of one machine and working file locks.
Network file systems give neither, so a bus there would lose records without a word. The default
path falls back to a folder of this machine; an explicit path is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tocsin.bus.port import UnusableBus

DEFAULT_FOLDER: Final = ".tocsin"
FILE_NAME: Final = "bus.db"

_NETWORK: Final = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|smb3|9p|afs|ncpfs|coda|lustre|beegfs|gpfs|ceph|glusterfs"
    r"|orangefs|pvfs2|panfs|wekafs|ocfs2|gfs2"
    r"|fuse\.(sshfs|glusterfs|ceph|ceph-fuse|s3fs|rclone|gcsfuse|juicefs|davfs|smbnetfs|beegfs\S*"
    r"|lustre|moosefs|mfs|curlftpfs|mount-s3|goofys|blobfuse2?|weka\S*)"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bus file is. `notice` is one line for a person when that is not where one would
    look.
    """

    path: Path
    notice: str | None = None


def default_place(
    folder: Path, *, mounts: str | None = None, env: Mapping[str, str] | None = None
) -> Place:
    """The bus of a folder: `.tocsin/bus.db` in it, or a folder of this machine where that cannot
    be.

    Creates nothing and gives the same answer to writers and readers. `mounts` is the text of
    /proc/self/mounts, `env` the environment; both are read if not given.

    Raises:
        UnusableBus: the fallback folder belongs to somebody else.
    """
    own = Path(os.path.abspath(folder)) / DEFAULT_FOLDER
    network = network_type(own, mounts=mounts)
    if network is not None:
        why = f"{own.parent} is on a network file system ({network})"
    elif not _writable(own / FILE_NAME):
        why = f"{own} is not writable"
    else:
        return Place(own / FILE_NAME)
    digest = hashlib.sha256(os.path.realpath(own.parent).encode()).hexdigest()[:16]
    path = machine_folder(env) / digest / FILE_NAME
    return Place(path, f"{why}: the bus is {path}")


def explicit_place(path: Path, *, mounts: str | None = None) -> Place:
    """The place of a bus whose path somebody wrote down.

    Raises:
        UnusableBus: it is on a network file system, not writable, or its folder does not exist.
    """
    path = Path(os.path.abspath(path))
    network = network_type(path, mounts=mounts)
    if network is not None:
        raise UnusableBus(
            f"{path} is on a network file system ({network}), where an embedded bus would lose "
            "records: choose a path on a local disk, or a kafka:// bus"
        )
    if path.is_dir():
        raise UnusableBus(
            f"{path} is a folder: expected the path of a file, such as {path / FILE_NAME}"
        )
    if not path.parent.is_dir() and not path.parent.parent.is_dir():
        raise UnusableBus(
            f"the folder {path.parent} does not exist: make it, or choose another path"
        )
    if not _writable(path):
        raise UnusableBus(f"{path} is not writable: choose a path in a folder that is")
    return Place(path)


def machine_folder(env: Mapping[str, str] | None = None) -> Path:
    """`${XDG_RUNTIME_DIR:-/tmp}/tocsin-UID`; it need not exist yet.

    Raises:
        UnusableBus: it exists and is not a folder of this user.
    """
    variables = os.environ if env is None else env
    folder = Path(variables.get("XDG_RUNTIME_DIR") or "/tmp") / f"tocsin-{os.getuid()}"
    if not own_folder(folder, missing_ok=True):
        raise UnusableBus(
            f"{folder} is not a folder of this user alone: remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def own_folder(folder: Path, *, missing_ok: bool = False) -> bool:
    """Whether it is a real folder, of this user, which nobody else can write to."""
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return missing_ok
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def make_folder(path: Path) -> None:
    """Make the folder of a bus file if it is missing: 0700, and ignored by git if it is `.tocsin`.

    Raises:
        OSError: as `os.mkdir` does.
    """
    folder = path.parent
    if not folder.is_dir():
        if folder.parent.name == f"tocsin-{os.getuid()}":
            folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    ignore = folder / ".gitignore"
    if folder.name == DEFAULT_FOLDER and not ignore.exists():
        ignore.write_text("*\n")


def network_type(path: Path, *, mounts: str | None = None) -> str | None:
    """The type of the network file system that `path` is on, or None when it is a local one."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="replace")
        except OSError:
            return None
    real = os.path.realpath(path)
    found, found_at = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        at = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[1])
        inside = real == at or real.startswith(at.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if inside and len(at) >= len(found_at):
            found, found_at = fields[2], at
    return found if _NETWORK.fullmatch(found) else None


def _writable(path: Path) -> bool:
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return False
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
