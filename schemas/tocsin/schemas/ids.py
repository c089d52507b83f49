"""Ids made of data: equal input gives equal ids, on each node, in each process and replay."""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import Final

from tocsin.schemas.errors import ConfigurationError

_NAMESPACE: Final = uuid.UUID("5f0c1a52-6f0e-5d6c-9f0b-7e1d2c3b4a59")
_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}")


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can be one, since it is part of keys, file names and URLs.

    Raises:
        ConfigurationError: it is empty, longer than 200 characters, or has other than
            `A-Z a-z 0-9 . _ : @ + = -`.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(
            f"run id {run_id[:210]!r}: expected 1 to 200 letters, digits or . _ : @ + = - "
            "that start with a letter or digit, for example 'gpt-2026-11-21'"
        )
    return run_id


def new_id() -> str:
    """A fresh uuid4, for runs, jobs, boots and nonces; never for issues or deliveries."""
    return str(uuid.uuid4())


def incarnation_id(run_id: str, job_id: str, restart_count: int, training: int) -> str:
    """The incarnation: the n-th training (`training`, from 0) of one start of one job of one run.

    Equal on all ranks and nodes; a job that is started again has another one.
    """
    return _uuid5("incarnation", run_id, job_id, str(restart_count), str(training))


def issue_id(run_id: str, incarnation: str, rule: str, rule_version: int, episode: str) -> str:
    """The id of one episode of one rule instance.

    `episode` comes from data: the step and tensor that began it, or, for system and timer rules,
    the device or rank and the boot and seq of the record.
    """
    return _uuid5("issue", run_id, incarnation, rule, str(rule_version), episode)


def delivery_id(issue: str, action: str, state: str, times: int = 1) -> str:
    """The id of one notice or stop: constant over all its attempts, from whichever process.

    `times`: how many times the issue's condition had come.
    """
    return _uuid5("delivery", issue, action, state if times == 1 else f"{state}/{times}")


def digest_id(receiver: str, run_id: str, from_ms: int, until_ms: int) -> str:
    """The id of the digest of an interval, in place of that of an issue."""
    return _uuid5("digest", receiver, run_id, str(from_ms), str(until_ms))


def _uuid5(*parts: str) -> str:
    # The separator cannot be part of a run id or of a name: no two lists of parts join to one text.
    digest = hashlib.sha1(_NAMESPACE.bytes + "\x1f".join(parts).encode(), usedforsecurity=False)
    # As `uuid.uuid5`, in a third of its time: several are made of each issue.
    raw = bytearray(digest.digest()[:16])
    raw[6] = raw[6] & 0x0F | 0x50
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
