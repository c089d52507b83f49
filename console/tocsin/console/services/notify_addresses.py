"""The addresses of `--notify` of launches whose notices are not all delivered yet.

They are in no configuration file and, because they may hold tokens, on no topic. `tocsin run`
keeps them beside the embedded bus, for this user alone, until all of its notices are final; should
it be killed or end before, `tocsin actions` reads them there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tocsin.schemas.monotonic_clock import unix_ms
from tocsin.schemas.process.private_folders import make_private

KEEP_S: Final = 48 * 3600
"""Twice as long as a notice is retried by default."""

_FOLDER: Final = "left-over"
_MAX_BYTES: Final = 100_000
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class KeptAddresses:
    """The addresses of one launch, in a file that only this user can read."""

    bus_file: Path
    launch: str
    """An id that differs for each launch; a name for a file."""
    notify: tuple[str, ...]

    def keep(self, incarnations: Collection[str]) -> None:
        """Keep them for the issues of these incarnations. Raises OSError."""
        folder = make_private(self.bus_file.parent / _FOLDER)
        content = {"version": 1, "incarnations": sorted(incarnations), "notify": self.notify}
        draft = folder / f".{self.launch}-{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(draft, folder / f"{self.launch}.json")
        finally:
            draft.unlink(missing_ok=True)

    def remove(self) -> None:
        """All notices are final. Raises OSError."""
        (self.bus_file.parent / _FOLDER / f"{self.launch}.json").unlink(missing_ok=True)


def kept_addresses(bus_file: Path) -> Mapping[str, Sequence[str]]:
    """The addresses by incarnation. May block.

    What is older than `KEEP_S` is removed; what is no file of this user's alone is passed over.
    """
    found: dict[str, Sequence[str]] = {}
    with contextlib.suppress(OSError):
        for path in sorted((bus_file.parent / _FOLDER).glob("[!.]*.json")):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                if unix_ms() / 1000 - path.lstat().st_mtime > KEEP_S:
                    path.unlink()
                    continue
                incarnations, notify = _read(path)
                found |= dict.fromkeys(incarnations, notify)
    return found


def _read(path: Path) -> tuple[list[str], Sequence[str]]:
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    with open(descriptor, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is open to others")
        content = json.loads(file.read(_MAX_BYTES))
    incarnations, notify = content["incarnations"], content["notify"]
    for texts in (incarnations, notify):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise TypeError("expected a list of texts")
    return incarnations, tuple(notify)
