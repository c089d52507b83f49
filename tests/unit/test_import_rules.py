"""Which part of tocsin may import what: read from the source, so it holds for all code."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

PORTIONS = ("schemas", "bus", "runtime", "emitter", "stream_rules", "actions", "store", "console")

# Each part, and the other parts it may know. Console is where all of them meet.
ALLOWED: dict[str, set[str]] = {
    "schemas": set(),
    "bus": {"schemas"},
    "runtime": {"schemas", "bus"},
    "emitter": {"schemas", "bus"},
    "stream_rules": {"schemas", "runtime", "bus"},
    "actions": {"schemas", "bus", "runtime"},
    "store": {"schemas", "bus", "runtime"},
    "console": set(PORTIONS),
}

# torch is the user's own: only the emitter and the demo's trainings know it.
TORCH_USERS = {"emitter", "console"}

# What may be missing on a training node. It is imported at the top of its adapters only, and others
# import these inside functions only: importing tocsin never needs it.
ADAPTERS: dict[str, set[str]] = {
    "torch": {
        "tocsin.console.demo.trainings",
        "tocsin.emitter.capture",
        "tocsin.emitter.hooks",
        "tocsin.emitter.integrations",
        "tocsin.emitter.lightning",
        "tocsin.emitter.transformers",
        "tocsin.emitter.model",
        "tocsin.emitter.probes",
        "tocsin.emitter.statistics.async_copy",
        "tocsin.emitter.statistics.cpu_rows",
        "tocsin.emitter.statistics.gpu_rows",
        "tocsin.emitter.statistics.low_precision",
        "tocsin.emitter.statistics.readable",
        "tocsin.emitter.statistics.reductions",
        "tocsin.emitter.statistics.stacks",
        "tocsin.emitter.statistics.tensor_quantiles",
        "tocsin.emitter.statistics.tensor_rows",
    },
    "aiokafka": {
        "tocsin.bus.kafka.bus",
        "tocsin.bus.kafka.clients",
        "tocsin.bus.kafka.consumer",
        "tocsin.bus.kafka.corrections",
        "tocsin.bus.kafka.errors",
        "tocsin.bus.kafka.topic_admin",
    },
    "aiohttp": {"tocsin.console.demo*"},
    "transformers": {"tocsin.emitter.transformers"},
    "tenacity": {"tocsin.console.services.broker_connection"},
    "prometheus_client": {"tocsin.runtime.prometheus_metrics"},
    "opentelemetry": {"tocsin.runtime.otlp_metrics"},
    "aiosmtpd": {"tocsin.console.demo*"},
    "mcp": {"tocsin.console.agents.server"},
    "starlette": {"tocsin.console.api.routes"},
    "sklearn": {"tocsin.console.demo.trainings"},
    "duckdb": {
        "tocsin.store.parquet.duck",
        "tocsin.store.parquet.frames",
        "tocsin.store.parquet.source",
        "tocsin.store.query.engine",
    },
    "obstore": {"tocsin.store.storage.objects"},
}


# The floors of each part, lowest first: a room (a folder, or a module beside them) imports only
# from rooms of lower floors, for types too.
FLOORS: dict[str, tuple[set[str], ...]] = {
    "schemas": (
        {"errors", "exit_codes", "monotonic_clock", "process", "store_paths", "whole_file"},
        {"ids", "topics", "signing"},
        {"records", "key_folder", "links"},
        {"text", "stops_switch"},
        {"configuration"},
        {"compute_estimates"},
        {"__init__"},
    ),
    "bus": ({"port"}, {"embedded", "kafka"}, {"urls"}, {"configured", "reading"}, {"__init__"}),
    "emitter": (
        {"process", "plan", "statistics"},
        {"send", "stop", "model"},
        {"node", "training", "checkpoints"},
        {"probes"},
        {"launch", "capture"},
        {"hooks"},
        {"run"},
        {"api"},
        {"integrations", "__init__"},
        {"lightning", "transformers"},
    ),
    "stream_rules": (
        {"__init__", "reading"},
        {"outcomes"},
        {"rule"},
        {"signals"},
        {"rule_bases"},
        {"rules"},
        {"catalogue"},
        {"engine"},
        {"testing", "custom", "overload_control"},
        {"service"},
    ),
    "actions": (
        {"__init__", "decision", "kinds"},
        {"digests", "ledger"},
        {"delivery"},
        {"receivers"},
        {"targets"},
        {"config"},
        {"composition", "simulation"},
    ),
    "store": (
        {"errors", "known_records"},
        {"values", "storage", "manifest"},
        {"reading"},
        {"parquet"},
        {"catalog", "tensor_values"},
        {"archive"},
        {"stored", "tensor"},
        {"run", "query"},
        {"export"},
        {"opening"},
        {"config", "configured"},
        {"__init__"},
    ),
    "console": (
        {"__init__", "charts", "context", "files", "person", "publication", "refusal"},
        {"views", "configuration"},
        {"run_lookup"},
        {"feedback", "dead_letters", "fleet", "report", "silences", "stop"},
        {"compare", "links"},
        {"watch", "demo", "services", "catalog", "sagemaker"},
        {"api", "query"},
        {"agents", "page"},
        {"commands"},
        {"__main__"},
    ),
}

WITHOUT_TORCH = {"tocsin.emitter.hooks.on_import", "tocsin.emitter.capture.user_values"}
"""Modules of adapters that do not need what the others need: they wait for torch to be imported."""

MAX_MODULES = 25
"""In one folder: more want a room of their own."""


PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final[dict[str, list[str]]] = {
    name: found for name, found in PROJECT["optional-dependencies"].items() if name != "all"
}

# What comes with a declared dependency, and with which.
BROUGHT_BY = {
    "annotated_types": "pydantic",
    "botocore": "boto3",
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "requests": "apprise",
    "yarl": "aiohttp",
}

# A training may have these, and the emitter serves them if it has; the store gives its results as
# theirs.
USERS_OWN = {"pandas", "transformers"}


@functools.cache
def owners_of_modules() -> Mapping[str, list[str]]:
    """Distributions by the module that they install. Reads what is installed."""
    return packages_distributions()


def modules_of(requirements: Iterable[str]) -> set[str]:
    """The names under which the distributions of these requirements are imported."""
    wanted = {canonicalize_name(Requirement(one).name) for one in requirements}
    return {
        module
        for module, owners in owners_of_modules().items()
        if any(canonicalize_name(owner) in wanted for owner in owners)
    }


@dataclass(frozen=True)
class Import:
    """One imported module, and whether it is imported when the module around it is."""

    path: str
    line: int
    module: str
    eager: bool
    typing: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def importer(self) -> str:
        """The dotted name of the module that imports."""
        return ".".join(Path(self.path).with_suffix("").parts[1:]).removesuffix(".__init__")

    @property
    def portion(self) -> str | None:
        parts = self.module.split(".")
        return parts[1] if parts[0] == "tocsin" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(path: str, source: str) -> Iterator[Import]:
    yield from _walk(ast.parse(source), path, eager=True, typing=False)


def _walk(node: ast.AST, path: str, *, eager: bool, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(path, node.lineno, alias.name, eager, typing)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            yield Import(path, node.lineno, "." * node.level + (node.module or ""), eager, typing)
        elif node.module and node.module.split(".")[0] == "tocsin":
            # `from tocsin.a import b`: b may be a module or a name in one; both are covered so.
            for alias in node.names:
                yield Import(path, node.lineno, f"{node.module}.{alias.name}", eager, typing)
        else:
            yield Import(path, node.lineno, node.module or "", eager, typing)
    elif isinstance(node, ast.Call) and (named := _imported_by_name(node)):
        yield Import(path, node.lineno, named, eager, typing)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        eager = False
    if isinstance(node, ast.If) and _type_checking(node.test):
        for statement in node.body:
            yield from _walk(statement, path, eager=False, typing=True)
        for statement in node.orelse:
            yield from _walk(statement, path, eager=eager, typing=typing)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, path, eager=eager, typing=typing)


def _type_checking(test: ast.expr) -> bool:
    return _dotted(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _dotted(node: ast.expr) -> str:
    """The dotted name that an expression is; empty: it is something else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported_by_name(call: ast.Call) -> str:
    """The module in `import_module("…")`, `__import__("…")`, else ""."""
    name = _dotted(call.func)
    first = call.args[0] if call.args else None
    if name in ("import_module", "importlib.import_module", "__import__") and isinstance(
        first, ast.Constant
    ):
        return str(first.value)
    return ""


