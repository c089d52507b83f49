"""What a stop does about checkpoints: saves one, protects one, and waits for those under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.records.stops import StopSigner
from support.waiting import wait_until
from tocsin.emitter.stop import datagrams, exit_points, saving
from tocsin.emitter.stop.exception import StopTraining, take_over
from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.rank_stop import Rank
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.stops.commands import StopCheckpoint, StopLeft

GOOD = Checkpoint(path="/c/9.pt", step=9, verified=True)


class Place:
    """A rank, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.signer = StopSigner()
        self.signer.key.write(folder / "keys" / "actions.key")
        self.launcher = datagrams.Endpoint(folder / "launcher.sock")
        self.said: list[Data] = []

    def started(
        self, *, finite: Callable[[], bool] = lambda: True, world_size: int = 1, rank: int = 0
    ) -> Rank:
        origin = RecordOrigin(run_id="r1", incarnation="i1", rank=rank, world_size=world_size)
        return exit_points.started(origin, self.said.append, finite=finite)

    def leaves(self, rank: Rank, **changes: Any) -> StopCheckpoint:
        """What the rank decides at the exit point after such a command."""
        fields = {"checkpoint": "save", "last_good_checkpoint": GOOD, **changes}
        rank.receive(self.signer.sign(self.signer.command("r1", "i1", **fields)))
        with pytest.raises(StopTraining):
            exit_points.check("optimizer_step", 12)
        kinds = [type(one) for one in self.said]
        assert kinds.index(StopCheckpoint) < kinds.index(StopLeft)
        (decided,) = [one for one in self.said if isinstance(one, StopCheckpoint)]
        return decided


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = Place(tmp_path)
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(place.launcher.path))
    monkeypatch.delenv("TOCSIN_STOP", raising=False)
    yield place
    saving.on_stop(None)
    exit_points.finished()
    place.launcher.close()


def test_the_program_saves_before_the_loop_is_left(place: Place) -> None:
    saved: list[int] = []

    def save() -> str:
        saved.append(len(place.said))
        # What saves may fetch batches: no exit point is in it.
        exit_points.check("evaluation", 12)
        return "/c/12.pt"

    saving.on_stop(save)
    decided = place.leaves(place.started())
    assert saved == [1]  # the acknowledgement
    assert (decided.decision, decided.reason) == ("saved", "")
    assert decided.checkpoint == Checkpoint(path="/c/12.pt", step=12, finite=True)


def test_a_loop_that_goes_on_does_not_save_again(place: Place) -> None:
    saved: list[int] = []
    saving.on_stop(lambda: saved.append(1))
    place.leaves(place.started())
    with pytest.raises(StopTraining):
        exit_points.check("optimizer_step", 13)
    assert saved == [1]


@pytest.mark.parametrize(
    ("finite", "reason"),
    [
        (lambda: False, "the weights are not finite"),
        (lambda: 1 / 0 > 0, "the weights cannot be read: ZeroDivisionError"),
    ],
)
def test_what_is_not_finite_is_not_saved(
    place: Place, finite: Callable[[], bool], reason: str
) -> None:
    saved: list[int] = []
    saving.on_stop(lambda: saved.append(1))
    decided = place.leaves(place.started(finite=finite))
    assert saved == []
    assert (decided.decision, decided.checkpoint, decided.reason) == ("protected", GOOD, reason)


def test_a_save_that_fails_and_one_that_nobody_can_make(place: Place) -> None:
    def fails() -> None:
        raise OSError("no space")

    saving.on_stop(fails)
    decided = place.leaves(place.started())
    assert (decided.decision, decided.reason) == ("not_saved", "saving failed: OSError")

    saving.on_stop(None)
    place.said.clear()
    decided = place.leaves(place.started())
    assert decided.reason == "the program has not said how to save"


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({"checkpoint": "skip"}, "skipped"),
        ({"checkpoint": "protect_last_good"}, "protected"),
        ({"checkpoint": "protect_last_good", "last_good_checkpoint": None}, "not_saved"),
    ],
)
def test_the_other_policies_save_nothing(
    place: Place, changes: dict[str, object], decision: str
) -> None:
    saved: list[int] = []
    saving.on_stop(lambda: saved.append(1))
    assert place.leaves(place.started(), **changes).decision == decision
    assert saved == []


