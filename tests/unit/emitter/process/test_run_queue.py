"""What others take of a thread's time is not counted as the length of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.emitter.process.run_queue import RunQueue


@pytest.mark.parametrize(
    ("waited_s", "lasted_s", "share"), [(0.0, 2.0, 0.0), (1.5, 2.0, 0.75), (3.0, 2.0, 1.0)]
)
def test_the_share_is_of_the_time_since_the_last_call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waited_s: float,
    lasted_s: float,
    share: float,
) -> None:
    clock, told = [10.0], tmp_path / "schedstat"
    monkeypatch.setattr("tocsin.emitter.process.run_queue.time.perf_counter", lambda: clock[0])
    told.write_text("7 5000000000 3\n")
    queue = RunQueue(told)
    clock[0] += lasted_s
    told.write_text(f"9 {5_000_000_000 + round(waited_s * 1e9)} 4\n")
    assert queue.share() == pytest.approx(share)
    clock[0] += 1.0
    assert queue.share() == 0.0


@pytest.mark.parametrize("text", [None, "", "none of it\n"])
def test_nothing_is_taken_where_the_system_does_not_tell(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    assert RunQueue(tmp_path / "schedstat").share() == 0.0


def test_this_system_tells_it_of_the_calling_thread() -> None:
    assert 0.0 <= RunQueue().share() <= 1.0
