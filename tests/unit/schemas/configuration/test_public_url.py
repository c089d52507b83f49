"""The key `public_url`: what it takes, and which `Host` fits it."""

from __future__ import annotations

import pytest

from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.public_url import fits_host, parse_public_url


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("https://tocsin.example.com", "https://tocsin.example.com"),
        ("https://ml.example.com:8443/tocsin/", "https://ml.example.com:8443/tocsin"),
        ("http://127.0.0.1:9464", "http://127.0.0.1:9464"),
        ("http://localhost:9464/", "http://localhost:9464"),
        ("http://[::1]:9464", "http://[::1]:9464"),
    ],
)
def test_a_url_of_a_host_is_taken(text: str, value: str) -> None:
    assert parse_public_url(text) == value


@pytest.mark.parametrize(
    "value",
    [
        "http://tocsin.example.com", "http://10.0.0.1", "https://", "https://a b", "ftp://a",
        "javascript:alert(1)", "https://ana:pw@a.example", "https://a.example/?x=1",
        "https://a.example/#x", "https://a.example:0", "https://a.example:99999",
        "https://a.example\r\nX: y", 'https://a.example/"><script>', "https://" + "a" * 200, 3,
        None,
    ],
)  # fmt: skip
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        parse_public_url(value)


@pytest.mark.parametrize("key", ["public_url", "page_url"])
def test_a_wrong_one_is_a_problem_of_the_file(key: str) -> None:
    config, problems = check_config(f"version: 1\n{key}: http://ml.example.com\n", "tocsin.yaml")
    assert config is None
    (problem,) = problems
    assert (problem.line, problem.column) == (2, len(key) + 3)
    assert problem.message == "expected https: anybody who intercepts a link can answer with it"


def test_a_host_fits_with_and_without_the_schemes_own_port() -> None:
    assert fits_host("https://A.example/x", "a.example:443")
    assert fits_host("http://localhost:80", "LOCALHOST")
    assert fits_host("https://a.example:8443", "a.example:8443")
    for other in ("a.example", "a.example:80", "b.example", "", "a.example:8443.evil.example"):
        assert not fits_host("https://a.example:8443", other)
