"""Where a configuration is: one file, or all files of a folder, which are one configuration then.

In a folder each file is a configuration of its own shape: sections with names are put together, and
so are lists, in the order of the files' names. What two files name alike is a problem.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tocsin.schemas.configuration.problems import Loc, PlacedProblem, Problem, quoted
from tocsin.schemas.configuration.yaml_document import MAX_BYTES, Document, Plain, load
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.process.private_folders import why_shared

DEFAULT_FILE: Final = "tocsin.yaml"
CONFIG_VARIABLE: Final = "TOCSIN_CONFIG"

SUFFIX: Final = ".yaml"
TESTS_SUFFIX: Final = "_test.yaml"
"""How the names of files with tests of a configuration end; they are no part of it."""

MAX_FILES: Final = 200


def config_path(path: Path | None, env: Mapping[str, str], *, folder: Path) -> Path | None:
    """The file or folder that holds, as `load_config` finds it; None when there is none."""
    if path is None and env.get(CONFIG_VARIABLE):
        path = Path(env[CONFIG_VARIABLE])
    if path is None and os.path.lexists(folder / DEFAULT_FILE):
        path = Path(DEFAULT_FILE)
    return path


def config_files(path: Path) -> list[Path]:
    """The files of a configuration: itself, or those of a folder by name. May block.

    Of a folder those ending in `.yaml` count, but not hidden ones (an editor's, or those to which
    the links of a mounted ConfigMap lead), and not tests.

    Raises:
        ConfigurationError: the folder has none, has too many, or cannot be read.
    """
    if not path.is_dir():
        return [path]
    try:
        names = sorted(os.listdir(path))
    except OSError as err:
        raise _unreadable(path, err) from err
    files = [
        path / name
        for name in names
        if name.endswith(SUFFIX) and not name.endswith(TESTS_SUFFIX) and not name.startswith(".")
    ]
    if not files:
        raise ConfigurationError(f"no configuration in the folder {str(path)!r}: expected *.yaml")
    if len(files) > MAX_FILES:
        raise ConfigurationError(
            f"{len(files):,} files in the folder {str(path)!r} are over the limit of {MAX_FILES}"
        )
    return files


def folder_of(path: Path) -> Path:
    """Where the relative paths of a configuration start: its folder, or itself if it is one."""
    return path if path.is_dir() else path.parent


def read_config(path: Path) -> str:
    """The text of a file, as far as `check_config` reads it. May block.

    Raises:
        ConfigurationError: the file is not there or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as err:
        raise _unreadable(path, err) from err
    # Bytes that are no UTF-8 become lone surrogates, which the loader reports with their place. The
    # mark with which some editors begin a file is no part of its first line.
    return data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")


def read_files(path: Path, *, folder: Path | None = None) -> dict[str, str]:
    """The texts of a configuration by the names of its files. May block.

    Args:
        folder: where a relative path starts, which then stands in no name.

    Raises:
        ConfigurationError: as `config_files` and `read_config` do; or they are too large together.
    """
    folder = folder or Path()
    texts: dict[str, str] = {}
    size = 0
    for file in config_files(folder / path):
        name = str(path if file == folder / path else path / file.name)
        texts[name] = read_config(file)
        size += len(texts[name])
        if size > MAX_BYTES and len(texts) > 1:
            raise ConfigurationError(
                f"the files of {str(path)!r} are over the limit of {MAX_BYTES:,} characters"
            )
    return texts


def why_config_shared(path: Path) -> str | None:
    """Why others can write to a file or folder of configuration, or to what is in it; or None.

    Who can write to the folder can add a file.
    """
    if (why := why_shared(path)) is not None or not path.is_dir():
        return why
    return next(filter(None, map(why_shared, config_files(path))), None)


def _unreadable(path: Path, err: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the configuration {str(path)!r}: {err.strerror or err}; "
        "`tocsin init` writes one"
    )