def inside(module: str, patterns: set[str]) -> bool:
    """Whether a dotted name is one of these modules or lies in one."""
    return any(fnmatchcase(module, p) or fnmatchcase(module, f"{p}.*") for p in patterns)


def name_of(path: Path) -> str:
    """The dotted name of a module of the product."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts).removesuffix(".__init__")


def modules(portion: str) -> list[Path]:
    found = sorted((ROOT / portion / "tocsin" / portion).rglob("*.py"))
    return [path for path in found if "__pycache__" not in path.parts]


@functools.cache
def imports(portion: str) -> tuple[Import, ...]:
    return tuple(
        found
        for path in modules(portion)
        for found in imports_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("portion", PORTIONS)
def test_each_part_knows_only_the_parts_it_may(portion: str) -> None:
    may = {portion, *ALLOWED[portion]}
    wrong = [str(i) for i in imports(portion) if i.portion is not None and i.portion not in may]
    assert wrong == []


def test_rules_know_of_the_bus_only_the_port() -> None:
    """What `tocsin.bus` itself exports is the port; any other module is an implementation."""
    others = {name_of(path) for path in modules("bus")} - {"tocsin.bus", "tocsin.bus.port"}
    wrong = [
        str(found)
        for found in imports("stream_rules")
        # For tests of rules: it reads a run off the file of a bus.
        if inside(found.module, others)
        and found.importer != "tocsin.stream_rules.reading.recordings"
    ]
    assert wrong == []


def test_the_picture_of_the_rooms_has_each_on_its_floor() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = re.split("^```$", page.partition("## The rooms")[2], flags=re.MULTILINE)[1]
    shown: dict[str, list[set[str]]] = {}
    portion = ""
    for line in filter(str.strip, picture.splitlines()):
        portion = line[:17].strip() or portion
        # Behind three spaces there is a remark.
        rooms = line[17:].partition("   ")[0]
        shown.setdefault(portion, []).insert(0, {room.strip("/") for room in rooms.split()})
    for name, floors in FLOORS.items():
        named = [floor - {"__init__"} for floor in floors]
        assert shown[name] == [floor for floor in named if floor], name


@pytest.mark.parametrize("portion", FLOORS)
def test_rooms_import_from_lower_floors(portion: str) -> None:
    floors = {room: floor for floor, rooms in enumerate(FLOORS[portion]) for room in rooms}
    inner = f"tocsin.{portion}"

    def room_of(module: str) -> str:
        first = module.removeprefix(inner).lstrip(".").split(".")[0]
        return first if first in floors else "__init__"

    rooms = {[*name_of(path).split("."), "__init__"][2] for path in modules(portion)}
    assert rooms - set(floors) == set(), "give it a floor"
    wrong = [
        str(found)
        for found in imports(portion)
        if inside(found.module, {inner})
        and room_of(found.importer) != room_of(found.module)
        and floors[room_of(found.importer)] <= floors[room_of(found.module)]
    ]
    assert wrong == []


def test_no_modules_import_one_another() -> None:
    known = {name_of(path) for portion in PORTIONS for path in modules(portion)}
    needs: dict[str, set[str]] = {name: set() for name in known}
    for found in (each for portion in PORTIONS for each in imports(portion)):
        module = found.module
        while module and module not in known:
            module = module.rpartition(".")[0]
        if module and module != found.importer and found.importer in known:
            needs[found.importer].add(module)
    # What is left after those that need nothing (any more) were taken away is in a circle or needs
    # one.
    while free := {name for name, others in needs.items() if not others & set(needs)}:
        for name in free:
            del needs[name]
    in_circles = {name for name in needs if any(name in needs[other] for other in needs)}
    while ends := {n for n in in_circles if not any(n in needs[o] for o in in_circles)}:
        in_circles -= ends
    assert in_circles == set()


def test_no_folder_has_too_many_modules() -> None:
    folders = Counter(path.parent for portion in PORTIONS for path in modules(portion))
    assert [str(folder) for folder, count in folders.items() if count > MAX_MODULES + 1] == []


@pytest.mark.parametrize("portion", PORTIONS)
def test_imports_are_absolute_and_inside_tocsin(portion: str) -> None:
    wrong = [
        str(found)
        for found in imports(portion)
        if found.module.startswith(".") or found.module == "tocsin" or found.top in PORTIONS
    ]
    assert wrong == []


@pytest.mark.parametrize("portion", sorted(set(PORTIONS) - TORCH_USERS))
def test_torch_is_known_only_on_the_training_side(portion: str) -> None:
    found = [str(i) for i in imports(portion) if i.top in ("torch", "torchvision", "lightning")]
    assert found == []


def test_only_what_is_always_installed_is_imported_outside_adapters() -> None:
    base = modules_of(PROJECT["dependencies"])
    wrong = [
        str(found)
        for portion in PORTIONS
        for found in imports(portion)
        if found.eager
        and found.top not in sys.stdlib_module_names | base | {"tocsin"}
        and BROUGHT_BY.get(found.top) not in base
        and not inside(found.importer, ADAPTERS.get(found.top, set()))
    ]
    assert wrong == []


def test_each_adapter_imports_its_library() -> None:
    """Itself, or by way of another adapter of it."""
    idle = [
        (library, pattern)
        for library, patterns in ADAPTERS.items()
        for pattern in patterns
        if not any(
            inside(found.importer, {pattern})
            and (found.top == library or inside(found.module, patterns))
            for portion in PORTIONS
            for found in imports(portion)
        )
    ]
    assert idle == []


def test_each_declared_dependency_is_imported() -> None:
    imported = {found.top for portion in PORTIONS for found in imports(portion) if not found.typing}
    declared = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    idle = [one for one in declared if not modules_of([one]) & imported]
    assert idle == []


def test_each_import_is_declared() -> None:
    """What one of them brings along may be named beside it, here alone."""
    declared = modules_of([*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())])
    known = sys.stdlib_module_names | declared | USERS_OWN | {"tocsin"}
    wrong = [
        str(found)
        for portion in PORTIONS
        for found in imports(portion)
        if found.top not in known and BROUGHT_BY.get(found.top) not in declared
    ]
    assert wrong == []


@pytest.mark.parametrize("library", ADAPTERS)
def test_an_adapter_is_imported_lazily_outside_itself(library: str) -> None:
    wrong = [
        str(found)
        for portion in PORTIONS
        for found in imports(portion)
        if found.eager
        and inside(found.module, ADAPTERS[library])
        and not inside(found.module, WITHOUT_TORCH)
        and not inside(found.importer, ADAPTERS[library])
    ]
    assert wrong == []


def test_no_portion_hides_the_others() -> None:
    assert [str(path) for p in PORTIONS for path in (ROOT / p).glob("tocsin/__init__.py")] == []


@pytest.mark.parametrize("portion", PORTIONS)
def test_nothing_but_the_package_lies_in_a_code_folder(portion: str) -> None:
    ignored = {"__pycache__", ".DS_Store"}
    outer = {path.name for path in (ROOT / portion).iterdir()} - ignored
    inner = {path.name for path in (ROOT / portion / "tocsin").iterdir()} - ignored
    assert (outer, inner) == ({"tocsin"}, {portion})
    assert (ROOT / portion / "tocsin" / portion / "py.typed").is_file()


def test_the_reading_of_imports_itself() -> None:
    source = """
import torch
from tocsin.bus import kafka
from tocsin import actions
from . import x
if TYPE_CHECKING:
    import aiokafka
else:
    import boto3
try:
    import apprise
except ImportError:
    pass
def f():
    from torch.nn import Module
    importlib.import_module("sklearn.datasets")
class C:
    import aiohttp
"""
    assert [(i.module, i.eager, i.typing) for i in imports_of("m.py", source)] == [
        ("torch", True, False),
        ("tocsin.bus.kafka", True, False),
        ("tocsin.actions", True, False),
        (".", True, False),
        ("aiokafka", False, True),
        ("boto3", True, False),
        ("apprise", True, False),
        ("torch.nn", False, False),
        ("sklearn.datasets", False, False),
        ("aiohttp", True, False),
    ]
