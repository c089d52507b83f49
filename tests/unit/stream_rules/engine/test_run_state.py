"""What a run's state answers to rules, with as many ranks as there may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tocsin.stream_rules.engine.partitions import PartitionEngine
from tocsin.stream_rules.engine.run_state import RankState, RunState
from tocsin.stream_rules.reading.state_codec import dump_state, load_state
from tocsin.stream_rules.testing import RunBuilder

CHANGES = st.lists(
    st.tuples(
        st.integers(0, 5),  # rank
        st.integers(0, 4),  # its last step from now on
        st.booleans(),  # whether it ends then
        st.integers(0, 5),  # the step that is asked for
    ),
    max_size=60,
)


@given(CHANGES, st.integers(1, 6))
def test_a_step_is_reported_once_each_rank_has_made_it_or_has_ended(
    changes: list[tuple[int, int, bool, int]], world_size: int
) -> None:
    state = RunState(run_id="r", world_size=world_size)
    for number, last_step, ends, asked in changes:
        rank = state.ranks.setdefault(number, RankState())
        rank.last_step = last_step
        rank.outcome = "completed" if ends else rank.outcome
        assert state.all_reported(asked) == (
            len(state.ranks) >= world_size
            and all(
                r.outcome is not None or (r.last_step or 0) >= asked for r in state.ranks.values()
            )
        )


def test_of_thousands_of_ranks_who_lags_is_asked_first() -> None:
    class Asked(RankState):
        times = 0

        def reported(self, step: int) -> bool:
            Asked.times += 1
            return super().reported(step)

    ranks = 1_000
    state = RunState(run_id="r", world_size=ranks)
    state.ranks = {number: Asked(last_step=6) for number in range(ranks)}
    for number in range(ranks):
        assert not state.all_reported(7)
        state.ranks[number].last_step = 7
    assert state.all_reported(7)
    assert Asked.times <= 4 * ranks


def test_who_lags_is_no_part_of_what_is_saved() -> None:
    state = RunState(run_id="r", world_size=2)
    state.ranks = {0: RankState(last_step=7), 1: RankState(last_step=6)}
    assert not state.all_reported(7)
    assert state.lagging == 1
    saved = dump_state(state)
    assert b"lagging" not in saved
    assert load_state(RunState, saved).lagging == 0


def test_the_steps_of_what_the_user_logs_are_not_those_of_the_training() -> None:
    run = RunBuilder()
    run.started()
    run.steps([20_000], columns={"log.accuracy": 0.5})
    before = len(run.records)
    run.steps([0, 1], loss=1.0)
    run.steps([20_001], columns={"log.accuracy": 0.5})
    engine = PartitionEngine(())
    for record in run.records[:before]:
        engine.apply(record)
    found = engine.run(run.run_id)
    assert found is not None
    assert found.state.last_step == 20_000, "there are no others"
    for record in run.records[before:]:
        engine.apply(record)
    assert (found.state.last_step, found.state.rank_last_step(0)) == (1, 1)
