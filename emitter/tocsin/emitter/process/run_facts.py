"""Facts of a process for its first record: command line, folder, git commit, versions."""

from __future__ import annotations

import contextlib
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from tocsin.schemas.records.events import clip
from tocsin.schemas.records.fields import MAX_MILLIS

MASK: Final = "***"
_PLACE: Final = "@@@"

_SECRET_NAME: Final = re.compile(
    r"(?:^|[^a-z])(?:pass(?:word|wd|phrase)?|pwd|secret|token|credential|auth|bearer"
    r"|api[_-]?key|access[_-]?key|private[_-]?key|key|sas|dsn)s?(?:$|[^a-z])",
    re.IGNORECASE,
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^/@\s:]*:\S*|[^/@\s]+)@")
"""A password may have `/` and `@` in it."""

_INSIDE: Final = re.compile(
    r"""(?<![\w-])(?P<name>--?[A-Za-z][\w.-]*(?=\s)|-{0,2}[A-Za-z_][\w.-]*(?=["']?\s*[=:]))"""
    r"""(?P<join>["']?\s*[=:]\s*|\s+(?!--))(?P<value>"[^"]*"|'[^']*'|[^\s;&|,{}"']+)"""
)
"""A name and its value in a text of several words: a script of a shell, JSON."""

_QUERY: Final = re.compile(r"([?&;]([A-Za-z0-9_.-]+)=)([^&;#\s]+)")
_SIGNATURE: Final = re.compile(r"sig|.*signature", re.IGNORECASE)
"""Parameters of signed URLs: whoever has the signature may do what it was made for."""

_SECRET_PATH: Final = re.compile(
    r"(https?://(?:hooks\.slack\.com/services/|(?:\w+\.)?discord(?:app)?\.com/api/webhooks/"
    r"|api\.telegram\.org/bot))[^\s?#]+"
)
_ASSIGNMENT: Final = re.compile(r"([+~]*-{0,2}[A-Za-z_][A-Za-z0-9_.\-]*)=(.*)", re.DOTALL)
_HEADER: Final = re.compile(r"((?:authorization|x-[a-z-]*(?:key|token))\s*:\s*).+", re.I | re.S)
_KNOWN_TOKEN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|xox[abpr]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)"
)
_LONG: Final = re.compile(r"[0-9a-fA-F]{32,}|[A-Za-z0-9+/_-]{40,}={0,2}")
# Names with "token" or "key" in them that training scripts use for other things.
_HARMLESS: Final = re.compile(
    r"^-*(?:(?:max|min|num|n|new|total|eos|bos|pad|unk|sep|cls|mask|special)[_-].*"
    r"|.*token(?:s|ize|izer|ization).*|.*keys)$",
    re.IGNORECASE,
)


def command_line(arguments: Sequence[str]) -> str:
    """The command as one would type it, secrets masked, cut to what a record holds."""
    # An asterisk would be quoted by the shell's rules: it comes in afterwards.
    spared = [argument.replace(MASK, _PLACE) for argument in mask_arguments(arguments)]
    return clip(shlex.join(spared).replace(_PLACE, MASK))


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Replace what looks like a secret by `***`.

    That is: the value of an option or assignment with such a name (`--token X`, `API_KEY=X`),
    passwords and such parameters in URLs, authorization headers, and the tokens of well-known
    services wherever they stand.
    """
    masked: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and (not argument.startswith("--") or _LONG.search(argument)):
            masked.append(MASK)
            hide_next = False
            continue
        hide_next = False
        assignment = _ASSIGNMENT.fullmatch(argument)
        if assignment is not None and is_secret_name(assignment[1]):
            masked.append(f"{assignment[1]}={MASK}")
            continue
        if argument.startswith("-") and assignment is None and is_secret_name(argument):
            hide_next = True
        masked.append(mask_text(argument))
    return masked


def mask_text(text: str) -> str:
    """Mask secrets inside one text: URLs, headers, tokens of well-known services, and values of
    such names in a script or in JSON."""
    text = _URL.sub(rf"\1{MASK}@", text)
    text = _INSIDE.sub(_masked_value, text)
    text = _SECRET_PATH.sub(rf"\1{MASK}", text)
    text = _QUERY.sub(_masked_parameter, text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    return _KNOWN_TOKEN.sub(MASK, text)


def _masked_parameter(found: re.Match[str]) -> str:
    name = found[2]
    secret = is_secret_name(name) or _SIGNATURE.fullmatch(name)
    return found[1] + (MASK if secret else found[3])


def _masked_value(found: re.Match[str]) -> str:
    if not is_secret_name(found["name"]) or found["value"].startswith("$"):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['join']}{quote}{MASK}{quote}"


def is_secret_name(name: str) -> bool:
    """Whether an option, variable or parameter of this name holds a secret."""
    spread = _CAMEL.sub("_", name)
    return _SECRET_NAME.search(spread) is not None and not _HARMLESS.match(spread)


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder` or above it; None outside of a repository.

    Reads git's own files; starts no process.
    """
    try:
        for parent in (folder, *folder.parents):
            place = parent / ".git"
            if place.is_file():
                line = place.read_text().strip()
                if not line.startswith("gitdir:"):
                    return None
                return _head(parent / line.removeprefix("gitdir:").strip())
            if place.is_dir():
                return _head(place)
    except (OSError, ValueError):
        return None
    return None


def _head(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:64] or None
    ref = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = (git / common.read_text().strip()).resolve() if common.is_file() else git
    for base in (git, shared):
        if (base / ref).is_file():
            return (base / ref).read_text().strip()[:64] or None
    packed = shared / "packed-refs"
    if packed.is_file():
        for line in packed.read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == ref:
                return commit[:64]
    return None


def versions(more: Mapping[str, str | None]) -> dict[str, str]:
    """Python's, tocsin's, and those given that are not None."""
    found = {"python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["tocsin"] = metadata.version("tocsin")
    return found | {name: text for name, text in more.items() if text}


def ends_by_ms(environ: Mapping[str, str]) -> int | None:
    """When the scheduler ends the job, Unix milliseconds; None: not known.

    Slurm sets its time limit since 22.05.
    """
    text = environ.get("SLURM_JOB_END_TIME", "")
    if not text.isascii() or not text.isdigit():
        return None
    end_ms = 1000 * int(text)
    # A job without a limit has one in a hundred years or so.
    return end_ms if end_ms <= MAX_MILLIS else None


def script_folder() -> Path:
    """The folder of the script that Python runs, else the working folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main).resolve().parent if main else working_folder()


def working_folder() -> Path:
    """The working folder; the root where it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        return Path("/")
