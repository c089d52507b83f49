"""A request that a server of ours refuses."""

from __future__ import annotations


class RefusedError(Exception):
    """The server refuses a request: `status`, and `text` for the person."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
