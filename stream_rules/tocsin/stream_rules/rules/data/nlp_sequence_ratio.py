"""`nlp_sequence_ratio`: one token is too large a share of the text.

The training process counts tokens, in samples: those that you name (`run.data(tokens=ids)`),
otherwise the targets of a cross-entropy over more than 1,000 classes, without those that the loss
ignores. Over the last `samples` tokens, no token in `token_values` may exceed its limit in
`token_thresholds_percent` (Wilson's lower bound). If `token_values` is empty, the first limit
applies to every token.

The labels of a model whose embedding has as many rows as there are classes are tokens, too.
SageMaker Debugger checks token 0, commonly the padding, with a limit of 50 %. Any token that makes
up half of a text is unusual, so this rule checks all tokens. An info: padded targets waste compute
and dominate the loss, but training still works.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from pydantic import Field, model_validator

from tocsin.schemas.records.frames import TensorFrame
from tocsin.schemas.records.issues import Subject
from tocsin.stream_rules.outcomes import Clear, Finding, Moment, Outcomes, fact
from tocsin.stream_rules.reading.rank_series import PointHistory
from tocsin.stream_rules.rule import Params, RuleMeta, tensors
from tocsin.stream_rules.rule_bases import RowState, TensorRowRule
from tocsin.stream_rules.signals.proportion_bounds import at_least
from tocsin.stream_rules.signals.vocabulary import Vocabulary

_MAX_SUMMARIES: Final = 64
"""Summaries, or pairs of them, that are kept apart at most."""

_COUNT: Final = {"tokens": "count", "labels": "labels"}
"""The column of the counts, by collection."""


class NlpSequenceRatioParams(Params):
    """Parameters of `nlp_sequence_ratio`."""

    token_values: tuple[int, ...] = Field(default=(), max_length=64, strict=False)
    """Ids of the tokens to watch; none: all. Unit: token ids."""
    token_thresholds_percent: tuple[float, ...] = Field(
        default=(50.0,), min_length=1, max_length=64, strict=False
    )
    """Largest share of the text for each, in the order of `token_values`; one value applies to all.
    Unit: percent."""
    samples: int = Field(default=1000, ge=1)
    """Number of tokens before the rule decides. Unit: tokens."""
    certainty: float = Field(default=3.0, ge=0)
    """Certainty that the sample must give. Unit: standard deviations."""

    @model_validator(mode="after")
    def _one_limit_each(self) -> Self:
        limits = len(self.token_thresholds_percent)
        if limits not in (1, len(self.token_values)):
            raise ValueError(
                f"{limits} thresholds for {len(self.token_values)} tokens: expected one for each, "
                "or one for all"
            )
        return self


@dataclass(slots=True)
class _State(RowState):
    rank: int | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    counted: list[dict[str, float]] = field(default_factory=list)
    since: dict[str, int] = field(default_factory=dict)
    worst: PointHistory = field(default_factory=PointHistory)


class NlpSequenceRatio(TensorRowRule[NlpSequenceRatioParams, _State]):
    """An episode for each token."""

    meta = RuleMeta(
        name="nlp_sequence_ratio",
        version=1,
        family="data",
        meaning="One token, such as padding or the unknown word, is too large a share of the text.",
        severity="info",
        available="maybe",
        inputs=(
            tensors("tokens"),
            tensors("labels", optional=True),
            tensors("embeddings", optional=True),
        ),
        capture_hint="the targets of a cross-entropy over more than 1,000 classes are counted as "
        "tokens; otherwise name them with run.data(tokens=ids)",
        remedy="Batch texts of similar length, let the loss ignore the padding (ignore_index), and "
        "check the tokenizer if it is the unknown token.",
        alias="NLPSequenceRatio",
        presets={
            "sagemaker": {
                "token_values": [0],
                "token_thresholds_percent": [50.0],
                "samples": 1,
                "certainty": 0.0,
            }
        },
        does_not_see="Tokens of an encoder that are neither targets nor named; padding that the "
        "loss ignores.",
        params=NlpSequenceRatioParams,
        resolve_after_steps=0,
    )
    state_type = _State
    by_part = False

    def on_tensors(self, frame: TensorFrame, at: Moment) -> Outcomes:
        vocabulary = self.state.vocabulary
        if frame.collection == "embeddings":
            vocabulary.learn(frame)
            return ()
        if frame.collection == "labels" and not vocabulary.holds(len(frame.rows)):
            return ()
        return super().on_tensors(frame, at)

    def on_table(self, table: TensorFrame, at: Moment) -> Outcomes:
        state, counts = self.state, table.count(_COUNT[table.collection])
        if counts is None:
            return
        state.rank = table.origin.rank
        state.counted.append(dict(zip(table.rows, map(float, counts.tolist()), strict=True)))
        held = [sum(counts.values()) for counts in state.counted]
        while sum(held[1:]) >= self.params.samples:
            del held[0], state.counted[0]
        if len(held) > _MAX_SUMMARIES:
            state.counted[1:] = map(_together, state.counted[1::2], state.counted[2::2])
        total = sum(held)
        if total >= self.params.samples:
            yield from self._evaluate(total, table.step)

    def _evaluate(self, total: float, step: int) -> Outcomes:
        state, params = self.state, self.params
        limits = params.token_thresholds_percent
        if params.token_values:
            each = limits * (len(params.token_values) // len(limits))
            watched = {str(v): limit for v, limit in zip(params.token_values, each, strict=True)}
        else:
            watched = {name: limits[0] for table in state.counted for name in table}
            watched.pop("other", None)
        names = list(watched)
        counts = np.array([sum(t.get(name, 0.0) for t in state.counted) for name in names])
        allowed = np.array([watched[name] for name in names])
        surely = 100 * at_least(counts, np.full(len(names), total), params.certainty)
        state.worst.append(step, 100 * float(counts.max(initial=0)) / total)
        over = {names[i] for i in np.flatnonzero(surely > allowed)}
        for name in [name for name in state.since if name not in over]:
            del state.since[name]
            yield Clear(step, about=name)
        for name, count in zip(names, counts.tolist(), strict=True):
            if name in over:
                state.since.setdefault(name, step)
                yield self._finding(name, count, total, watched[name])

    def _finding(self, name: str, count: float, total: float, limit: float) -> Finding:
        state, percent = self.state, 100 * count / total
        return Finding(
            about=name,
            subject=Subject(kind="tensor", name=f"token {name}", collection="tokens"),
            reason=f"token {name} is {percent:.0f} % of the text, of {total:,.0f} tokens in a "
            "sample",
            first_step=state.since[name],
            first_rank=state.rank,
            facts=(
                fact("share", percent, limit=limit, unit="percent"),
                fact("tokens_seen", total),
            ),
            series=state.worst.series(
                "share of the most frequent token that is watched", unit="percent", limit=limit
            ),
        )


def _together(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in first | second}
