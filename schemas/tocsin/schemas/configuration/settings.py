"""What holds in the end: flag over environment over file over default, and the secrets' values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

from pydantic import SecretStr, ValidationError

from tocsin.schemas.configuration.entries import parse_label_key, parse_label_value
from tocsin.schemas.configuration.file import Config
from tocsin.schemas.configuration.sections import BusConfig, SecretSource, parse_bus_url
from tocsin.schemas.configuration.store import StoreConfig
from tocsin.schemas.configuration.values import SecretRef
from tocsin.schemas.errors import ConfigurationError

BUS_VARIABLE: Final = "TOCSIN_BUS"
LABELS_VARIABLE: Final = "TOCSIN_LABELS"
STORE_VARIABLE: Final = "TOCSIN_STORE"

_MAX_SECRET_BYTES: Final = 64 * 1024

T = TypeVar("T")
Origin = Literal["flag", "environment", "file", "default"]


class SecretUnavailable(ConfigurationError):
    """A secret that the configuration names is not there."""


class Secrets(Mapping[str, SecretStr]):
    """The values of secrets, by name. One that is missing is a fault of who needs it: to ask for it
    raises SecretUnavailable. An optional one that is missing is not in it.
    """

    def __init__(
        self, values: Mapping[str, SecretStr], missing: Mapping[str, str] | None = None
    ) -> None:
        self._values = values
        self.missing = missing or {}
        """Why each one that is missing is not to be had, by name."""

    def __getitem__(self, name: str) -> SecretStr:
        if name in self.missing:
            raise SecretUnavailable(_missing_line(name, self.missing[name]))
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require_all(self) -> None:
        """Raises SecretUnavailable: some are missing; the message names all of them."""
        if self.missing:
            raise SecretUnavailable("\n".join(starmap(_missing_line, self.missing.items())))


def _missing_line(name: str, why: str) -> str:
    return f"secret {name!r}: {why}"


@dataclass(frozen=True, slots=True)
class ResolvedSetting(Generic[T]):
    """A value and who decided it."""

    value: T
    origin: Origin


def resolve_setting(
    *, flag: T | None = None, environment: T | None = None, file: T | None = None, default: T
) -> ResolvedSetting[T]:
    """The first that is given, in the order flag, environment, file, default."""
    if flag is not None:
        return ResolvedSetting(flag, "flag")
    if environment is not None:
        return ResolvedSetting(environment, "environment")
    if file is not None:
        return ResolvedSetting(file, "file")
    return ResolvedSetting(default, "default")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of flags, environment and file together.

    Attributes:
        bus: the bus to open; prefix, sasl and tls are the file's.
        bus_origin: who decided its URL (an explicit path is treated more strictly).
        labels: the file's, with those of `TOCSIN_LABELS` and then of `--label` laid over them.
        store: the store; all but its URL, and whether there is one, is the file's.
        store_origin: who decided that.
    """

    bus: BusConfig
    bus_origin: Origin
    labels: Mapping[str, str]
    store: StoreConfig = field(default_factory=StoreConfig)
    store_origin: Origin = "default"


def resolve_settings(
    config: Config,
    env: Mapping[str, str],
    *,
    bus: str | None = None,
    labels: Iterable[str] = (),
    store: str | None = None,
) -> Settings:
    """Lay environment and flags over a configuration.

    Args:
        config: the content of the file.
        env: the environment; `TOCSIN_BUS`, `TOCSIN_STORE` and `TOCSIN_LABELS` (`k=v,k2=v2`) count
            if not empty.
        bus: what `--bus` said.
        store: what `--store` said: a URL, or `off`.
        labels: the value of each `--label`, `k=v`.

    Raises:
        ConfigurationError: a flag or variable is wrong; the message names it.
    """
    given = "url" in config.bus.model_fields_set
    url = resolve_setting(
        flag=_bus_url("--bus", bus),
        environment=_bus_url(BUS_VARIABLE, env.get(BUS_VARIABLE)),
        file=config.bus.url if given else None,
        default=config.bus.url,
    )
    merged = dict(config.labels)
    for pair in filter(None, (part.strip() for part in env.get(LABELS_VARIABLE, "").split(","))):
        merged |= [_label(LABELS_VARIABLE, pair)]
    merged |= labels_of("--label", labels)
    asked = resolve_setting(
        flag=_store("--store", store, config.store),
        environment=_store(STORE_VARIABLE, env.get(STORE_VARIABLE), config.store),
        file=config.store if config.store.model_fields_set else None,
        default=config.store,
    )
    return Settings(_with_url(config.bus, url.value), url.origin, merged, asked.value, asked.origin)


