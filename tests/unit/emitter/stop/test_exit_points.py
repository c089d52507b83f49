from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from support.records.stops import StopSigner
from support.waiting import wait_until
from tocsin.emitter.stop import (
    datagrams,
    exit_points,
    leave_report,
    rank_agreement,
    side_group,
)
from tocsin.emitter.stop import rank_stop as rank_module
from tocsin.emitter.stop.exception import StopTraining, take_over
from tocsin.emitter.stop.rank_agreement import Agreement
from tocsin.emitter.stop.rank_stop import Rank
from tocsin.emitter.stop.side_group import GlooCollective
from tocsin.schemas.records.events import Data
from tocsin.schemas.records.frames import RecordOrigin
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.schemas.records.stops.commands import StopAcknowledged, StopLeft, StopRefused

ORIGIN = RecordOrigin(run_id="r1", incarnation="i1")


@dataclass
class Place:
    """A launcher's side: its socket, a signer that is trusted, and what a rank emitted."""

    launcher: datagrams.Endpoint
    signer: StopSigner
    said: list[Data] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)

    def of(self, kind: type[Data]) -> list[Data]:
        return [data for data in self.said if isinstance(data, kind)]

    def heard(self, kind: str) -> datagrams.Message:
        found: list[datagrams.Message] = []

        def look() -> bool:
            found.extend(each for each in self.launcher.drain() if each["kind"] == kind)
            return bool(found)

        wait_until(look)
        return found[0]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    signer = StopSigner()
    signer.key.write(tmp_path / "keys" / "actions.key")
    launcher = datagrams.Endpoint(tmp_path / "launcher.sock")
    monkeypatch.setenv("TOCSIN_STOP_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TOCSIN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TOCSIN_LAUNCHER", str(launcher.path))
    monkeypatch.delenv("TOCSIN_STOP", raising=False)
    yield Place(launcher, signer)
    exit_points.finished()
    launcher.close()


def start(place: Place, origin: RecordOrigin = ORIGIN) -> Rank:
    return exit_points.started(origin, place.said.append, flush=place.flushed.append, training=2)


def test_checking_costs_nothing_without_a_training() -> None:
    exit_points.check("optimizer_step", 0)
    exit_points.finished()


def test_a_rank_says_hello_and_goodbye(place: Place) -> None:
    rank = start(place)
    hello = place.heard("hello")
    assert hello["role"] == "trainer"
    assert hello["pid"] == os.getpid()
    assert (hello["incarnation"], hello["training"]) == ("i1", 2)
    assert rank.socket is not None
    assert hello["socket"] == str(rank.socket)
    exit_points.check("optimizer_step", 41)
    exit_points.finished()
    assert place.heard("finished")["step"] == 41
    wait_until(lambda: not Path(str(hello["socket"])).exists())


def test_a_verified_stop_is_raised_at_the_next_exit_point(place: Place) -> None:
    rank = start(place)
    exit_points.check("optimizer_step", 7)
    command = place.signer.command("r1", "i1")
    assert rank.socket is not None
    datagrams.send(rank.socket, place.signer.sign(command).message())
    wait_until(lambda: rank.awake)
    with pytest.raises(StopTraining) as caught:
        exit_points.check("scaler_update", 8)
    assert caught.value.code == 79
    assert str(caught.value) == "training stopped by tocsin at step 8: a test says so"
    assert caught.value._render_traceback_() == [str(caught.value)]
    (acknowledged,) = place.of(StopAcknowledged)
    assert isinstance(acknowledged, StopAcknowledged)
    assert (acknowledged.command_id, acknowledged.step) == (command.command_id, 7)
    (left,) = place.of(StopLeft)
    assert isinstance(left, StopLeft)
    assert (left.step, left.edge, left.issue_id) == (8, "scaler_update", "issue-1")
    assert place.heard("left")["step"] == 8
    assert place.flushed == [leave_report.FLUSH_S]


