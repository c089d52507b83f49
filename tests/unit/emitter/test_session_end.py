"""How a watched training ends, and what its end is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.captured import captured
from tocsin.emitter import edges
from tocsin.emitter.current import current
from tocsin.emitter.sender import Sender


def test_no_stop_is_heard_any_more_when_the_sender_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bool] = []
    close = Sender.close

    def noted(self: Sender, timeout_s: float = 5.0) -> bool:
        heard.append(edges._rank is not None)
        return close(self, timeout_s)

    monkeypatch.setattr(Sender, "close", noted)
    with captured(tmp_path):
        session = current.session
        assert session is not None
        session.begin()
        session.announce({})
        assert edges._rank is not None
    assert heard == [False]
