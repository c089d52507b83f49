"""The examples in the file that `tocsin init` writes, put to use as its readers do."""

from __future__ import annotations

import re
from typing import Final

EXAMPLE: Final = re.compile(r"^( *)#(?! \S)(?=.)", re.MULTILINE)
"""The mark of a line that is an example; removing it, all but the indentation, uncomments it."""


def uncomment(text: str) -> str:
    """The text with all examples in use."""
    return EXAMPLE.sub(r"\1", text)