def labels_of(origin: str, pairs: Iterable[str]) -> Mapping[str, str]:
    """Labels that were given as `k=v`.

    Raises:
        ConfigurationError: one is wrong; the message names the origin.
    """
    return dict(_label(origin, pair) for pair in pairs)


def resolve_secrets(config: Config, env: Mapping[str, str], *, folder: Path) -> Secrets:
    """The values of all secrets. Reads files: may block.

    Args:
        config: names the secrets.
        env: the environment.
        folder: where relative paths of the file start.

    Returns:
        Values by name. One that is missing, empty or unreadable raises when it is asked for, since
        only who delivers needs all of them; the message says where it was looked for, and shows no
        value.
    """
    values: dict[str, SecretStr] = {}
    missing: dict[str, str] = {}
    for name, source in config.secrets.items():
        value, why = _secret(source, env, folder)
        if value:
            values[name] = SecretStr(value)
        elif why:
            missing[name] = why
    return Secrets(values, missing)


def missing_secrets(config: Config, env: Mapping[str, str], *, folder: Path) -> Mapping[str, str]:
    """Why each secret that `resolve_secrets` would refuse is not to be had, by name. May block."""
    found = {name: _secret(source, env, folder)[1] for name, source in config.secrets.items()}
    return {name: why for name, why in found.items() if why}


def value_of(text: str | SecretRef | None, secrets: Mapping[str, SecretStr]) -> SecretStr | None:
    """What a key of the file holds, written out or as a secret; None if there is nothing, or the
    secret is optional and missing."""
    if text is None:
        return None
    return SecretStr(text) if isinstance(text, str) else secrets.get(text.name)


_UNREADABLE: Final = "is not readable as UTF-8 text of at most 64 KiB"


def _secret(source: SecretSource, env: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """The value, or "" and why that is a fault, if it is."""
    value, why = _read_secret(source, env, folder)
    if value or (source.optional and why != _UNREADABLE):
        return value, ""
    where = f"file {str(source.file)!r}" if source.file else f"variable {source.env}"
    return "", f"{where} {why}"


def _read_secret(source: SecretSource, env: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """The value, or "" and why there is none."""
    if source.env is not None:
        return env.get(source.env, ""), "is empty" if source.env in env else "is not set"
    assert source.file is not None
    try:
        with (folder / source.file).open("rb") as file:
            data = file.read(_MAX_SECRET_BYTES + 1)
        if len(data) > _MAX_SECRET_BYTES:
            return "", _UNREADABLE
        text = data.decode()
    except FileNotFoundError:
        return "", "does not exist"
    except (OSError, UnicodeDecodeError):
        return "", _UNREADABLE
    return text.removesuffix("\n").removesuffix("\r"), "is empty"


def _with_url(bus: BusConfig, url: str) -> BusConfig:
    """The file's bus with another URL; log-in and encryption stay behind when it is not Kafka."""
    if url.startswith("embedded:"):
        return BusConfig(url=url, prefix=bus.prefix)
    return BusConfig(url=url, prefix=bus.prefix, sasl=bus.sasl, tls=bus.tls)


def _bus_url(origin: str, url: str | None) -> str | None:
    if not url:
        return None
    try:
        return parse_bus_url(url)
    except ValueError as err:
        raise ConfigurationError(f"{origin}: {err}") from err


def _store(origin: str, text: str | None, file: StoreConfig) -> StoreConfig | None:
    """The file's store elsewhere, or switched off. What belongs to the file's bucket stays there:
    a limit above all."""
    if not text:
        return None
    if text == "off":
        return file.model_copy(update={"enabled": False})
    if text == file.url:
        return file.model_copy(update={"enabled": True})
    try:
        return StoreConfig.model_validate({"url": text, "every": file.every})
    except ValidationError as err:
        raise ConfigurationError(f"{origin}: {err.errors()[0]['msg']}") from err


def _label(origin: str, pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    try:
        if not equals:
            raise ValueError("expected key=value, like team=vision")
        return parse_label_key(key), parse_label_value(value)
    except ValueError as err:
        raise ConfigurationError(f"{origin} {pair!r}: {err}") from err
