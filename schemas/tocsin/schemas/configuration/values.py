"""Kinds of values in the configuration file: durations, percentages, references to secrets.

Each is an annotated type for a pydantic field. A number without its unit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer, PlainValidator, WithJsonSchema

T = TypeVar("T")

_NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION: Final = re.compile(_NUMBER + r"(ms|s|m|h|d)")
_DURATION_UNITS: Final = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_SIZE: Final = re.compile(_NUMBER + r"(B|kB|MB|GB|TB)")
_SIZE_UNITS: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BUCKETS: Final = ("s3://", "gs://", "az://")
"""How URLs of object stores begin."""

_PERCENT: Final = re.compile(_NUMBER + "%")
_MAX_DURATION: Final = timedelta(days=3650)
NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_MAIL_LOCAL: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
_MAIL: Final = re.compile(_MAIL_LOCAL + r"@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*")
_PHONE: Final = re.compile(r"\+[1-9][0-9]{6,14}")
NAME_PATTERN: Final = rf"^{NAME.pattern}$"


@dataclass(frozen=True, slots=True)
class SecretRef:
    """`{secret: NAME}`: the value of a secret that the section `secrets` names."""

    name: str


def parse_duration(value: object) -> timedelta:
    """`250ms`, `30s`, `10m`, `4h`, `2d` (at most ten years).

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    if isinstance(value, timedelta):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) and len(value) <= 20 else None
    if match is None:
        raise ValueError("expected a duration with its unit, like 250ms, 30s, 10m, 4h or 2d")
    days = float(match[1]) * (_DURATION_UNITS[match[2]] / timedelta(days=1))
    if days > _MAX_DURATION / timedelta(days=1):
        raise ValueError("expected a duration of at most 3650d")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def format_duration(value: timedelta) -> str:
    """As `parse_duration` reads it, in the largest unit that gives a whole number: `24h`, `90s`."""
    for unit, size in reversed(_DURATION_UNITS.items()):
        # Hours up to two days: 24h and 36h are how people say it.
        if value % size == timedelta(0) and not (unit == "d" and value.days <= 2):
            return f"{value // size}{unit}"
    return f"{value / timedelta(milliseconds=1):g}ms"


def parse_percent(value: object) -> float:
    """`0.5%` as a share, 0.005; at most 100%.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    match = _PERCENT.fullmatch(value) if isinstance(value, str) and len(value) <= 20 else None
    if match is None:
        raise ValueError("expected a percentage with its unit, like 0.5%")
    if float(match[1]) > 100:
        raise ValueError("expected a percentage of at most 100%")
    return float(match[1]) / 100


def format_percent(value: float) -> str:
    """A share as `parse_percent` reads it: `0.5%` for 0.005."""
    return f"{value * 100:.10g}%"


def parse_size(value: object) -> int:
    """`500MB`, `20GB`, `1.5TB` as bytes: units of 1,000; at most 1,000,000 TB.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 20 else None
    if match is None:
        raise ValueError("expected a size with its unit, like 500kB, 200MB, 20GB or 1TB")
    size = round(float(match[1]) * _SIZE_UNITS[match[2]])
    if size > 10**18:
        raise ValueError("expected a size of at most 1000000TB")
    return size


def format_size(value: int) -> str:
    """As `parse_size` reads it, in the largest unit that gives a whole number: `20GB`."""
    for unit, size in reversed(_SIZE_UNITS.items()):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}B"


def between(shortest: timedelta, longest: timedelta) -> Callable[[timedelta], timedelta]:
    """A check of a duration, for a field of it. It raises ValueError."""

    def check(value: timedelta) -> timedelta:
        if not shortest <= value <= longest:
            raise ValueError(f"expected {format_duration(shortest)} to {format_duration(longest)}")
        return value

    return check


def parse_name(value: object) -> str:
    """A name that a file gives to something: a receiver, a secret, an instance of a rule.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(
            "expected a name of lower-case letters, digits, '-', '_' and '.' (64 at most)"
        )
    return value


def parse_moment(value: object) -> datetime:
    """`2026-12-01T00:00:00Z`, `2026-12-01 08:00+01:00`: a time with its zone.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if not isinstance(value, datetime) or value.tzinfo is None or not 1970 < value.year < 9999:
        raise ValueError("expected a time with its zone, like 2026-12-01T00:00:00Z")
    return value


def some(values: tuple[T, ...]) -> tuple[T, ...]:
    """The values. Raises ValueError: there are none."""
    if not values:
        raise ValueError("expected at least one entry")
    return values


