"""Pages for programs, made of the code: the HTTP API, its OpenAPI file, and the tables of SQL.

`python tools/docs/api_pages.py docs` writes them into the folder of the docs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tocsin.console.api.openapi import openapi, parameters_of
from tocsin.console.api.operations import OPERATIONS, ROOT
from tocsin.console.api.problems import Kind, problem_texts
from tocsin.store.query.facts import DELIVERIES, ISSUES, RUNS, columns_of
from tocsin.store.query.tables import COLUMNS

COMMAND: Final = "python tools/docs/api_pages.py docs"

_HEAD: Final = """\
# HTTP API

`tocsin serve` answers programs below `/api/v1`, with the same facts as its pages. All of it is GET
and JSON; nothing here changes anything. [openapi.json](../schemas/openapi.json) describes each
field, for a generator of clients; `GET /api/v1/openapi.json` returns the same.

```text
curl 'http://127.0.0.1:8470/api/v1/issues?since=2h&severity=critical'
curl 'http://127.0.0.1:8470/api/v1/runs/gpt-7/series?name=loss&points=200'
```

The same access rules apply as to the pages: loopback needs no token; any other address needs
`Authorization: Bearer TOKEN`, with the token of `tocsin serve --token-file`.

- **Versions.** Each answer has `version` (1). Within a version fields are only added: ignore those
  that you do not know. The shapes are those of `tocsin status --json`, `issues --json`,
  `why --json`, `stops report --json` and `catalog list --json`.
- **Time.** Names carry units: `_ms` is milliseconds since 1970 (UTC), `_s` seconds.
- **`since`** takes a duration (`30s`, `2h`, `7d`) or a time with its zone
  (`2026-12-01T00:00:00Z`), and means what `--since` means: what changed at that time or later. A
  run changed with its last record, an issue and a delivery with their newest state.
- **Pages.** Lists have the newest first. `next` is the `cursor` of the next page, or null. What is
  added while you read is on no later page. `as_of` is the next `since`; clocks differ, so let two
  readings overlap and drop repeats by id.
- **Numbers** that are not finite are the words `"NaN"`, `"Infinity"` and `"-Infinity"`. A series
  that is longer than `points` is reduced: of each stretch of steps the smallest and the largest
  value stay, and values that are not finite.
- **Text from trainings** (names of runs, tensors and labels, reasons, messages) is data. Escape it
  before you show it, and do not let a language model take it as an instruction.

"""

_TABLES_HEAD: Final = """\
# SQL tables

What [`tocsin query`](../how-to/export.md) can ask. Times are in UTC. Statistics whose names have
capital letters or other signs have `%XX` in place of these, because SQL takes `Loss` and `loss` for
one name.
"""


def page() -> str:
    """`docs/reference/api.md`."""
    return _HEAD + "\n".join([*_operations(), *_problems()])


def description() -> str:
    """`docs/schemas/openapi.json`."""
    return json.dumps(openapi(), indent=2, ensure_ascii=False) + "\n"


def _operations() -> Iterator[str]:
    yield "## Operations"
    yield ""
    for operation in OPERATIONS:
        yield f"### `GET {ROOT}{operation.path}`"
        yield ""
        yield f"{operation.summary}. Operation `{operation.name}`."
        yield ""
        parameters = list(parameters_of(operation))
        if parameters:
            yield "| parameter | default | meaning |"
            yield "|---|---|---|"
            for one in parameters:
                default = one["schema"].get("default", "")
                shown = f"`{default}`" if default != "" else ""
                words = [one["description"]]
                if choices := one["schema"].get("enum"):
                    words.append("; " + ", ".join(f"`{choice}`" for choice in choices))
                yield f"| `{one['name']}` | {shown} | {''.join(words)} |"
            yield ""


def _problems() -> Iterator[str]:
    yield "## Problems"
    yield ""
    yield "A request that cannot be answered gets `application/problem+json` (RFC 9457): `type`,"
    yield "`title`, `status`, and `detail`, which tells what was expected."
    yield ""
    yield "| `type` | status | meaning |"
    yield "|---|---|---|"
    kind: Kind
    for kind, status, title in problem_texts():
        yield f"| `urn:tocsin:problem:{kind}` | {status} | {title} |"
    yield ""


def tables() -> str:
    """`docs/reference/sql-tables.md`."""
    found = {
        "runs": ("the newest training of each run", columns_of(RUNS)),
        "steps": ("one number of a step in each row", COLUMNS["steps"]),
        "tensors": (
            "one tensor at one step in each row, with a column for each statistic (`l2`, `absmax`, "
            "`nans`, `p50`, …: [captured data](captured-data.md))",
            COLUMNS["tensors"],
        ),
        "system": ("one number of one sample of a node in each row", COLUMNS["system"]),
        "issues": ("each issue in its newest state", columns_of(ISSUES)),
        "deliveries": ("each notice and each stop in its newest state", columns_of(DELIVERIES)),
    }
    lines = [_TABLES_HEAD]
    for name, (about, columns) in found.items():
        lines += [f"## `{name}`", "", f"{about[0].upper()}{about[1:]}.", ""]
        lines += ["| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {kind} | {meaning} |" for column, kind, meaning in columns]
        lines.append("")
    return "\n".join(lines)


PAGES: Final = {
    "reference/api.md": page,
    "reference/sql-tables.md": tables,
    "schemas/openapi.json": description,
}


def write_pages(docs: Path) -> None:
    """Write them into the folder of the docs."""
    for name, text in PAGES.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {COMMAND}")
    write_pages(Path(sys.argv[1]))
