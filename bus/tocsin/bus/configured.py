"""The bus that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from tocsin.bus.kafka.security import KafkaSecurity
from tocsin.bus.port import Bus
from tocsin.bus.urls import open_bus
from tocsin.schemas.configuration.sections import BusConfig
from tocsin.schemas.configuration.settings import SecretUnavailable


def open_configured_bus(
    config: BusConfig,
    secrets: Mapping[str, SecretStr],
    *,
    folder: Path,
    explicit: bool,
    create: bool = True,
) -> Bus:
    """The bus of the section `bus`, still to be entered with `async with`.

    Args:
        config: the section, with flag and environment laid over it.
        secrets: the values of the secrets, by name.
        folder: where relative paths start, the TLS files' and the bus's own.
        explicit: whether somebody wrote the URL down (see `open_bus`).
        create: whether a bus file that is missing is made.

    Raises:
        UnusableBus, MissingExtra: as `open_bus` does.
        SecretUnavailable: an optional secret is missing but needed here.
    """
    return open_bus(
        config.url,
        security=_security(config, secrets, folder),
        folder=folder,
        explicit=explicit,
        create=create,
    )


def _security(
    config: BusConfig, secrets: Mapping[str, SecretStr], folder: Path
) -> KafkaSecurity | None:
    if config.sasl is None and config.tls is None:
        return None
    password = None
    if config.sasl is not None:
        name = config.sasl.password.name
        if name not in secrets:
            raise SecretUnavailable(f"secret {name!r} is missing, and bus.sasl needs it")
        password = secrets[name].get_secret_value()
    tls = config.tls
    return KafkaSecurity(
        mechanism=config.sasl.mechanism if config.sasl else None,
        username=config.sasl.username if config.sasl else None,
        password=password,
        tls=tls is not None,
        ca_file=folder / tls.ca if tls and tls.ca else None,
        cert_file=folder / tls.certificate if tls and tls.certificate else None,
        key_file=folder / tls.key if tls and tls.key else None,
    )
