"""The YAML loader: 1.2 scalars, positions, refusals, bounds."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tocsin.schemas.configuration.yaml_document import (
    _LOADER,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    MAX_PROBLEMS,
    Document,
    Plain,
    Position,
    load,
)


def codes(document: Document) -> list[str]:
    return [problem.code for problem in document.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("True", True),
        ("false", False),
        ("tRue", "tRue"),
        ("12:30", "12:30"),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("-7", -7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.INF", -math.inf),
        ("2026-12-01T00:00:00Z", "2026-12-01T00:00:00Z"),
        ("2026-12-01", "2026-12-01"),
        ("~", None),
        ("null", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("|\n  1\n", "1\n"),
        ("'~'", "~"),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Plain) -> None:
    document = load(f"key: {text}", source="f")

    assert document.problems == ()
    assert document.data == {"key": value}
    assert isinstance(document.data, dict)
    assert type(document.data["key"]) is type(value)


def test_nan_is_a_float() -> None:
    data = load("[.nan]", source="f").data
    assert isinstance(data, list)
    assert isinstance(data[0], float)
    assert math.isnan(data[0])


@pytest.mark.parametrize("hidden", ["\x85", "\u2028", "\u2029"])
def test_a_line_break_that_nobody_sees_has_a_place(hidden: str) -> None:
    document = load(f"a: 1\n# b{hidden}c\nd: 2\n", source="f")

    (problem,) = document.problems
    assert (problem.line, problem.column, problem.code) == (2, 4, "syntax")
    assert f"U+{ord(hidden):04X}" in problem.message
    assert load(f'a: "\\u{ord(hidden):04x}"', source="f").data == {"a": hidden}


@pytest.mark.parametrize("number", ["9223372036854775808", "9" * 5000, "1e999"])
def test_a_number_that_does_not_fit_is_refused(number: str) -> None:
    assert codes(load(f"a: {number}", source="f")) == ["number"]


def test_positions_of_keys_and_values() -> None:
    text = "a: 1\nb:\n  - x\n  - {c: é😀, d: [1, 2]}\ne:\n"
    document = load(text, source="f")

    assert document.position(()) == Position(1, 1)
    assert document.position(("a",)) == Position(1, 4)
    assert document.position(("a",), at="key") == Position(1, 1)
    assert document.position(("b", 0)) == Position(3, 5)
    assert document.position(("b", 1, "d", 1)) == Position(4, 20)
    assert document.position(("b", 1, "d"), at="key") == Position(4, 13)
    assert document.position(("e",)) == Position(5, 1), "an empty value stands at its key"


def test_the_position_of_what_is_not_there_is_that_of_what_encloses_it() -> None:
    document = load("a: 1\nb: {c: 2}\n", source="f")

    assert document.position(("b", "zz", 3)) == Position(2, 4)
    assert document.position(("b", "c", "deeper")) == Position(2, 8)
    assert document.position(("zz",)) == Position(1, 1)
    assert load("", source="f").position(("a", 1)) == Position(1, 1)


def test_all_refusals_are_collected_with_their_places() -> None:
    text = (
        "a: &x 1\n"
        "b: *x\n"
        "a: 2\n"
        "c: !!python/object:os.system 'id'\n"
        "<<: {z: 1}\n"
        "5: k\n"
        "? [p]\n"
        ": q\n"
        "d: ok\n"
    )
    document = load(text, source="f")

    places = [(problem.line, problem.column, problem.code) for problem in document.problems]
    assert places == [
        (1, 4, "anchor"),
        (2, 4, "alias"),
        (3, 1, "duplicate_key"),
        (4, 4, "tag"),
        (5, 1, "merge_key"),
        (6, 1, "key"),
        (7, 3, "key"),
    ]
    assert document.complete
    assert document.data == {"a": 1, "b": None, "c": "id", "d": "ok"}


def test_a_duplicate_key_names_the_first_line_and_keeps_the_first_value() -> None:
    document = load("a: 1\nb: {x: 1, x: {y: 2}}\n", source="f")

    assert "line 2" in document.problems[0].message
    assert document.data == {"a": 1, "b": {"x": 1}}


def test_two_documents_are_refused() -> None:
    document = load("a: 1\n---\nb: 2\n", source="f")
    assert [(p.line, p.code) for p in document.problems] == [(2, "documents")]
    assert not document.complete


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a: [1\nb: 2\n", 2, 2),
        ("a:\n\tb: 1\n", 2, 1),
        ("ok: 1\na: \x07\n", 2, 4),
        ("a\n\ud800", 2, 1),
    ],
)
def test_a_syntax_error_has_its_place(text: str, line: int, column: int) -> None:
    document = load(text, source="f")
    assert [(p.line, p.column) for p in document.problems] == [(line, column)]
    assert not document.complete


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    document = load("\ufeffa: 1\r\nb: x\r\n", source="f")
    assert document.data == {"a": 1, "b": "x"}
    assert document.position(("b",)) == Position(2, 4)


# Bounds: how much of the stream is read, and how many problems come out.


@pytest.mark.parametrize("opening", ["[", "{", "- ", "? ", "{a: "])
def test_deep_nesting_ends_the_reading_at_the_bound(opening: str, parser_events: list[int]) -> None:
    document = load(opening * 2_000, source="f")

    assert codes(document)[-1] == "too_deep"
    assert parser_events[0] <= 3 * MAX_DEPTH + 10
    assert not document.complete


def test_a_tree_as_deep_as_the_bound_is_read() -> None:
    assert load("[" * MAX_DEPTH + "]" * MAX_DEPTH, source="f").problems == ()


@pytest.mark.parametrize("loader", [yaml.SafeLoader, _LOADER])
@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("to: @vision", "put the text in quotes"),
        ("to: [`date`]", "put the text in quotes"),
        ("@a: b", "put the text in quotes"),
        ("to: %x", "put the text in quotes"),
        ("match: *.example.com", "put the text in quotes"),
        ("to: *", "put the text in quotes"),
        ("to: *vision", "write the value out; text that begins with * needs quotes"),
        ("to:\n\t- a", "indent with spaces"),
        ("to: a\n\tb: c", "indent with spaces"),
    ],
)
def test_what_cannot_begin_a_text_has_a_hint(
    text: str, hint: str, loader: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tocsin.schemas.configuration.yaml_document._LOADER", loader)

    assert [problem.hint for problem in load(text, source="f").problems] == [hint]


def test_an_alias_bomb_is_never_expanded(parser_events: list[int]) -> None:
    rows = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    rows += [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    document = load("\n".join(rows), source="f")

    assert set(codes(document)) == {"anchor", "alias"}
    assert document.data is not None
    assert parser_events[0] < 200


def test_reading_ends_after_too_many_problems(parser_events: list[int]) -> None:
    document = load("\n".join(f"k{i}: !t v" for i in range(20_000)), source="f")

    assert len(document.problems) == MAX_PROBLEMS + 1
    assert codes(document)[-1] == "too_many_problems"
    assert parser_events[0] <= 2 * MAX_PROBLEMS + 10


def test_too_many_values_end_the_reading(parser_events: list[int]) -> None:
    document = load("[" + "a,\n" * (MAX_NODES + 50_000) + "]", source="f")

    assert codes(document) == ["too_many_nodes"]
    assert parser_events[0] <= MAX_NODES + 10


def test_a_text_over_the_limit_is_not_even_parsed(parser_events: list[int]) -> None:
    document = load("é" * (MAX_BYTES // 2 + 1), source="f")

    assert codes(document) == ["too_large"]
    assert parser_events[0] == 0


@pytest.mark.parametrize(
    "garbage", ["\x00\x01", ":", "&a ", "!", "%", '"', "*", "\t", "---\n", "] "]
)
def test_a_mebibyte_of_garbage_gives_few_problems(garbage: str, parser_events: list[int]) -> None:
    document = load((garbage * MAX_BYTES)[:MAX_BYTES], source="f")

    assert 1 <= len(document.problems) <= MAX_PROBLEMS + 1
    assert parser_events[0] <= 1000
    assert all(len(problem.message) < 300 for problem in document.problems)


def check(text: str) -> None:
    document = load(text, source="f")
    assert document.complete or document.problems
    lines = len(text.splitlines()) + 2
    for problem in document.problems:
        assert 1 <= problem.line <= lines
        assert problem.column >= 1
        assert problem.render(text.split("\n"))
    check_data(document, document.data, ())


def check_data(document: Document, data: Plain, loc: tuple[str | int, ...]) -> None:
    """Everything in the data has a position, and nothing else than plain types is in it."""
    assert document.position(loc) >= (1, 1)
    if isinstance(data, dict):
        for key, value in data.items():
            assert type(key) is str
            check_data(document, value, (*loc, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            check_data(document, value, (*loc, index))
    else:
        assert data is None or type(data) in (bool, int, float, str)


@given(st.text(st.characters(), max_size=200))
def test_any_text_gives_a_document(text: str) -> None:
    check(text)


@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "b: ",
                ": ",
                "- ",
                "? ",
                "\n",
                "  ",
                "[",
                "]",
                "{",
                "}",
                ", ",
                "&x ",
                "*x ",
                "!t ",
                "<<: ",
                "'",
                '"',
                "#",
                ">\n",
                "|\n",
                "---\n",
                "...\n",
                "%YAML 1.2\n",
                "\t",
                "~",
                "1e3",
            ]
        ),
        max_size=60,
    ).map("".join)
)
def test_any_yaml_like_text_gives_a_document(text: str) -> None:
    check(text)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
def test_json_is_read_as_what_it_says(data: Plain) -> None:

    document = load(json.dumps(data), source="f")
    assert document.problems == ()
    assert document.data == data