def test_a_loop_that_swallows_the_stop_is_left_at_the_next_edge_again(place: Place) -> None:
    rank = start(place)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    for step in (1, 2):
        with pytest.raises(StopTraining):
            exit_points.check("optimizer_step", step)
    assert len(place.of(StopLeft)) == 1


@pytest.fixture
def taken() -> Iterator[list[StopTraining]]:
    """A framework that ends its loop by itself; the stops that it took over."""
    stops: list[StopTraining] = []

    def take(stop: StopTraining) -> bool:
        stops.append(stop)
        return True

    take_over(take)
    yield stops
    take_over(None)


def test_a_framework_that_ends_its_loop_is_left_behind_it(
    place: Place, taken: list[StopTraining]
) -> None:
    rank = start(place)
    exit_points.leave()
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    exit_points.check("optimizer_step", 4)
    # Another optimizer of the same step, and the evaluation at the end.
    exit_points.check("optimizer_step", 4)
    exit_points.check("evaluation", 4)
    assert not place.of(StopLeft)
    with pytest.raises(StopTraining) as caught:
        exit_points.leave()
    assert taken == [caught.value]
    assert (caught.value.code, caught.value.step) == (79, 4)
    (left,) = place.of(StopLeft)
    assert isinstance(left, StopLeft)
    assert (left.step, left.edge) == (4, "optimizer_step")


def test_a_framework_that_goes_on_is_left_at_the_next_exit_point(
    place: Place, taken: list[StopTraining]
) -> None:
    rank = start(place)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    exit_points.check("scaler_update", 4)
    with pytest.raises(StopTraining):
        exit_points.check("backward", 5)
    assert len(taken) == len(place.of(StopLeft)) == 1


