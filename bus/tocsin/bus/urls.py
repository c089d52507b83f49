"""From a bus URL to a bus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.embedded.location import DEFAULT_FOLDER, FILE_NAME, default_place, explicit_place
from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import Bus, UnusableBus

DEFAULT_URL: Final = f"embedded:{DEFAULT_FOLDER}/{FILE_NAME}"

_EXPECTED: Final = "expected embedded:PATH or kafka://HOST:PORT[,HOST:PORT…]"
_SERVER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@,\[\]]+):(\d{1,5})")


def open_bus(
    url: str | None = None,
    *,
    security: KafkaSecurity | None = None,
    folder: Path | None = None,
    explicit: bool = True,
    create: bool = True,
) -> Bus:
    """The bus at that URL, still to be entered with `async with`. None is the default URL.

    Relative paths are taken from `folder`, else from the working folder. `explicit` means that
    somebody wrote the URL down; only the default one, not explicit, may fall back to another path
    (`bus.notice` then names it). With `create` False a bus file that is missing is not made.

    Raises:
        UnusableBus: the URL is wrong, or a bus cannot be there.
        MissingExtra: a Kafka URL without the extra.
    """
    scheme, colon, rest = (DEFAULT_URL if url is None else url).partition(":")
    if not colon or not rest:
        raise UnusableBus(f"bus URL {url!r}: {_EXPECTED}")
    base = Path.cwd() if folder is None else folder
    if scheme == "embedded":
        if security is not None:
            raise UnusableBus(
                "SASL and TLS options are for kafka:// buses, not for an embedded one"
            )
        if url is None or (not explicit and url == DEFAULT_URL):
            place = default_place(base)
        else:
            place = explicit_place(base / Path(rest).expanduser())
        return EmbeddedBus(place.path, create=create, notice=place.notice)
    if scheme == "kafka" and rest.startswith("//"):
        servers = rest[2:].rstrip("/").split(",")
        for server in servers:
            match = _SERVER.fullmatch(server)
            if match is None or not 0 < int(match[2]) < 65_536:
                raise UnusableBus(f"bus URL {url!r}: {server!r} is not HOST:PORT; {_EXPECTED}")
        # Here, so that a machine without the extra can use the embedded bus.
        from tocsin.bus.kafka.bus import KafkaBus

        return KafkaBus(servers, security=security)
    raise UnusableBus(f"bus URL {url!r}: {_EXPECTED}")
