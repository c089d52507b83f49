"""`check_input_images` and `nlp_sequence_ratio` on made counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from pydantic import ValidationError

from support.records.counted import add, as_sagemaker
from tocsin.stream_rules.rules.data.nlp_sequence_ratio import (
    NlpSequenceRatio,
    NlpSequenceRatioParams,
)
from tocsin.stream_rules.testing import RunBuilder, assert_fires, issues_of, only

IMAGES = only("check_input_images")
TOKENS = only("nlp_sequence_ratio")


def images(
    looks: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    values: int = 5000,
    name: str = "input",
) -> RunBuilder:
    """A run whose inputs have such means and spreads by channel, each 100 steps."""
    run = RunBuilder()
    run.started()
    for i, (mean, std) in enumerate(looks):
        run.steps([100 * i], loss=1.0)
        n = len(mean)
        add(
            run,
            100 * i,
            "input_channels",
            [f"{name}.{c}" for c in range(n)],
            {"mean": mean, "std": std, "min": [0.0] * n, "max": [1.0] * n},
            {"numel": [values] * n, "nonfinite": [0] * n},
        )
    return run


NORMAL = ([0.01, -0.05, 0.02], [0.9, 1.1, 1.0])


def test_pixels_that_are_not_centred() -> None:
    run = images([([0.49, 0.45, 0.1], [0.25, 0.24, 0.26])])
    issue = assert_fires(run.records, "check_input_images", first_step=0, specs=IMAGES)
    assert (issue.branch, issue.severity, issue.subject.name) == ("mean", "info", "input.0")
    assert issue.evidence.followed == 1


def test_pixels_of_whole_bytes() -> None:
    run = images([([120.0, 115.0, 100.0], [70.0, 65.0, 72.0])])
    issue = assert_fires(run.records, "check_input_images", specs=IMAGES)
    assert issue.branch == "scale"


def test_one_batch_with_a_nan_does_not_silence_it() -> None:
    run = images([([float("nan")], [0.25]), ([0.49], [0.25])])
    assert assert_fires(run.records, "check_input_images", specs=IMAGES).first_step == 100


def test_it_is_over_once_they_are_normalised() -> None:
    found = issues_of(
        images([([0.3], [0.25]), ([0.0], [1.0])]).records, "check_input_images", specs=IMAGES
    )
    assert [i.state for i in found] == ["firing", "resolved"]


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(images([NORMAL] * 3), id="normalised"),
        pytest.param(images([([0.9], [0.1])], values=400), id="too few values"),
        pytest.param(images([([0.13], [0.31])] * 3), id="digits from 0 to 1"),
        pytest.param(images([([0.0, 0.0], [1.0, 0.0])] * 3), id="a channel of zeros"),
        pytest.param(images([([3.0] * 8, [9.0] * 8)] * 3), id="features, no image"),
    ],
)
def test_images_left_alone(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=IMAGES) == []


def test_the_reference_looks_at_the_mean_alone() -> None:
    wide = images([([0.1], [70.0])])
    assert issues_of(wide.records, specs=as_sagemaker("check_input_images")) == []
    assert len(issues_of(wide.records, specs=IMAGES)) == 1


def text(
    shares: Sequence[Mapping[str, int]], *, labels: bool = False, rows: int | None = None
) -> RunBuilder:
    """A run whose tokens have such counts, each 100 steps."""
    run = RunBuilder()
    run.started()
    if rows is not None:
        add(run, 1, "embeddings", ["table"], counts={"numel": [rows]})
    for i, counts in enumerate(shares, 1):
        run.steps([100 * i], loss=1.0)
        numbers = list(counts.values())
        share = [n / max(1, sum(numbers)) for n in numbers]
        if labels:
            add(run, 100 * i, "labels", list(counts), counts={"labels": numbers})
        else:
            add(run, 100 * i, "tokens", list(counts), {"share": share}, {"count": numbers})
    return run


PADDED = {"0": 700, "17": 40, "5": 20, "other": 240}
PLAIN = {"17": 60, "5": 40, "other": 900}


def test_a_text_that_is_mostly_padding() -> None:
    found = issues_of(text([PADDED, PLAIN, PLAIN]).records, specs=TOKENS)
    assert [(i.state, i.severity, i.subject.name) for i in found] == [
        ("firing", "info", "token 0"),
        ("resolved", "info", "token 0"),
    ]
    assert found[0].reason.startswith("token 0 is 70 % of the text")


def test_texts_of_few_tokens_are_added_up_until_they_are_enough() -> None:
    (issue,) = issues_of(text([{"0": 9, "1": 1}] * 150).records, specs=TOKENS)
    assert issue.subject.name == "token 0"


def test_each_listed_token_has_its_limit() -> None:
    specs = only("nlp_sequence_ratio", token_values=[17, 5], token_thresholds_percent=[50.0, 2.5])
    (issue,) = issues_of(text([PLAIN] * 3).records, specs=specs)
    assert issue.subject.name == "token 5"


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(text([PLAIN] * 5), id="plain text"),
        pytest.param(text([{"0": 520, "1": 480}]), id="not surely half"),
        pytest.param(text([{"0": 300, "1": 10}]), id="few tokens"),
        pytest.param(text([{"0": 900, "1": 100}], labels=True), id="classes"),
        pytest.param(text([{"5": 10, "other": 990}]), id="the rest is no token"),
    ],
)
def test_texts_left_alone(run: RunBuilder) -> None:
    assert issues_of(run.records, specs=TOKENS) == []


def test_a_small_vocabulary_comes_as_labels() -> None:
    run = text([{"0": 900, "1": 100}], labels=True, rows=2)
    assert_fires(run.records, "nlp_sequence_ratio", specs=TOKENS)


def test_the_reference_looks_at_token_0() -> None:
    other = text([{"3": 900, "1": 100}])
    assert issues_of(other.records, specs=as_sagemaker("nlp_sequence_ratio")) == []
    assert (
        len(issues_of(text([{"0": 6, "1": 4}]).records, specs=as_sagemaker("nlp_sequence_ratio")))
        == 1
    )


def test_one_limit_for_each_token_or_one_for_all() -> None:
    params = NlpSequenceRatioParams(token_values=(0, 1, 2))
    assert params.token_thresholds_percent == (50.0,)
    with pytest.raises(ValidationError, match="expected one for each"):
        NlpSequenceRatio.meta.params.model_validate(
            {"token_values": [0, 1, 2], "token_thresholds_percent": [50.0, 20.0]}
        )