def test_a_framework_that_ends_its_loop_saves_by_itself(place: Place) -> None:
    asked: list[bool] = []

    def take(stop: StopTraining) -> bool:
        asked.append(stop.save)
        return True

    for path, decision in (("", "not_saved"), ("/c/step-13", "saved")):
        place.said.clear()
        rank = place.started()
        take_over(take)
        rank.receive(place.signer.sign(place.signer.command("r1", "i1", checkpoint="save")))
        exit_points.check("optimizer_step", 12)
        saving.writes.start()
        saving.writes.end(path)
        with pytest.raises(StopTraining):
            exit_points.leave()
        take_over(None)
        (decided,) = [one for one in place.said if isinstance(one, StopCheckpoint)]
        assert decided.decision == decision
    assert asked == [True, True]


class Ranks:
    """A collective of this rank and another, which passes `other`."""

    def __init__(self, other: int | None) -> None:
        self.other = other
        self.mine: list[int] = []

    def start(self, known: int, interval: int) -> Any:
        ranks = self
        self.mine.append(known)

        class Done:
            def done(self) -> bool:
                if ranks.other is None:
                    raise RuntimeError("the other rank is gone")
                return True

            def result(self) -> tuple[int, int]:
                assert ranks.other is not None
                return max(known, ranks.other), interval

            def abandon(self) -> None: ...

        return Done()


def test_a_command_that_comes_while_a_rank_leaves_before_an_update_confirms_that(
    place: Place,
) -> None:
    rank = place.started()

    def save() -> str:
        rank.receive(place.signer.sign(place.signer.command("r1", "i1", checkpoint="save")))
        return "/c/12.pt"

    saving.on_stop(save)
    with pytest.raises(StopTraining):
        rank.leave_before_update("a gradient is not finite", 12, "save")
    decided, left = place.said[-2:]
    assert isinstance(decided, StopCheckpoint)
    assert decided.checkpoint == Checkpoint(path="/c/12.pt", step=12, finite=True)
    assert isinstance(left, StopLeft)
    assert (left.edge, left.step) == ("before_update", 12)
    rank.await_command()  # at once
    assert [type(one) for one in place.said].count(StopLeft) == 1


@pytest.mark.parametrize(
    ("other", "finite", "decision", "reason"),
    [
        (0, True, "saved", ""),
        (1, True, "protected", "another rank cannot save"),
        (0, False, "protected", "the weights are not finite"),
        (None, True, "protected", "the ranks do not leave together"),
    ],
)
def test_all_ranks_save_or_none(
    place: Place, *, other: int | None, finite: bool, decision: str, reason: str
) -> None:
    saving.on_stop(lambda: "/c/12.pt")
    rank = place.started(finite=lambda: finite, world_size=2)
    ranks = Ranks(other)
    agreement = Agreement(ranks)
    rank._agreed = agreement
    command = place.signer.command("r1", "i1", checkpoint="save", last_good_checkpoint=GOOD)
    rank.receive(place.signer.sign(command))
    with pytest.raises(StopTraining):
        rank._leave(command, "optimizer_step", 12)
    (decided,) = [one for one in place.said if isinstance(one, StopCheckpoint)]
    assert (decided.decision, decided.reason) == (decision, reason)
    assert ranks.mine == [int(not finite)]


def test_a_rank_that_was_not_told_keeps_the_others_from_saving(place: Place) -> None:
    rank = place.started(world_size=2, rank=1)
    ranks = Ranks(0)
    rank._agreed = Agreement(ranks)
    with pytest.raises(StopTraining):
        rank._leave(None, "optimizer_step", 12)
    assert ranks.mine == [1]


def test_a_write_that_goes_on_is_waited_for_and_told(place: Place) -> None:
    rank = place.started()
    saving.writes.start()
    threading.Timer(0.0, lambda: saving.writes.end("/c/12.pt")).start()
    place.leaves(rank, checkpoint="skip")
    told: list[object] = []

    def look() -> bool:
        told.extend(m["on"] for m in place.launcher.drain() if m["kind"] == "saving")
        return len(told) == 2

    wait_until(look)
    assert told == [True, False]


def test_a_write_that_never_ends_is_waited_for_as_long_as_the_grace(place: Place) -> None:
    rank = place.started()
    saving.writes.start()
    try:
        place.leaves(rank, checkpoint="skip", grace_s=0.01)
    finally:
        saving.writes.end()
