"""The word list itself, the lines that commands and the launcher print, and the pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docs.plain_english import PATTERNS, found_in

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted(ROOT.glob("*/tocsin/**/*.py"))


def printed(source: str) -> Iterator[str]:
    """The texts of a module that are no docstrings; what an f-string fills in is `X`."""
    tree = ast.parse(source)
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )


_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "SECURITY.md", "deploy/README.md", "examples/README.md")
    ),
    # `rule-quality.md` quotes the trainings of the tests.
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem != "rule-quality"),
]


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


def test_texts_are_found_and_docstrings_are_not() -> None:
    source = '"""Of a module."""\nprint(f"a {1 + 1} b" " c", {"key": "d"})'
    assert sorted(printed(source)) == ["a X b c", "d", "key"]


@pytest.mark.slow
def test_the_texts_of_the_code_are_plain_english() -> None:
    """Help, messages, errors, reasons, descriptions of fields: all but docstrings and comments."""
    found = {
        str(path.relative_to(ROOT)): [
            place for text in printed(path.read_text()) for place in found_in(text)
        ]
        for path in SOURCES
    }
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_page_is_plain_english(page: Path) -> None:
    """A rule's page is made of its texts, and the page of the configuration of its fields'."""
    # Blocks are what a terminal shows; each paragraph is read for itself.
    paragraphs = _FENCE.sub("", page.read_text()).split("\n\n")
    assert [line for text in paragraphs for line in found_in(text)] == []


def lost_texts(tree: ast.AST) -> set[int]:
    """The lines of functions with a text that is a statement and documents nothing: the end of a
    message whose parts were not joined."""
    lines = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef):
                continue
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, ())
                before = None
                for statement in block if isinstance(block, list) else ():
                    documented = is_function if before is None else assigns_attribute(before)
                    if is_text(statement) and not documented:
                        lines.add(statement.lineno)
                    before = statement
    return lines


def is_text(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def assigns_attribute(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return any(isinstance(target, ast.Attribute) for target in targets)


def test_a_message_whose_parts_are_not_joined_is_found() -> None:
    source = """
def f(self):
    'Of a function.'
    self.x = 1
    'Of an attribute.'
    class Inner:
        'Of a class.'
        y: int = 1
        'Of a field.'
    if self.x:
        reason = f"the model {self.x} "
        "does not learn"
"""
    assert lost_texts(ast.parse(source)) == {12}


FRAGMENT = re.compile(
    r"(?:Those|They|Them|Behind|That of|Of (?:a|an|one|the|that)\b|One more|It has (?!no)"
    r"|See (?:the|`)|It is over|As above|The other way round"
    r"|The same (?:as above|within|for|without|with|of|inside)\b)"
)
"""How a docstring starts that makes sense only after the definition above it."""


def fragments(node: ast.AST, path: str) -> Iterator[str]:
    """The public definitions below a node whose docstrings do not stand alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("_"):
                continue
            if FRAGMENT.match(ast.get_docstring(child) or ""):
                yield f"{path}.{child.name}"
            yield from fragments(child, f"{path}.{child.name}")


PRIVATE = frozenset({"Beside", "CloserLooks", "Said", "Speaker", "Told", "Watched"})
"""Names of classes that explain nothing to a person of this field."""


VERBS = frozenset(
    {"asked", "begin", "forget", "gave", "hear", "heard", "judge", "look", "odd", "of", "said"}
    | {"saw", "say", "take", "tell", "told", "took"}
)
"""With these no function's name begins: other words say which of their senses is meant."""

PARTICIPLES = frozenset({"asked", "heard", "said", "taken", "told"})
"""No parameter is named so, and no constant of a module has such a word in its name."""

USUAL = frozenset({"take_back", "take_over", "tell"})
"""But for these, of which the last is what files have."""


def private_names(tree: ast.Module) -> list[str]:
    """The names of a module that are private vocabulary: of classes, functions, parameters and
    constants.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in PRIVATE:
            found.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.lstrip("_")
            if name.partition("_")[0] in VERBS and name not in USUAL:
                found.append(node.name)
        elif isinstance(node, ast.arg) and node.arg.lstrip("_") in PARTICIPLES:
            found.append(node.arg)
    return found + [
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
        and isinstance(name.ctx, ast.Store)
        and name.id.isupper()
        and PARTICIPLES.intersection(name.id.lower().split("_"))
    ]


def test_private_names_are_found() -> None:
    source = "class _Told: ...\nclass Reported: ...\ndef take_in(): ...\ndef take_over(told): ..."
    found = private_names(ast.parse(f"{source}\n_HEARD_S = 1"))
    assert found == ["_Told", "take_in", "told", "_HEARD_S"]


@pytest.mark.slow
def test_no_definition_has_a_private_name_and_docstrings_and_messages_are_whole() -> None:
    """One test, because to parse all modules takes seconds."""
    private: dict[str, list[str]] = {}
    found: list[str] = []
    lost: list[str] = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if names := private_names(tree):
            private[path.stem] = names
        found += fragments(tree, path.stem)
        lost += [f"{path.relative_to(ROOT)}:{line}" for line in lost_texts(tree)]
    assert private == {}
    assert found == []
    assert lost == []
