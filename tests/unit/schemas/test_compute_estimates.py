"""What is left of a training, with its inputs or with the reason why it is not known."""

from __future__ import annotations

import pytest

from tocsin.schemas.compute_estimates import left_of
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.goodput import Outlook
from tocsin.schemas.records.run_view import RunView

NOW_MS = 1_795_258_000_000
H100 = {"NVIDIA H100 80GB HBM3": 8}
PRICES = PricesConfig(
    currency="EUR", per_hour={"h100": 2.5, "H100 80GB": 2.0, "A100": 1.0}, cpu=0.5
)


def view(outlook: Outlook | None, *, devices: dict[str, int] = H100, **more: object) -> RunView:
    return RunView(
        run_id="r1",
        incarnation="i1",
        state="running",
        last_step=999,
        devices=devices,
        outlook=outlook,
        **more,  # type: ignore[arg-type]
    )


def test_planned_steps_that_are_left() -> None:
    plan = Outlook(total_steps=10_000, done_steps=3_000, step_s=1.2)

    left = left_of(view(plan), NOW_MS, PRICES)

    assert left.device_hours == pytest.approx(8 * 6_000 * 1.2 / 3600)
    assert left.text == (
        "an estimated 16 GPU-hours (8 x H100 80GB HBM3, 6,000 of 10,000 steps left at 1.2 s each), "
        "about 32 EUR"
    )
    assert left.facts["unit"] == "GPU-hours"
    assert left.facts["cost"] == pytest.approx(32)


def test_the_time_limit_counts_if_it_ends_the_job_before() -> None:
    plan = Outlook(total_steps=1_000_000, step_s=2.0, ends_by_ms=NOW_MS + 95_400_000)

    left = left_of(view(plan, devices={"A100-SXM4": 2, "Gaudi": 1}), NOW_MS, PRICES)

    assert left.text == (
        "an estimated 79.5 GPU-hours (2 x A100-SXM4 + 1 x Gaudi, 26.5 h of its time limit left)"
    )
    assert left.cost is None  # one device has no price


def test_a_training_on_the_cpu_has_rank_hours() -> None:
    plan = Outlook(total_steps=4_600, step_s=1.0)

    left = left_of(view(plan, devices={}, world_size=2), NOW_MS, PRICES)

    assert left.text == (
        "an estimated 2 rank-hours (2 ranks on the CPU, 3,600 of 4,600 steps left at 1 s each), "
        "about 1 EUR"
    )


@pytest.mark.parametrize(
    ("outlook", "why"),
    [
        (None, "neither the planned steps nor a time limit of the job are known"),
        (Outlook(step_s=1.0), "neither the planned steps nor a time limit of the job are known"),
        (Outlook(total_steps=2_000), "1,000 of 2,000 steps are left, but none was timed yet"),
    ],
)
def test_what_is_not_known_has_a_reason(outlook: Outlook | None, why: str) -> None:
    left = left_of(view(outlook), NOW_MS, PRICES)

    assert (left.device_hours, left.cost) == (None, None)
    assert left.text == f"not known: {why}"


def test_nothing_is_left_after_the_last_step() -> None:
    plan = Outlook(total_steps=900, step_s=1.0, ends_by_ms=NOW_MS - 1)

    assert left_of(view(plan), NOW_MS, PRICES).device_hours == 0


def test_prices_are_configured() -> None:
    config, problems = check_config("version: 1\nprices: {per_hour: {H100: 2.5}, cpu: 0.1}\n", "f")
    assert problems == []
    assert config is not None
    assert config.prices.device_price("NVIDIA H100 PCIe") == 2.5
    assert config.prices.device_price("other") is None

    _, problems = check_config("version: 1\nprices: {per_hour: {H100: -1}, cpus: 1}\n", "f")

    assert len(problems) == 2
