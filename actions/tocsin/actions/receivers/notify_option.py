"""What `--notify` may name: a webhook's URL, a mail address, a chat URL. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tocsin.actions.receivers.kind import Address
from tocsin.actions.receivers.registry import ReceiverKinds
from tocsin.schemas.errors import ConfigurationError


def parse_notify(text: str) -> Address:
    """Read one `--notify`.

    Raises:
        ConfigurationError: no kind of receiver takes it. The message shows its scheme at most: such
            URLs often are secret.
    """
    for kind in ReceiverKinds().built_in():
        try:
            address = kind.address(text)
        except ValueError as error:
            raise ConfigurationError(f"--notify: {error}") from None
        if address is not None:
            return address
    scheme = text.partition(":")[0].lower()
    raise ConfigurationError(
        "--notify: expected a webhook like https://hooks.example.com/ml, a mail address like "
        "mailto:me@example.com, or a chat URL like slack://…, discord://… or tgram://…"
        + (f"; {scheme}:// is not one of those" if "://" in text and scheme.isalnum() else "")
    )


def parse_addresses(notify: Sequence[str]) -> dict[str, Address]:
    """The addresses by name, each once. Raises as `parse_notify` does."""
    return {address.name: address for address in map(parse_notify, notify)}
