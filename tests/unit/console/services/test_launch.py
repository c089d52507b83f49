"""What `tocsin run` says of receivers before it starts anything."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tocsin.console.services.launch import RunOptions, launch_options
from tocsin.schemas.errors import ConfigurationError, MissingExtra

SLACK = "slack://TAAAAAAAA/BAAAAAAAA/SECRETaaaaaaaaaaaaaaaaaa"


def options(
    folder: Path, *notify: str, text: str = "", environ: Mapping[str, str] | None = None
) -> Any:
    config = folder / "tocsin.yaml"
    config.write_text(f"version: 1\nbus: 'embedded:{folder}/bus.db'\n{text}")
    env = {"XDG_CONFIG_HOME": str(folder), "HOME": str(folder), **(environ or {})}
    return launch_options(["true"], RunOptions(config=config, notify=notify), env)


def test_mail_without_a_server_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(address: object, timeout: float) -> socket.socket:
        assert address == ("localhost", 25)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refused)
    with pytest.raises(ConfigurationError, match="no reply") as caught:
        options(tmp_path, "mailto:me@example.com")
    assert "TOCSIN_SMTP=smtp://USER:PASSWORD@HOST:PORT" in str(caught.value)


def test_a_server_that_was_named_may_be_away_for_now(tmp_path: Path) -> None:
    environ = {"TOCSIN_SMTP": "smtp://127.0.0.1:1"}
    made = options(tmp_path, "me@example.com", SLACK, environ=environ)
    assert made.helper[-4:] == ("--notify", "me@example.com", "--notify", SLACK)


@pytest.mark.parametrize(
    ("notify", "text", "environ", "said"),
    [
        ("ftp://SECRET", "", {}, "--notify: expected a webhook"),
        ("mailto:x@y", "", {"TOCSIN_SMTP": "SECRET"}, "TOCSIN_SMTP: expected smtp://"),
        (
            "",
            "secrets: {s: {env: S}}\nreceivers: {c: {type: chat, url: {secret: s}}}\n",
            {"S": "https://example.com/SECRET"},
            "receiver 'c': expected a chat URL",
        ),
        (
            "",
            "receivers: {m: {type: email, to: [a@b], smtp: {host: h, ca: nothing.pem}}}\n",
            {},
            "receiver 'm': cannot read the authorities in 'nothing.pem'",
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(
    tmp_path: Path, notify: str, text: str, environ: Mapping[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options(tmp_path, *([notify] if notify else []), text=text, environ=environ)
    assert said in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_program_runs_only_if_the_command_line_allows_it_too(tmp_path: Path) -> None:
    config = tmp_path / "tocsin.yaml"
    env = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    page = "receivers: {page: {type: command, run: [/usr/local/bin/page]}}\n"

    def helper(bus: str, *allow: str) -> tuple[str, ...]:
        config.write_text(f"version: 1\nbus: '{bus}'\n{page}")
        given = RunOptions(config=config, allow_command=allow)
        return launch_options(["true"], given, env).helper

    embedded = f"embedded:{tmp_path}/bus.db"
    with pytest.raises(ConfigurationError, match="--allow-command /usr/local/bin/page"):
        helper(embedded)
    assert helper(embedded, "/usr/local/bin/page")[-2:] == (
        "--allow-command",
        "/usr/local/bin/page",
    )
    with pytest.raises(ConfigurationError, match="give it to `tocsin actions`"):
        helper("kafka://127.0.0.1:9", "/usr/local/bin/page")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "apprise" else real(name, *a)
    )
    with pytest.raises(MissingExtra, match=r"clone .*: pip install '\.\[actions\]'$"):
        options(tmp_path, SLACK)