def _names(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    return tuple(parse_name(name) for name in names)


def parse_http_url(value: object) -> str:
    """An `http://` or `https://` URL with a host, without user or password in it.

    Raises:
        ValueError: it is anything else. The message never repeats it: such URLs often are secret.
    """
    if isinstance(value, str) and value.isprintable() and " " not in value:
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if usable and "@" in parts.netloc:
            raise ValueError("a user or password does not belong in a URL: use headers")
        if usable:
            return value
    raise ValueError("expected a URL like https://hooks.example.com/ml, or {secret: NAME}")


def parse_folder_or_bucket(value: str) -> str:
    """Read a folder or the URL of a bucket, without credentials. Raises ValueError."""
    if (
        not value.isprintable()
        or not value.strip()
        or ("://" in value and not value.startswith(BUCKETS))
    ):
        raise ValueError("expected a folder, or s3://BUCKET/PREFIX (also gs:// and az://)")
    if "@" in value.partition("://")[2].partition("/")[0]:
        raise ValueError("credentials do not belong in the URL: they come from the environment")
    return value


def parse_mail_address(value: object) -> str:
    """A mail address, `name@example.com`, without a display name.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    if isinstance(value, str) and len(value) <= 254 and _MAIL.fullmatch(value):
        return value
    raise ValueError("expected a mail address like vision@example.com (ASCII, no display name)")


def parse_phone_number(value: object) -> str:
    """A phone number in E.164 form: `+` and 7 to 15 digits, country first.

    Raises:
        ValueError: it is anything else; the message says what was expected.
    """
    if isinstance(value, str) and _PHONE.fullmatch(value):
        return value
    raise ValueError('expected a phone number with its country, like "+4915112345678"')


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected the path of a file")
    if not value.startswith("~"):
        return Path(value)
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("the home folder of this user is not known: write the path out") from None


def _secret(value: object) -> SecretRef:
    if isinstance(value, SecretRef):
        return value
    if isinstance(value, Mapping) and set(value) == {"secret"} and isinstance(value["secret"], str):
        return SecretRef(value["secret"])
    raise ValueError("expected {secret: NAME}, with the secret named in the section 'secrets'")


def _text_or_secret(value: object) -> str | SecretRef:
    if isinstance(value, str):
        if not value.isprintable():
            raise ValueError("expected text without line breaks or control characters")
        return value
    return _secret(value)


def _url_or_secret(value: object) -> str | SecretRef:
    return _secret(value) if isinstance(value, Mapping | SecretRef) else parse_http_url(value)


def _dump(value: object) -> object:
    """The form that the file has."""
    if isinstance(value, SecretRef):
        return {"secret": value.name}
    if isinstance(value, timedelta):
        return format_duration(value)
    return value if isinstance(value, str) else str(value)


_AS_FILE: Final = PlainSerializer(_dump, when_used="json")
_TEXT: Final = {"type": "string"}
_SECRET_SCHEMA: Final = {
    "type": "object",
    "properties": {"secret": {"type": "string", "pattern": NAME_PATTERN}},
    "required": ["secret"],
    "additionalProperties": False,
}

Duration = Annotated[
    timedelta,
    PlainValidator(parse_duration),
    _AS_FILE,
    WithJsonSchema(_TEXT | {"pattern": rf"^{_DURATION.pattern}$"}),
]
"""A duration with its unit."""

Percent = Annotated[
    float,
    PlainValidator(parse_percent),
    PlainSerializer(format_percent, when_used="json"),
    WithJsonSchema(_TEXT | {"pattern": rf"^{_PERCENT.pattern}$"}),
]
"""A share, written as a percentage."""

Size = Annotated[
    int,
    PlainValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema(_TEXT | {"pattern": rf"^{_SIZE.pattern}$"}),
]
"""A number of bytes, with its unit."""

Name = Annotated[str, PlainValidator(parse_name), WithJsonSchema(_TEXT | {"pattern": NAME_PATTERN})]
"""A name given in the file."""

Names = Annotated[
    tuple[str, ...],
    PlainValidator(_names),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT | {"pattern": NAME_PATTERN},
                {"type": "array", "items": _TEXT | {"pattern": NAME_PATTERN}},
            ]
        }
    ),
]
"""A name given in the file, or a list of names."""

Moment = Annotated[
    datetime, PlainValidator(parse_moment), WithJsonSchema(_TEXT | {"format": "date-time"})
]
"""A time with its zone."""

FilePath = Annotated[
    Path, PlainValidator(_path), _AS_FILE, WithJsonSchema(_TEXT | {"minLength": 1})
]
"""A path; a relative one starts at the folder of the configuration file, `~` is the home folder."""

Secret = Annotated[SecretRef, PlainValidator(_secret), _AS_FILE, WithJsonSchema(_SECRET_SCHEMA)]
"""A value that may only come from a secret."""

TextOrSecret = Annotated[
    str | SecretRef,
    PlainValidator(_text_or_secret),
    _AS_FILE,
    WithJsonSchema({"anyOf": [_TEXT, _SECRET_SCHEMA]}),
]
"""Text, written out or from a secret."""

UrlOrSecret = Annotated[
    str | SecretRef,
    PlainValidator(_url_or_secret),
    _AS_FILE,
    WithJsonSchema({"anyOf": [_TEXT | {"pattern": "^https?://"}, _SECRET_SCHEMA]}),
]
"""An http(s) URL, written out or from a secret."""

MailAddress = Annotated[
    str,
    PlainValidator(parse_mail_address),
    WithJsonSchema(_TEXT | {"pattern": f"^{_MAIL.pattern}$"}),
]
"""A mail address."""

PhoneNumber = Annotated[
    str,
    PlainValidator(parse_phone_number),
    WithJsonSchema(_TEXT | {"pattern": f"^{_PHONE.pattern}$"}),
]
"""A phone number, with its country."""

FolderOrBucket = Annotated[str, AfterValidator(parse_folder_or_bucket)]
"""A folder, or `s3://BUCKET/PREFIX` (also `gs://` and `az://`)."""
