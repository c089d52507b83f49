from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from support.issue_records import NOW_MS, issue
from tocsin.actions.receivers.message import message_of
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Series, Subject
from tocsin.schemas.records.runs import Checkpoint


def full(*, resolved: bool = False) -> IssueFiring:
    """An issue with everything that one can have."""
    return issue(resolved=resolved).model_copy(
        update={
            "reason": "NaN in 12 of 1,769,472 gradients of blocks.3.qkv.weight on rank 1",
            "subject": Subject(kind="tensor", name="blocks.3.qkv.weight", collection="gradients"),
            "first_step": 1200,
            "first_rank": 1,
            "onset_ms": NOW_MS - 50,
            "remedy": "Lower the learning rate.",
            "labels": {"team": "vision", "env": "prod"},
            "last_good_checkpoint": Checkpoint(path="/data/step-1000.pt", step=1000),
            "evidence": Evidence(
                facts=(
                    Fact(name="nans", value=12.0),
                    Fact(name="ratio", value=41.25, limit=20.0),
                    Fact(name="dead_units", value=55.0, limit=50.0, unit="percent"),
                ),
                series=Series(
                    name="loss",
                    steps=tuple(range(1181, 1201)),
                    values=(*(2.5 + i / 7 for i in range(19)), math.nan),
                    limit=20.0,
                ),
                followed=7,
                also=("blocks.2.qkv.weight", "blocks.1.qkv.weight"),
                explanation="the first in backward order",
            ),
        }
    )


def test_the_last_notice_says_so() -> None:
    last = full().model_copy(update={"last_notice": True})
    label = "Last notice:"
    assert label in message_of(last).text()
    assert label not in message_of(full()).text()


def test_the_message_says_everything_in_plain_text() -> None:
    text = message_of(full(), ["It asked the run to stop."]).text()

    lines = text.splitlines()
    assert lines[0].startswith("CRITICAL: NaN in 12 of 1,769,472 gradients")
    for said in (
        "gradients of blocks.3.qkv.weight, rank 1, step 1,200",
        "2026-11-21",
        "nans 12; ratio 41.25 (limit 20); dead units 55 % (limit 50 %)",
        "NaN (step 1,200); limit 20",
        "blocks.2.qkv.weight, blocks.1.qkv.weight and 5 more",
        "the first in backward order",
        "/data/step-1000.pt (step 1,000), the newest from before the onset",
        "It asked the run to stop.",
        "Lower the learning rate.",
        "team=vision, env=prod",
        "run-1",
        "nonfinite, critical",
    ):
        assert said in text, said
    assert text.isascii()


def test_all_states_have_the_same_subject_and_titles_of_their_own() -> None:
    fires, over = message_of(full()), message_of(full(resolved=True))
    assert fires.subject == over.subject == "[tocsin] nonfinite in run-1 at step 1,200"
    assert fires.title == "critical: nonfinite in run-1 at step 1,200"
    assert over.title == "resolved: nonfinite in run-1 at step 1,200"
    assert over.text().startswith("RESOLVED: Over: NaN in 12")
    assert "What to try" not in over.text()
    worse = message_of(issue(raised_from="warning"))
    assert worse.title == "now critical: nonfinite in run-1 at step 3"
    assert worse.text().startswith("CRITICAL: Worse than before: NaN in the loss")


def test_an_issue_with_nothing_but_its_name_is_enough() -> None:
    bare = issue().model_copy(update={"reason": "", "first_step": None, "at_ms": 0})
    assert message_of(bare).text().startswith("CRITICAL: nonfinite fired\n")


@given(st.text(max_size=200), st.text(min_size=1, max_size=50), st.text(max_size=50))
def test_no_text_of_a_run_breaks_a_line(reason: str, name: str, label: str) -> None:
    made = IssueFiring.model_validate(
        {
            **full().model_dump(),
            "reason": reason,
            "subject": {"kind": "layer", "name": name},
            "labels": {"k": label},
            "remedy": reason,
        }
    )
    message = message_of(made, [label])
    for text in (
        message.subject,
        message.title,
        message.headline,
        *(row.value for row in message.rows),
        *(row.label for row in message.rows),
    ):
        assert text.splitlines() in ([text], []), repr(text)
        assert not set("\u202e\u200b\x1b\x00") & set(text)