def test_an_evaluation_that_lasts_is_left(
    place: Place, taken: list[StopTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(place)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    exit_points.check("optimizer_step", 4)
    monkeypatch.setattr(rank_module, "FRAMEWORK_STOP_WAIT_S", 0.0)
    with pytest.raises(StopTraining):
        exit_points.check("evaluation", 4)
    assert len(taken) == 1


@pytest.mark.parametrize("answer", [lambda stop: False, lambda stop: 1 // 0], ids=["no", "fails"])
def test_a_framework_that_does_not_take_it_is_left_at_once(
    place: Place, answer: Callable[[StopTraining], bool]
) -> None:
    rank = start(place)
    take_over(answer)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    try:
        with pytest.raises(StopTraining):
            exit_points.check("optimizer_step", 4)
    finally:
        take_over(None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run_id": "r2"}, "other_run"),
        ({"incarnation": "i0"}, "other_incarnation"),
        ({"not_after_ms": 1}, "expired"),
    ],
)
def test_each_rank_judges_for_itself(place: Place, change: dict[str, object], why: str) -> None:
    rank = start(place)
    command = place.signer.command("r1", "i1").model_copy(update=change)
    rank.receive(place.signer.sign(command))
    rank.receive(place.signer.sign(command))
    exit_points.check("optimizer_step", 1)
    (refused,) = place.of(StopRefused)
    assert isinstance(refused, StopRefused)
    assert refused.why == why
    assert rank.refused[why] == 2


def test_a_forged_datagram_stops_nothing(place: Place) -> None:
    rank = start(place)
    rank.receive(StopSigner().sign(place.signer.command("r1", "i1")))
    exit_points.check("optimizer_step", 1)
    assert rank.refused["untrusted_key"] == 1


def test_stops_can_be_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOCSIN_STOP", "off")
    rank = start(place)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    exit_points.check("optimizer_step", 1)
    assert rank.refused["stops_off"] == 1


def test_rubbish_on_the_socket_does_not_end_the_listening(place: Place) -> None:
    rank = start(place)
    assert rank.socket is not None
    datagrams.send(rank.socket, {"kind": "stop", "key": "?", "value": 3})
    datagrams.send(rank.socket, {"kind": "surprise"})
    datagrams.send(rank.socket, place.signer.sign(place.signer.command("r1", "i1")).message())
    wait_until(lambda: rank.awake)


def test_an_emitter_that_fails_does_not_hold_up_the_stop(place: Place) -> None:
    def failing(_timeout_s: float) -> None:
        raise RuntimeError("the bus is gone")

    rank = exit_points.started(ORIGIN, place.said.append, flush=failing)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    with pytest.raises(StopTraining):
        exit_points.check("optimizer_step", 1)


def test_a_forked_worker_is_not_a_rank(place: Place) -> None:
    rank = start(place)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exit_points.check("optimizer_step", 1)
            exit_points.finished()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert rank.socket is not None
    assert rank.socket.exists()


@dataclass
class Peers:
    """The other ranks, as a test wants them: each round's maximum, and whether it is there."""

    answers: Callable[[int, int], tuple[int, int]] = lambda heard, interval: (heard, interval)
    ready: bool = True
    rounds: list[tuple[int, int]] = field(default_factory=list)
    abandoned: int = 0

    def start(self, heard: int, interval: int) -> PeersRound:
        self.rounds.append((heard, interval))
        return PeersRound(self, self.answers(heard, interval))


@dataclass
class PeersRound:
    peers: Peers
    value: tuple[int, int]

    def done(self) -> bool:
        return self.peers.ready

    def result(self) -> tuple[int, int]:
        return self.value

    def abandon(self) -> None:
        self.peers.abandoned += 1


class Ticking:
    """A clock that goes on by `step_s` at each look."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def rank_with(place: Place, agreement: Agreement) -> Rank:
    return Rank(
        RecordOrigin(run_id="r1", incarnation="i1", world_size=2),
        place.said.append,
        agreed=agreement,
    )


def test_ranks_leave_one_edge_after_the_round_that_said_so(place: Place) -> None:
    peers = Peers()
    rank = rank_with(place, Agreement(peers, clock=Ticking(1.0)))
    rank.at_exit_point("optimizer_step", 0)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    rank.at_exit_point("optimizer_step", 1)
    with pytest.raises(StopTraining):
        rank.at_exit_point("optimizer_step", 2)
    assert [known for known, _ in peers.rounds] == [0, 2]
    rank.close()


def test_short_steps_have_rounds_further_apart_that_are_taken_two_edges_later() -> None:
    peers = Peers(answers=lambda known, _interval: (known, 4))
    agreement = Agreement(peers, clock=Ticking(1.0))
    assert not any(agreement.at_exit_point(False) for _ in range(6))
    # Begun at the exit points 0 and 4: the second is taken at the exit point 6, and not at 5.
    assert len(peers.rounds) == 2
    peers.ready = False
    assert not agreement.at_exit_point(False)
    assert agreement.broken == "the ranks do not step alike"


def test_after_a_bad_loss_there_is_a_round_at_each_edge_for_a_while() -> None:
    peers = Peers()
    agreement = Agreement(peers, clock=Ticking(0.001))

    def rounds_of(exit_points: int) -> int:
        before = len(peers.rounds)
        for _ in range(exit_points):
            assert not agreement.at_exit_point(False)
        return len(peers.rounds) - before

    rounds_of(200)
    assert rounds_of(100) < 10
    agreement.alert()
    # The round under way, or the next one, tells all ranks.
    rounds_of(32)
    assert rounds_of(100) == 100
    # NaN for ever: the rounds are not.
    for _ in range(20):
        agreement.alert()
        rounds_of(10)
    assert rounds_of(300) < 30


@pytest.mark.parametrize(("alerted", "most"), [(True, 2), (False, 34)])
def test_so_many_edges_after_a_command_all_leave(*, alerted: bool, most: int) -> None:
    """Whenever between two rounds one of them hears it, and however short the steps are."""
    waited = set()
    for offset in range(40):
        agreement = Agreement(Peers(), clock=Ticking(0.001))
        assert not any(agreement.at_exit_point(False) for _ in range(200))
        if alerted:
            agreement.alert()
            assert not any(agreement.at_exit_point(False) for _ in range(33))
        assert not any(agreement.at_exit_point(False) for _ in range(offset))
        waited.add(next(passed for passed in itertools.count(1) if agreement.at_exit_point(True)))
    assert max(waited) <= most
    assert (len(waited) == 1) == alerted


def test_the_alert_of_one_rank_hastens_all() -> None:
    told = iter([(0, 30), (1, 30), *[(0, 30)] * 100])
    peers = Peers(answers=lambda _known, _interval: next(told))
    agreement = Agreement(peers, clock=Ticking(0.001))
    for _ in range(40):
        agreement.at_exit_point(False)
    assert len(peers.rounds) > 8


def test_a_rank_that_heard_nothing_leaves_with_the_others(place: Place) -> None:
    peers = Peers(answers=lambda _known, interval: (2, interval))
    rank = rank_with(place, Agreement(peers))
    rank.at_exit_point("optimizer_step", 0)
    with pytest.raises(StopTraining, match="another rank"):
        rank.at_exit_point("optimizer_step", 1)
    rank.close()


def test_rounds_become_rare_where_steps_are_short() -> None:
    peers = Peers()
    agreement = Agreement(peers, clock=Ticking(0.001))
    for _ in range(1_000):
        assert not agreement.at_exit_point(False)
    assert agreement.broken is None
    assert len(peers.rounds) < 60


def test_ranks_that_do_not_step_alike_leave_at_their_own_exit_points(place: Place) -> None:
    peers = Peers(ready=False)
    rank = rank_with(place, Agreement(peers, clock=Ticking(0.3)))
    rank.at_exit_point("optimizer_step", 0)
    rank.at_exit_point("optimizer_step", 1)
    (degraded,) = place.of(CaptureDegraded)
    assert isinstance(degraded, CaptureDegraded)
    assert "do not step alike" in degraded.reason
    rank.at_exit_point("optimizer_step", 2)
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    with pytest.raises(StopTraining):
        rank.at_exit_point("optimizer_step", 3)
    assert len(peers.rounds) == 1
    rank.close()


@dataclass
class Wire:
    """One group of two ranks: the n-th thing of the one is taken together with the n-th of the
    other, whatever these are."""

    begun: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {0: [], 1: []})

    def of(self, rank: int) -> Member:
        return Member(self, rank)


@dataclass
class Member:
    wire: Wire
    rank: int

    def start(self, known: int, interval: int) -> Pair:
        mine = self.wire.begun[self.rank]
        mine.append((known, interval))
        return Pair(self.wire, len(mine) - 1)


@dataclass
class Pair:
    wire: Wire
    number: int

    def done(self) -> bool:
        return all(len(begun) > self.number for begun in self.wire.begun.values())

    def result(self) -> tuple[int, int]:
        first, second = (begun[self.number] for begun in self.wire.begun.values())
        return max(first[0], second[0]), max(first[1], second[1])

    def abandon(self) -> None: ...


def voters() -> tuple[Wire, Agreement, Agreement]:
    wire = Wire()
    first, second = (
        Agreement(wire.of(rank), votes=wire.of(rank), clock=Ticking(1.0)) for rank in (0, 1)
    )
    return wire, first, second


def test_a_late_rank_does_not_take_a_round_for_a_vote() -> None:
    """It would leave alone: the other one has given the vote up, and made its update."""
    wire, first, late = voters()
    assert first.vote(1) is None
    first.at_exit_point(False)
    assert late.vote(0) == 1
    assert late.vote(0) is None
    assert wire.begun[0] == [(1, 0)]
    for agreement in (first, late):
        assert agreement.broken == "the ranks do not make the same updates"
        assert not agreement.at_exit_point(False)
        assert agreement.unpaired


def test_a_vote_that_meets_a_round_is_none() -> None:
    _, first, second = voters()
    second.at_exit_point(False)
    assert first.vote(0) is None
    assert first.unpaired


def test_the_next_training_does_not_use_a_group_whose_ranks_did_not_do_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire()
    monkeypatch.setattr(side_group, "_agreement", None)
    monkeypatch.setattr(side_group, "_collective", wire.of(0))
    monkeypatch.setattr(side_group, "_votes", wire.of(0))
    monkeypatch.setattr(rank_agreement, "STOP_PATIENCE_S", 0.0)
    assert side_group.current() is not None
    assert (agreement := side_group.current()) is not None
    assert agreement.vote(1) is None
    assert side_group.current() is None


def test_a_rank_that_heard_does_not_wait_for_ever(place: Place) -> None:
    peers = Peers(ready=False)
    rank = rank_with(place, Agreement(peers, clock=Ticking(1.0)))
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    rank.at_exit_point("optimizer_step", 0)
    with pytest.raises(StopTraining):
        rank.at_exit_point("optimizer_step", 1)
    rank.close()


def test_a_broken_group_ends_the_agreement(place: Place) -> None:
    def broken(_heard: int, _interval: int) -> tuple[int, int]:
        raise RuntimeError("Connection closed by peer")

    rank = rank_with(place, Agreement(Peers(answers=broken)))
    rank.at_exit_point("optimizer_step", 0)
    (degraded,) = place.of(CaptureDegraded)
    assert isinstance(degraded, CaptureDegraded)
    assert "Connection closed" in degraded.reason
    assert not rank.awake
    rank.close()


def test_the_end_takes_the_last_round_to_its_end_or_keeps_it() -> None:
    for ready, abandoned in ((True, 0), (False, 1)):
        peers = Peers(ready=ready)
        agreement = Agreement(peers, clock=Ticking(0.3))
        agreement.at_exit_point(False)
        agreement.close()
        agreement.close()
        assert peers.abandoned == abandoned
        assert not agreement.at_exit_point(True)


def test_a_round_that_was_given_up_keeps_its_tensor_for_itself() -> None:
    under_way: list[torch.Tensor] = []

    class Late:
        def is_completed(self) -> bool:
            return False

    class Group:
        def allreduce(self, tensors: list[torch.Tensor], options: object) -> Late:
            under_way.append(tensors[0])
            return Late()

    collective = GlooCollective(dist, cast(dist.ProcessGroup, Group()))
    first = Agreement(collective, clock=Ticking(0.3))
    first.at_exit_point(False)
    first.close()
    second = Agreement(collective, clock=Ticking(0.3))
    second.at_exit_point(True)
    # The rank that was late comes, with an old maximum.
    under_way[0].fill_(0)
    assert under_way[1].tolist() == [2, 1]


def test_a_rank_whose_group_was_destroyed_leaves_alone(place: Place) -> None:
    agreement = Agreement(Peers())
    rank = rank_with(place, agreement)
    rank.at_exit_point("optimizer_step", 0)
    agreement.close()
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    with pytest.raises(StopTraining):
        rank.at_exit_point("optimizer_step", 1)
    assert place.of(CaptureDegraded) == []
    rank.close()


def test_an_evaluation_batch_is_no_edge_of_a_group_at_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_with(place, Agreement(Peers()))
    rank.receive(place.signer.sign(place.signer.command("r1", "i1")))
    rank.at_exit_point("evaluation", 5)
    monkeypatch.setattr(rank_module, "EVALUATION_EXIT_WAIT_S", 0.0)
    with pytest.raises(StopTraining):
        rank.at_exit_point("evaluation", 5)
    rank.close()


def test_the_listening_thread_takes_no_signal_from_the_script(place: Place) -> None:
    before = signal.getsignal(signal.SIGTERM)
    start(place)
    assert signal.getsignal(signal.SIGTERM) is before
    assert all(each.daemon for each in threading.enumerate() if each.name.startswith("tocsin"))
