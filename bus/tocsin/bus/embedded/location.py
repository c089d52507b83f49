"""Where the file of an embedded bus lies: default path, fallback, refusal.

SQLite in WAL mode needs shared memory between the processes of one machine and working file locks.
Network file systems give neither, so a bus there would lose records without a word. The default
path falls back to a folder of this machine; an explicit path is refused.

Who can write to the file, or put another into its folder, can forge an issue, and this user's own
key would sign the stop. So both must be this user's alone: looked at here, and again whenever the
file is opened (`check_own`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tocsin.bus.port import UnusableBus
from tocsin.schemas.process.private_folders import SHARED, make_private, user_folder, why_shared

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
        UnusableBus: no folder of this machine can be used.
    """
    own = Path(os.path.abspath(folder)) / DEFAULT_FOLDER
    network = network_type(own, mounts=mounts)
    if network is not None:
        why = f"{own.parent} is on a network file system ({network})"
    elif not _writable(own / FILE_NAME):
        why = f"{own} is not writable"
    elif (others := others_can_write(own / FILE_NAME)) is not None:
        why = others
    else:
        return Place(own / FILE_NAME)
    digest = hashlib.sha256(os.path.realpath(own.parent).encode()).hexdigest()[:16]
    path = machine_folder(env) / digest / FILE_NAME
    return Place(path, f"{why}: the bus is {path}")


def explicit_place(path: Path, *, mounts: str | None = None) -> Place:
    """The place of a bus whose path somebody wrote down.

    Raises:
        UnusableBus: it is on a network file system, not writable, its folder does not exist, or
            others can write to it.
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
    check_own(path)
    return Place(path)


def check_own(path: Path) -> None:
    """Make sure that nobody but this user can write to the bus file, as far as it is there.

    Raises:
        UnusableBus: somebody can.
    """
    why = others_can_write(path)
    if why is not None:
        raise UnusableBus(
            f"{why}, and could forge issues on the bus: choose a path in a folder of your own, "
            "or `chmod go-w` it if it is yours"
        )


def others_can_write(path: Path) -> str | None:
    """Why others can write to the bus file, in a sentence; None if only this user can.

    A link on the way must be this user's; what it leads to is looked at. What is not there yet does
    not count.
    """
    folder = path.parent
    for link in (folder, path):
        if link.is_symlink() and _others_own(link):
            return f"{link} is a link that somebody else has made"
    real = Path(os.path.realpath(path))
    beside = [real.with_name(real.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
    found = (why_shared(one) for one in (real.parent, real, *beside))
    return next((why for why in found if why is not None), None)


def _others_own(path: Path) -> bool:
    return os.lstat(path).st_uid not in (os.getuid(), 0)


def machine_folder(env: Mapping[str, str] | None = None) -> Path:
    """`${XDG_RUNTIME_DIR:-/tmp}/tocsin-UID`; it need not exist yet.

    Raises:
        UnusableBus: somebody else has taken that name.
    """
    folder = user_folder(os.environ if env is None else env)
    if folder is None:
        raise UnusableBus(
            f"no folder of this machine can be used: {SHARED}/tocsin-{os.getuid()} is not this "
            "user's alone; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def make_folder(path: Path) -> None:
    """Make the folder of a bus file if it is missing: 0700, and ignored by git if it is `.tocsin`.

    Raises:
        OSError: as `os.mkdir` does; PermissionError: somebody else was faster.
    """
    folder = path.parent
    if not folder.is_dir():
        if folder.parent.name == f"tocsin-{os.getuid()}":
            make_private(folder.parent)
        make_private(folder)
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
