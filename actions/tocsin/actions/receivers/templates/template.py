"""A template: compiled once, then filled with the fields of each issue.

A template comes from the configuration, its values from a run. So a value is only ever text in the
form of the channel: it is escaped where it is put in, and is never read as a template. Of Jinja
there is what cannot take long or much memory: no calls, no arithmetic, no variables, no loop inside
another, few filters, each with a limit. What is left is bounded by the template's length.
"""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote_plus

from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.templates.config import Language, TemplateConfig
from tocsin.actions.receivers.templates.fields import LISTS, MAPPINGS, fields_of, sample_fields
from tocsin.schemas.configuration.problems import Loc, Problem, did_you_mean
from tocsin.schemas.errors import ConfigurationError, MalformedRecord, require_extra
from tocsin.schemas.records.deliveries import DIGEST

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

logger = logging.getLogger(__name__)

_MAX_OUTPUT: Final = 64 * 1024
"""Characters of a filled template."""
_MAX_FILTERED: Final = 16 * 1024
"""Characters that a filter returns."""
_MAX_FILTERS: Final = 50

Escape = Callable[[str], str]
"""Makes text of a run safe in a channel."""

_FIELD: Final = re.compile(r"\{([a-z_]+)(?:\.([^{}\"'\s]{1,64}))?\}")

_ACTIONS: Final = re.compile(r"\{\s*text\b|\b(did|rows)\b")
"""The fields with what tocsin has done about an issue."""


class TemplateFault(Exception):
    """What is wrong with a template, at a line and column (from 1) of its text."""

    def __init__(self, message: str, line: int, column: int, hint: str | None = None) -> None:
        super().__init__(f"line {line}, column {column} of the template: {message}")
        self.line = line
        self.column = column
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template."""

    pieces: Callable[[Mapping[str, Any]], Iterator[str]]

    def fill(self, fields: Mapping[str, Any]) -> str:
        """The text for these fields.

        Raises:
            MalformedRecord: it becomes too long, or a value is none that it can use.
        """
        out: list[str] = []
        length = 0
        try:
            for piece in self.pieces(fields):
                length += len(piece)
                if length > _MAX_OUTPUT:
                    raise MalformedRecord(f"the filled template is over {_MAX_OUTPUT:,} characters")
                out.append(piece)
        # Such as a comparison of text with a number; an error's own words may quote the run's.
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise MalformedRecord(f"cannot fill the template: {type(error).__name__}") from None
        return "".join(out)


def compile_template(config: TemplateConfig, escape: Escape) -> Template:
    """Compile a template, whose values are escaped by `escape`.

    Raises:
        TemplateFault: it is not one.
        MissingExtra: it is of Jinja, which is not installed.
    """
    compiler: Mapping[Language, Callable[[str, Escape], Template]] = {
        "fields": _field_template,
        "jinja": _jinja_template,
    }
    return compiler[config.language](config.text, escape)


def usable_template(
    config: TemplateConfig | None, escape: Escape, receiver: str
) -> Template | None:
    """As `compile_template`, for a receiver that is opened; None if it has none.

    Raises:
        ConfigurationError: it cannot be used.
    """
    if config is None:
        return None
    try:
        return compile_template(config, escape)
    except TemplateFault as fault:
        raise ConfigurationError(f"receiver {receiver!r}: {fault}") from None


def template_findings(
    config: TemplateConfig | None, escape: Escape, loc: Loc, *, json_body: bool = False
) -> Iterator[Problem]:
    """What is wrong with a receiver's template: compiled, and filled with sample issues."""
    if config is None:
        return
    here = (*loc, "template", "text")
    try:
        template = compile_template(config, escape)
    except TemplateFault as fault:
        yield Problem(here, str(fault), "template", fault.hint)
        return
    for fields in sample_fields():
        try:
            text = template.fill(fields)
        except MalformedRecord as error:
            state = fields["state"]
            yield Problem(here, f"filled with a sample issue ({state}): {error}", "template")
            return
        if json_body and (why := _why_no_json(text)) is not None:
            hint = 'put text between quotes: {"text": "{headline}"}'
            yield Problem(here, f"filled with a sample issue, {why}", "template", hint)
            return