class Place(NamedTuple):
    """A line and column of a source."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


class Sources:
    """The documents of a configuration as one; each place in it is one of them.

    Attributes:
        data: of all of them, put together.
        problems: what is wrong with them as YAML, and what they name twice.
        complete: False when one could not be read to its end.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = tuple(documents)
        # From section and name, or section and index, to the document and the way in it.
        self._parts: dict[Loc, tuple[Document, Loc]] = {}
        self.complete = all(document.complete for document in documents)
        self.data: Plain = documents[0].data
        problems = [problem for document in documents for problem in document.problems]
        if len(documents) > 1 and self.complete:
            self.data = self._together(problems)
        self.problems = tuple(problems)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Sources:
        """Read texts, by the names of their sources."""
        return cls([load(text, source=name) for name, text in texts.items()])

    def place(self, loc: Sequence[str | int], *, at: Literal["key", "value"] = "value") -> Place:
        """Where the value (or its key) stands; if there is none, the nearest that encloses it."""
        document, inner = self._locate(tuple(loc))
        return Place(document.source, *document.position(inner, at=at))

    def placed(self, problem: Problem) -> PlacedProblem:
        """A problem at its place."""
        place = self.place(problem.loc, at=problem.at)
        if problem.earlier is not None:
            earlier = self.place(problem.earlier, at="key")
            problem = replace(problem, message=f"{problem.message} in {earlier}")
        return problem.placed(*place)

    def lines(self, loc: Sequence[str | int]) -> list[tuple[str, range]]:
        """The lines of a value and its key; of a section, in each source that has it."""
        if len(loc) == 1:
            return [(document.source, document.lines(loc)) for document in self._documents]
        document, inner = self._locate(tuple(loc))
        return [(document.source, document.lines(inner))]

    def order(self, problem: PlacedProblem) -> tuple[int, int, int]:
        """For sorting: sources in their order, and places in a source."""
        names = [document.source for document in self._documents]
        return names.index(problem.source), problem.line, problem.column

    def _locate(self, loc: Loc) -> tuple[Document, Loc]:
        for length in (2, 1):
            if (found := self._parts.get(loc[:length])) is not None and len(loc) >= length:
                return found[0], (*found[1], *loc[length:])
        return self._documents[0], loc

    def _together(self, problems: list[PlacedProblem]) -> Plain:
        data: dict[str, Plain] = {}
        for document in self._documents:
            if document.data is None:
                continue
            if not isinstance(document.data, dict):
                message = "expected a mapping: each file of a folder is a configuration"
                problems.append(_problem(document, (), message, "invalid_value", "version: 1"))
                continue
            if "version" not in document.data:
                message = "the key 'version' is missing"
                problems.append(_problem(document, (), message, "missing_key", "version: 1"))
            for name, section in document.data.items():
                self._add(name, section, document, data, problems)
        return data

    def _add(
        self,
        name: str,
        section: Plain,
        document: Document,
        data: dict[str, Plain],
        problems: list[PlacedProblem],
    ) -> None:
        """Put a section to what the documents before have of it."""
        known = data.get(name)
        if known is None:
            self._parts[(name,)] = (document, (name,))
            known = data[name] = type(section)() if isinstance(section, dict | list) else section
        if isinstance(known, list) and isinstance(section, list):
            for index, item in enumerate(section):
                self._parts[(name, len(known))] = (document, (name, index))
                known.append(item)
        elif isinstance(known, dict) and isinstance(section, dict):
            for key, item in section.items():
                if key in known:
                    problems.append(self._twice(document, (name, key)))
                    continue
                self._parts[(name, key)] = (document, (name, key))
                known[key] = item
        elif self._parts[(name,)][0] is document or section is None:
            return
        elif name != "version" or section != known:
            problems.append(self._twice(document, (name,)))

    def _twice(self, document: Document, loc: Loc) -> PlacedProblem:
        earlier = self.place(loc, at="key")
        what = ".".join(quoted(str(part)).strip("'") for part in loc)
        message = f"{what!r} is already set in {earlier}"
        return _problem(document, loc, message, "duplicate_key", "keep one of them")


def _problem(document: Document, loc: Loc, message: str, code: str, hint: str) -> PlacedProblem:
    problem = Problem(loc, message, code, hint)
    return problem.placed(document.source, *document.position(loc, at="key"))
