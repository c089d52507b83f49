from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from support.actions.notices import notice
from support.records.issues import NOW_MS, issue
from tocsin.actions.delivery.answer_links import AnswerLinks
from tocsin.actions.delivery.receiver_queues import Notice
from tocsin.actions.receivers.chat.sender import body_of
from tocsin.actions.receivers.message import message_for, message_of
from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.schemas.records.issues import Evidence, Fact, IssueFiring, Series, Subject


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


def group(*issues: IssueFiring, occasion: str = "new") -> Notice:
    """A notice about several issues, the last one as the one that came due."""
    notices = [notice(one) for one in issues]
    *others, last = (
        one.delivery.model_copy(update={"occasion": occasion, "decided_by": "tocsin.yaml:14:3"})
        for one in notices
    )
    return Notice(last, NOW_MS, ("It asked the run to stop.",), others=others)


def test_a_message_says_how_to_answer_by_command_or_by_link() -> None:
    def rows(given: Notice) -> dict[str, str]:
        return {row.label: row.value for row in message_for(given).rows}

    told = notice(issue("gpt-1"))
    short = issue("gpt-1").short_id
    assert rows(told)["To answer"] == (
        f"tocsin ack {short} (or resolve, false-alarm); "
        "tocsin silence add run=gpt-1 rule=nonfinite --for 2h --why known"
    )
    assert f"To answer: tocsin ack {short}" in body_of(message_for(told))
    linked = replace(told, answer_url=lambda delivery: "https://tocsin.example.com/answer/x")
    drill = replace(told, delivery=told.delivery.model_copy(update={"occasion": "drill"}))
    for other in (linked, drill, notice(issue("gpt-1", resolved=True))):
        assert "To answer" not in rows(other)


def test_a_message_links_the_page_of_its_issue() -> None:
    links = AnswerLinks(page_url="https://runs.example.com")
    told = replace(notice(issue()), page_url=links.page)
    page = f"https://runs.example.com/issues/{issue().issue_id}"
    assert f"\n{'Page:':<18}{page}\n" in message_for(told).text()
    drill = told.delivery.model_copy(update={"occasion": "drill"})
    for other in (notice(issue()), replace(told, delivery=drill)):
        assert "Page:" not in message_for(other).text()


def test_a_message_of_several_issues_hides_none_of_them() -> None:
    spike = issue(rule="loss_spike", severity="warning").model_copy(
        update={"evidence": Evidence(facts=(Fact(name="loss", value=7.1, limit=5.0),))}
    )
    followed = issue(rule="overfit").model_copy(update={"consequence_of": issue().issue_id})
    message = message_for(group(full(), followed, spike))

    assert message.subject == "[tocsin] 3 issues in run-1, the most severe: nonfinite at step 1,200"
    assert message.title == "critical: 3 issues in run-1, the most severe: nonfinite at step 1,200"
    assert message.headline.startswith("3 issues, the most severe: NaN in 12 of")
    assert message.issue_id == issue().issue_id
    text = message.text()
    assert "overfit: NaN in the loss at step 1; loss" in text
    assert f"step 3; issue {followed.short_id}" in text
    assert "loss_spike: NaN in the loss" in text
    assert "loss 7.1 (limit 5)" in text
    assert "Also warning:" in text
    assert text.splitlines()[-1] == "Why sent:         a new issue; decided by tocsin.yaml:14:3"


def test_a_chat_message_names_some_issues_and_counts_the_others() -> None:
    body = body_of(message_for(group(*(issue(episode=str(one)) for one in range(9)))))
    assert body.startswith("9 issues, the most severe: ")
    assert body.count("Also critical: ") == 5
    assert "and 3 more: tocsin issues" in body
    assert "Why sent: a new issue" in body


def test_a_message_of_issues_of_several_runs_names_each() -> None:
    message = message_for(group(issue(), issue(run="run-2", resolved=False)))
    assert message.subject == "[tocsin] 2 issues in 2 runs, the most severe: nonfinite at step 3"
    assert "run run-2" in message.text() or message.run_id == "run-2"


def test_a_message_says_why_it_is_sent() -> None:
    for occasion, words in (
        ("worse", "the issue is worse than before; decided by"),
        ("repeat", "repeat 0: nobody has acknowledged or resolved it; decided by"),
        ("drill", "drill; decided by"),
    ):
        assert words in message_for(group(issue(), occasion=occasion)).text()
    assert "Why sent" not in message_for(notice(issue())).text()


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