def names_actions(config: TemplateConfig | None) -> bool:
    """Whether a template has a field about what tocsin does about an issue. Pure."""
    return config is not None and _ACTIONS.search(config.text) is not None


def words_of(template: Template | None, notice: Notice, standard: str) -> str:
    """A message for people in the words of a template; in the standard ones if it fails.

    Raises:
        RecordError: the notice holds no issue.
    """
    if template is None or notice.delivery.occasion == DIGEST:
        return standard
    fields = fields_of(notice)
    try:
        return template.fill(fields)
    except MalformedRecord as error:
        logger.warning(
            "template not filled", extra={"action": notice.delivery.kind, "reason": str(error)}
        )
        return standard


def is_json(content_type: str) -> bool:
    """Whether a body of this type is JSON."""
    return content_type.partition(";")[0].strip().endswith(("/json", "+json"))


def escape_for(content_type: str) -> Escape:
    """How values are escaped in a body of this type."""
    kind = content_type.partition(";")[0].strip()
    if is_json(content_type):
        return _json_text
    if kind.endswith(("/html", "/xml", "+xml")):
        return html.escape
    if kind == "application/x-www-form-urlencoded":
        return quote_plus
    return str


def _json_text(text: str) -> str:
    """Escapes text for a place between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _why_no_json(text: str) -> str | None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"it is not JSON from line {error.lineno}, column {error.colno} of the result on"
    return None


def _place(text: str, at: int) -> tuple[int, int]:
    """Line and column of a place in a text."""
    before = text[:at]
    return before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1


def _unknown(name: str, text: str, at: int) -> TemplateFault:
    known = sample_fields()[0]
    return TemplateFault(
        f"there is no field {name[:60]!r}", *_place(text, at), did_you_mean(name, known)
    )


# -- {field} -----------------------------------------------------------------------------------


def _field_template(text: str, escape: Escape) -> Template:
    known = sample_fields()[0]
    for found in _FIELD.finditer(text):
        name, part = found[1], found[2]
        if name not in known:
            raise _unknown(name, text, found.start())
        if (part is not None) != (name in MAPPINGS):
            wanted = f"{{{name}.NAME}}" if name in MAPPINGS else f"{{{name}}}"
            raise TemplateFault(f"expected {wanted}", *_place(text, found.start()))
        if name in LISTS:
            why = f"{name!r} is a list, which needs `language: jinja`"
            raise TemplateFault(why, *_place(text, found.start()))

    def pieces(fields: Mapping[str, Any]) -> Iterator[str]:
        at = 0
        for found in _FIELD.finditer(text):
            yield text[at : found.start()]
            value = fields[found[1]]
            yield escape(str(value if found[2] is None else value[found[2]]))
            at = found.end()
        yield text[at:]

    return Template(pieces)


# -- Jinja -------------------------------------------------------------------------------------


class _Ready(str):
    """JSON, which is in its final form where a body is JSON."""


def _jinja_template(text: str, escape: Escape) -> Template:
    require_extra("actions", "a template in Jinja", "jinja2")
    from jinja2 import TemplateError, TemplateSyntaxError

    environment = _environment(escape)
    try:
        tree = environment.parse(text)
        _check_nodes(tree, text)
        compiled = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise TemplateFault(error.message or "a wrong tag", *_tag(text, error.lineno)) from None
    # Nested so deep that parser or compiler give up.
    except (RecursionError, SyntaxError, MemoryError):
        raise TemplateFault("nested too deep", 1, 1) from None

    def pieces(fields: Mapping[str, Any]) -> Iterator[str]:
        try:
            yield from compiled.generate(fields)
        except TemplateError as error:
            raise MalformedRecord(f"cannot fill the template: {type(error).__name__}") from None

    return Template(pieces)


def _environment(escape: Escape) -> ImmutableSandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def finalize(value: object) -> str:
        if isinstance(value, _Ready) and escape is _json_text:
            return value
        if value is None:
            return ""
        if not isinstance(value, str | int | float):
            raise TypeError("a list or mapping is not text")
        return escape(str(value))

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=finalize)
    environment.globals.clear()
    environment.filters = dict(_FILTERS)
    environment.tests = {name: environment.tests[name] for name in _TESTS}
    return environment


_TESTS: Final = ("defined", "none", "number", "string")


def _limited(text: str) -> str:
    if len(text) > _MAX_FILTERED:
        raise ValueError("a filter returned too much text")
    return text


def _default(value: Any, other: Any = "") -> Any:
    return other if value is None or value == "" else value


def _join(values: Any, between: str = "") -> str:
    if isinstance(values, str):
        raise TypeError("expected a list")
    return _limited(str(between).join(map(str, values)))


def _truncate(text: Any, length: int = 100) -> str:
    line = str(text)
    return line if len(line) <= length else line[: max(0, length - 1)] + "…"


def _to_json(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return _Ready(_limited(json.dumps(plain, ensure_ascii=False)))


def _items(values: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    return list(values.items())


_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "default": _default,
    "items": _items,
    "join": _join,
    "length": len,
    "lower": lambda text: _limited(str(text).lower()),
    "round": lambda number, digits=0: round(number, max(0, min(int(digits), 12))),
    "tojson": _to_json,
    "truncate": _truncate,
    "upper": lambda text: _limited(str(text).upper()),
}


def _check_nodes(tree: nodes.Template, text: str) -> None:
    """Refuse all of Jinja but what is bounded. Raises TemplateFault."""
    from jinja2 import meta, nodes

    allowed = (
        nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr,
        nodes.Getitem, nodes.Filter, nodes.Test, nodes.If, nodes.For, nodes.CondExpr,
        nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Tuple,
    )  # fmt: skip
    filters = 0
    for node in _all(tree):
        place = _tag(text, node.lineno or 1)
        what = type(node).__name__.lower()
        if not isinstance(node, allowed):
            raise TemplateFault(f"{what!r} is not allowed in a template", *place)
        if isinstance(node, nodes.For):
            _check_loop(node, place)
        names = [node.attr] if isinstance(node, nodes.Getattr) else []
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            names.append(str(node.arg.value))
        if any(name.startswith("_") for name in names):
            raise TemplateFault("a name that begins with '_' is not allowed", *place)
        if isinstance(node, nodes.Filter):
            filters += 1
            if node.name not in _FILTERS:
                hint = did_you_mean(node.name, _FILTERS)
                raise TemplateFault(f"there is no filter {node.name[:60]!r}", *place, hint)
        if isinstance(node, nodes.Test) and node.name not in _TESTS:
            raise TemplateFault(f"there is no test {node.name[:60]!r}", *place)
    if filters > _MAX_FILTERS:
        raise TemplateFault(f"more than {_MAX_FILTERS} filters", 1, 1)
    for name in sorted(meta.find_undeclared_variables(tree) - set(sample_fields()[0])):
        found = re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)
        raise _unknown(name, text, 0 if found is None else found.start())


def _check_loop(loop: nodes.For, place: tuple[int, int]) -> None:
    from jinja2 import nodes

    if loop.recursive or any(isinstance(node, nodes.For) for node in _inside(loop)):
        raise TemplateFault("a loop inside a loop is not allowed", *place)
    over = loop.iter
    of_items = isinstance(over, nodes.Filter) and over.name == "items"
    name = over.node if of_items and isinstance(over, nodes.Filter) else over
    lists = MAPPINGS if of_items else LISTS | MAPPINGS
    if not isinstance(name, nodes.Name) or name.name not in lists:
        known = ", ".join(sorted(LISTS | MAPPINGS))
        raise TemplateFault(f"expected a loop over one of {known}", *place)


def _all(tree: nodes.Node) -> Iterator[nodes.Node]:
    """A tree's nodes, without recursion: a template may be nested deep."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left.extend(node.iter_child_nodes())


def _inside(node: nodes.Node) -> Iterator[nodes.Node]:
    return (inner for inner in _all(node) if inner is not node)


def _tag(text: str, line: int) -> tuple[int, int]:
    """Where the first tag of a line begins: Jinja knows no columns."""
    lines = text.split("\n")
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    found = re.search(r"\{\{|\{%", shown)
    return line, 1 if found is None else found.start() + 1
