"""The stylesheet of all charts, as text and as the hash that a content security policy names."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files


@cache
def stylesheet() -> str:
    """`charts.css`: what each page with charts includes once. Reads a file at the first call."""
    return (files("tocsin.console.charts") / "charts.css").read_text(encoding="utf-8")


def style_source(css: str) -> str:
    """The source expression that allows exactly this text in a `<style>`: `'sha256-…'`."""
    return f"'sha256-{b64encode(sha256(css.encode()).digest()).decode()}'"
