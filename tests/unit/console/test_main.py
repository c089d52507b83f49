"""The console script: output where the terminal is not UTF-8."""

from __future__ import annotations

import io
import sys

import pytest

from tocsin.console.__main__ import main


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_an_encoding_lacks_is_replaced(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="strict"))
    monkeypatch.setattr(sys, "argv", ["tocsin", "catalog", "show", "nonfinite"])

    with pytest.raises(SystemExit) as ended:
        main()

    sys.stdout.flush()
    shown = raw.getvalue().decode(encoding)
    assert ended.value.code == 0
    assert "nonfinite" in shown
    assert ("≥" in shown) == (encoding == "utf-8")


def test_a_stream_without_an_encoding_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["tocsin", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert out.getvalue().startswith("tocsin ")
