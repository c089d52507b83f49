"""The word list itself: it finds what it names, also across lines, and leaves plain text alone."""

from __future__ import annotations

import pytest

from support.plain_english import PATTERNS, found_in


@pytest.mark.parametrize(
    "text",
    [
        "What cannot be converted is said, with its line.",
        "look\n  whether `tocsin rules` runs",
        "the job is stopped: it left at an edge of its loop",
        "Wait so long for deliveries at the end, s.",
    ],
)
def test_translated_words_are_found(text: str) -> None:
    assert list(found_in(text))


def test_plain_words_are_not() -> None:
    text = "Seconds to wait for pending deliveries after the job ends. Check that it runs."
    assert list(found_in(text)) == []


def test_the_list_names_each_pattern_once() -> None:
    patterns = [pattern for pattern, _ in PATTERNS]
    assert len(patterns) == len(set(patterns))
    assert len(patterns) >= 40
