"""Makes the picture of the README: `python tools/docs/demo_picture.py docs/images/demo.svg`.

It runs the demo for real, keeps the telling lines of what that printed, and draws them as a
terminal.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from tocsin.console.demo.demo import FAULT_STEP, Demo, ScenarioName

SCENARIOS: Final[tuple[ScenarioName, ...]] = ("healthy", "nan")
WIDTH: Final = 104
"""Of the terminal, characters."""

_STEP: Final = re.compile(r"^ *(healthy|nan) step (\d+) loss ")
_SHOWN_STEPS: Final = {
    "healthy": frozenset({0, 100}),
    "nan": frozenset({0, FAULT_STEP - 20, FAULT_STEP - 10, FAULT_STEP}),
}
# Paths and ports of this one run say nothing to a reader.
_LEFT_OUT: Final = re.compile(r"^ *tocsin |demo-(hook|mail): ")
_FONT_FROM_ELSEWHERE: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def telling(lines: Iterable[Text]) -> Iterator[Text]:
    """The lines worth a picture: of the steps a few, and each notice once, in the table. Pure."""
    for line in lines:
        step = _STEP.match(line.plain)
        if step is not None and int(step[2]) not in _SHOWN_STEPS[step[1]]:
            continue
        if _LEFT_OUT.search(line.plain) is None:
            line.rstrip()
            yield line


def svg_of(lines: Iterable[Text]) -> str:
    """A terminal with these lines, each cut where it is longer than the terminal is wide. Pure."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "dim"), (f"tocsin demo {' '.join(SCENARIOS)}", "bold")))
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
    svg = console.export_svg(title="tocsin demo", unique_id="demo")
    # The reader's own font will do; a picture loads nothing.
    return _FONT_FROM_ELSEWHERE.sub("", svg)


def main() -> int:
    """Run the demo, write the file that the command line names; the exit code."""
    if len(sys.argv) != 2:
        print("usage: python tools/docs/demo_picture.py FILE.svg", file=sys.stderr)
        return 2
    printed = io.StringIO()
    console = Console(
        file=printed,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    demo = Demo(SCENARIOS, None, console)
    as_announced = asyncio.run(demo.run())
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = map(Text.from_ansi, printed.getvalue().splitlines())
    path.write_text(svg_of(telling(lines)), encoding="utf-8")
    print(f"wrote {path}")
    return 0 if as_announced else 1


if __name__ == "__main__":
    raise SystemExit(main())
