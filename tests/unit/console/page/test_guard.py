"""Who is let in, under which name, and what no request gets."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes.pages import Served, served_here
from tocsin.console.page.addresses import Address, may_be_asked_as, read_address, read_name
from tocsin.console.page.assets import asset
from tocsin.console.page.guard import POLICY, Access, refusal_of
from tocsin.console.page.loopback_users import Ends, ends_of, is_stranger
from tocsin.console.page.server import ServeOptions, lines_of
from tocsin.console.page.sessions import (
    LASTS_S,
    Token,
    person_typed,
    read_token,
    readable_by_others,
)
from tocsin.schemas.errors import ConfigurationError

HERE = Address("127.0.0.1", 8470)
EVERYWHERE = Address("0.0.0.0", 8470)
SECRET = "k" * 32


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_here(tmp_path_factory.mktemp("page") / "bus.db") as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(f"{SECRET}\n")
    with served_here(folder / "bus.db", token_file=folder / "token") as served:
        yield served


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8470", HERE),
        ("localhost:1", Address("localhost", 1)),
        ("[::1]:80", Address("::1", 80)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: Address) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "8470", ":8470", "host:", "host:70000", "host:-1", "h:1²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected HOST:PORT"):
        read_address(text)


def test_loopback_is_known_in_all_its_forms() -> None:
    assert all(read_address(f"{host}:1").loopback for host in ("127.0.0.1", "127.9.9.9", "[::1]"))
    assert not any(
        read_address(f"{host}:1").loopback for host in ("0.0.0.0", "[::]", "10.0.0.1", "node-1")
    )


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Add --token-file, or .* ssh -L 8470"):
        ServeOptions.parse("0.0.0.0:8470")
    (tmp_path / "token").write_text(SECRET)
    options = ServeOptions.parse("0.0.0.0:8470", token_file=tmp_path / "token")
    access = options.access(options.address)
    assert access.token == Token(SECRET)
    assert any("TLS" in line for line in lines_of(access))
    assert not any("TLS" in line for line in lines_of(Access(HERE, "ana")))


@pytest.mark.parametrize("content", ["", "short", "two words that are long enough", "x" * 5000])
def test_a_token_is_one_long_word(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(ConfigurationError, match="expected one word of at least 20 characters"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_token(tmp_path / "missing")


def test_a_token_that_others_can_write_is_refused_and_one_they_can_read_is_told(
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    assert not readable_by_others(file)
    file.chmod(0o644)
    assert readable_by_others(file)
    assert read_token(file) == Token(SECRET)
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match="others can write to it"):
        read_token(file)


@pytest.mark.parametrize(
    ("host", "address", "good"),
    [
        ("127.0.0.1:8470", HERE, True),
        ("localhost:9000", HERE, True),  # a tunnel
        ("[::1]:8470", HERE, True),
        ("LOCALHOST", HERE, True),
        ("evil.example", HERE, False),
        ("127.0.0.1.evil.example:8470", HERE, False),
        ("localhost.evil.example", HERE, False),
        ("10.0.0.7:8470", HERE, False),
        ("", HERE, False),
        ("10.0.0.7:8470", EVERYWHERE, True),
        ("tocsin.example.com", EVERYWHERE, True),
        ("evil.example", EVERYWHERE, False),
        ("tocsin.example.com:8470/static/", EVERYWHERE, False),
        ("127.0.0.1:1/login", HERE, False),
    ],
)
def test_the_name_in_the_request_is_one_of_ours(host: str, address: Address, good: bool) -> None:
    assert may_be_asked_as(host, address, {read_name("Tocsin.example.com")}) is good


@pytest.mark.parametrize(
    ("method", "site", "origin", "status"),
    [
        ("GET", "cross-site", "", None),
        ("POST", "same-origin", "http://127.0.0.1:8470", None),
        ("POST", "", "", None),
        ("POST", "cross-site", "", 403),
        ("POST", "same-site", "", 403),
        ("POST", "", "http://evil.example", 403),
        ("POST", "", "null", 403),
        ("PUT", "same-origin", "", 405),
        ("OPTIONS", "", "", 405),
    ],
)
def test_only_our_own_page_writes(method: str, site: str, origin: str, status: int | None) -> None:
    refusal = refusal_of(method, "127.0.0.1:8470", site, origin, Access(HERE, "ana"))
    assert (None if refusal is None else refusal.status) == status


def test_a_session_ends_and_cannot_be_made_up() -> None:
    token = Token(SECRET)
    cookie = token.cookie_of("ana müller", 1_000.0)
    assert token.person_of(cookie, 1_001.0) == "ana müller"
    assert token.person_of(cookie, 1_000.0 + LASTS_S) is None
    assert Token("l" * 32).person_of(cookie, 1_001.0) is None
    name, until, code = cookie.split(".")
    for forged in ("", ".", "a.b.c", f"{name}.{int(until) + 1}.{code}", f"x{cookie}", cookie[:-1]):
        assert token.person_of(forged, 1_001.0) is None, forged
    assert not token.fits(SECRET[:-1])
    assert token.fits(f" {SECRET}\n")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[1m", "x" * 201])
def test_a_name_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        person_typed(name)


_TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2116 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:C350 0100007F:2116 01 00000000:00000000 00:00000000 00000000  1001        0 2
   2: 0100007F:2116 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 3
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is that of such a machine")
def test_the_owner_of_a_connection_is_who_made_it() -> None:
    both = Ends(owner=1001, theirs=True, ours=True)
    assert ends_of(_TABLE, ("127.0.0.1", 50_000), 8470) == both
    assert ends_of(_TABLE, ("::ffff:127.0.0.1", 50_000), 8470) == both
    assert ends_of(_TABLE, ("127.0.0.1", 50_001), 8470) == Ends(ours=False)
    assert ends_of(_TABLE, ("127.0.0.1", 50_000), 8471) == Ends()
    half_closed = _TABLE.replace("8:2116 01", "8:2116 05").replace("C350 01", "C350 08")
    assert ends_of(half_closed, ("127.0.0.1", 50_000), 8470).ours is False


def test_another_user_of_the_machine_is_not_served(page: Served) -> None:
    port = page.base.rpartition(":")[2]
    ask = "printf 'GET / HTTP/1.0\\r\\nHost: 127.0.0.1\\r\\n\\r\\n' >&3; cat <&3"
    command = ["/bin/bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}; {ask}"]
    try:
        done = subprocess.run(
            command, user=65_534, cwd="/", capture_output=True, text=True, check=False
        )
    except PermissionError:
        pytest.skip("only root can become another user")
    assert done.stdout.startswith("HTTP/1.1 403"), done
    assert "This page belongs to another user" in done.stdout
    assert page.ask()[0] == 200


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux tells it")
@pytest.mark.parametrize("how", ["stays", "half-closes", "closes", "resets"])
def test_who_has_closed_a_connection_already_may_be_anybody(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as there:
            here, client = server.accept()
            with here:
                there.sendall(b"GET / HTTP/1.0\r\n\r\n")
                if how == "half-closes":
                    there.shutdown(socket.SHUT_WR)
                if how == "resets":
                    linger = struct.pack("ii", 1, 0)
                    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                if how in ("closes", "resets"):
                    there.close()
                assert is_stranger(client, port) is (how != "stays")


def test_each_answer_has_the_policy_and_no_page_is_kept(page: Served) -> None:
    for path in ("/", "/nowhere", "/static/page.css", "/api/v1/runs", "/runs/none"):
        _, _, headers = page.ask(path)
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        kept = path.startswith("/static")
        assert ("no-store" not in headers["Cache-Control"]) is kept
    assert "unsafe" not in POLICY


def test_a_page_has_no_script_and_no_style_of_its_own(page: Served) -> None:
    text = page.ask()[1]
    assert "<style" not in text
    assert " style=" not in text
    assert " onclick" not in text
    assert text.count("<script") == text.count("<script src=") + text.count('<script type="module"')


def test_another_name_is_refused_before_anything_is_read(page: Served) -> None:
    status, text, _ = page.ask(headers={"Host": "evil.example"})
    assert status == 421
    assert "not served under the name 'evil.example'" in text
    assert page.ask("/static/page.css", headers={"Host": "evil.example"})[0] == 421


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/templates/shell.html.jinja",
        "/etc/passwd", "/static/", "/runs/..%2f..%2fetc%2fpasswd", "/issues/../../etc/passwd",
    ],
)  # fmt: skip
def test_no_path_of_the_file_system_is_read(page: Served, path: str) -> None:
    status, text, _ = page.ask(path)
    assert status == 404
    assert "root:" not in text
    assert "import" not in text


def test_assets_are_compressed_and_asked_for_once(page: Served) -> None:
    found = asset("page.css")
    assert found is not None
    path = "/static/page.css"
    status, _, headers = page.ask(path)
    assert (status, "immutable" in headers["Cache-Control"]) == (200, True)
    assert page.ask(path, headers={"If-None-Match": headers["ETag"]})[0] == 304
    assert len(found.compressed) < len(found.content) / 2


def test_who_writes_needs_the_secret_of_the_page(page: Served) -> None:
    for given in ({}, {"csrf": "x"}, {"csrf": "é"}):
        status, text, _ = page.ask("/runs/r1/stop", form={"reason": "x", **given})
        assert status == 403
        assert "nothing was done" in text
    status, text, _ = page.ask("/runs/r1/stop", form={"reason": "x", "csrf": page.csrf})
    assert status == 404
    assert "There is no run r1" in text
    assert page.ask("/runs/r1/stop", form={"csrf": page.csrf, "reason": "x" * 20_000})[0] == 413
    wrong = {"Content-Type": "text/plain"}
    assert page.ask("/runs/r1/stop", form={"csrf": page.csrf}, headers=wrong)[0] == 415


def test_a_token_buys_a_strict_cookie_that_scripts_cannot_read(guarded: Served) -> None:
    assert guarded.ask()[0] == 401
    assert guarded.ask("/api/v1/runs", headers={"Accept": "application/json"})[0] == 401
    assert guarded.ask("/events?of=%2F", headers={"Accept": "text/event-stream"})[0] == 401
    assert guarded.ask("/static/page.css")[0] == 200
    form = {"csrf": guarded.csrf, "person": "ana", "next": "//evil.example/"}
    wrong = guarded.ask("/login", form={**form, "token": "x" * 32})
    assert wrong[0] == 403
    assert 'value="ana"' in wrong[1]
    typo = guarded.ask("/login", form={**form, "next": "/runs/r1", "token": "x" * 32})
    assert 'name="next" value="/runs/r1"' in typo[1], "where the link led"
    status, _, headers = guarded.ask("/login", form={**form, "token": SECRET})
    assert (status, headers["Location"]) == (303, "/"), "and no way to another site"
    cookie = headers["Set-Cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    session = {"Cookie": headers["Set-Cookie"].partition(";")[0]}
    assert guarded.ask(headers=session)[0] == 200
    name, _, value = session["Cookie"].partition("=")
    assert name == Token(SECRET).cookie_name != Token(f"another {SECRET}").cookie_name
    for others in ('prefs={"theme":"dark"}', "a=b c", "flag", "u=\xfc"):
        both = {"Cookie": f"{others}; {name}={value}; {others}"}
        assert guarded.ask(headers=both)[0] == 200, others
    assert guarded.ask(headers={"Authorization": f"Bearer {SECRET}"})[0] == 200
    assert guarded.ask(headers={"Authorization": "Bearer no"})[0] == 401


def test_a_link_from_elsewhere_is_opened_once_more_from_here(guarded: Served) -> None:
    status, text, _ = guarded.ask("/runs/r1", headers={"Sec-Fetch-Site": "cross-site"})
    assert status == 200
    assert 'http-equiv="refresh"' in text
