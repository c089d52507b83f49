"""The rules on data and on large models, on recorded trainings that show each branch."""

from __future__ import annotations

import pytest

from fixtures.runs.judgement import judge
from fixtures.runs.recorded import Request
from tocsin.stream_rules.engine.configured_rules import RuleSpec
from tocsin.stream_rules.rules.data.registry import RULES as DATA
from tocsin.stream_rules.rules.large_models.registry import RULES as LARGE_MODELS
from tocsin.stream_rules.testing import only

MINE = (
    "class_imbalance",
    "confusion",
    "check_input_images",
    "nlp_sequence_ratio",
    "attention_logit_growth",
    "logit_drift",
    "moe_imbalance",
    "embedding_norm_growth",
)
SPECS: tuple[RuleSpec, ...] = tuple(spec for name in MINE for spec in only(name))


def said(program: str, fault: str | None = None, seed: int = 0) -> list[tuple[str, str, str]]:
    issues = judge(Request(program, fault, seed), SPECS).issues
    return [(issue.use, issue.branch, issue.severity) for issue in issues]


def test_these_are_rules_of_the_two_families() -> None:
    known = {rule.meta.name for rule in (*DATA, *LARGE_MODELS)}
    assert known.issuperset(MINE)


def test_labels_of_one_class_are_told_within_twenty_steps() -> None:
    (issue,) = judge(Request("mlp", "one_class"), SPECS).issues
    assert (issue.branch, issue.severity, issue.step) == ("one_class", "warning", 20)


@pytest.mark.torture
@pytest.mark.parametrize(
    ("program", "fault", "expected"),
    [
        ("cnn", "one_class", ("class_imbalance", "one_class", "warning")),
        ("mlp", "rare_classes", ("class_imbalance", "imbalance", "info")),
        ("mlp", "two_classes_mixed_up", ("confusion", "off_diagonal", "info")),
        ("gpt", "mostly_padding", ("nlp_sequence_ratio", "", "info")),
        ("cnn", "pixels_as_they_are", ("check_input_images", "mean", "info")),
        ("gpt", "sharp_attention", ("attention_logit_growth", "limit", "warning")),
        ("gpt", "logits_pushed_up", ("logit_drift", "limit", "info")),
        ("moe", "router_of_one_expert", ("moe_imbalance", "overload", "warning")),
        ("moe", "an_expert_that_is_never_chosen", ("moe_imbalance", "dead_expert", "info")),
        ("lstm", "one_long_row", ("embedding_norm_growth", "ratio", "info")),
        ("lstm", "an_embedding_that_grows", ("embedding_norm_growth", "growth", "info")),
    ],
)
def test_each_condition_shows_in_a_real_training(
    program: str, fault: str, expected: tuple[str, str, str]
) -> None:
    assert expected in said(program, fault)


@pytest.mark.torture
@pytest.mark.parametrize(
    "program",
    ["mlp", "cnn", "lstm", "gpt", "moe", "autoencoder", "gan", "factorisation", "contrastive"],
)
def test_healthy_trainings_are_left_alone(program: str) -> None:
    assert said(program) == []
