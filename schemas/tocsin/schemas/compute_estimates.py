"""Estimates of compute: what is left of a training, and so what a stop saves. Pure.

An estimate always comes with its inputs, and where it cannot be made with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tocsin.schemas.configuration.sections import PricesConfig
from tocsin.schemas.records.run_view import RunView
from tocsin.schemas.text import plain_line

_HOUR_S: Final = 3600.0

NO_PRICES: Final = PricesConfig()
"""No device has a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """So many hours of so many devices, or why it is not known.

    Attributes:
        devices: accelerators, name -> how many; none: `ranks` train on the CPU.
        hours: None: not known.
        how: how the hours were found, or why they are not known.
        cost: None where a device has no price.
    """

    devices: Mapping[str, int]
    ranks: int
    hours: float | None
    how: str
    cost: float | None = None
    currency: str = ""

    @property
    def unit(self) -> str:
        """`GPU-hours`, or `rank-hours` of a training on the CPU."""
        return "GPU-hours" if self.devices else "rank-hours"

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together; None: not known."""
        return None if self.hours is None else self.hours * self._count

    @property
    def text(self) -> str:
        """`an estimated 212 GPU-hours (8 x H100, 26.5 h of its time limit left), about 530 USD`."""
        if self.hours is None:
            return f"not known: {self.how}"
        cost = "" if self.cost is None else f", about {_rounded(self.cost)} {self.currency}"
        amount = _rounded(self.hours * self._count)
        return f"an estimated {amount} {self.unit} ({self._devices}, {self.how}){cost}"

    @property
    def facts(self) -> dict[str, object]:
        """The same as JSON values."""
        return {
            "estimate": self.device_hours,
            "unit": self.unit,
            "hours": self.hours,
            "devices": dict(self.devices),
            "ranks": self.ranks,
            "cost": self.cost,
            "currency": self.currency or None,
            "method": self.how,
        }

    @property
    def _count(self) -> int:
        return sum(self.devices.values()) or self.ranks

    @property
    def _devices(self) -> str:
        if not self.devices:
            return f"{self.ranks:,} rank{'s' * (self.ranks != 1)} on the CPU"
        named = [(n, plain_line(name).removeprefix("NVIDIA ")) for name, n in self.devices.items()]
        return " + ".join(f"{count:,} x {name}" for count, name in named)


def left_of(view: RunView, at_ms: int, prices: PricesConfig) -> Compute:
    """What is left of a training at that time: its planned steps, or what its time limit allows,
    whichever is less.
    """
    outlook = view.outlook
    found: list[tuple[float, str]] = []
    why = "neither the planned steps nor a time limit of the job are known"
    if outlook is not None and outlook.total_steps is not None:
        made = outlook.done_steps + (0 if view.last_step is None else view.last_step + 1)
        left = max(0, outlook.total_steps - made)
        if outlook.step_s is None:
            why = f"{left:,} of {outlook.total_steps:,} steps are left, but none was timed yet"
        else:
            how = f"{left:,} of {outlook.total_steps:,} steps left at {outlook.step_s:.3g} s each"
            found.append((left * outlook.step_s / _HOUR_S, how))
    if outlook is not None and outlook.ends_by_ms is not None:
        until = max(0, outlook.ends_by_ms - at_ms) / 1000 / _HOUR_S
        found.append((until, f"{_rounded(until)} h of its time limit left"))
    if not found:
        return hours_of(view, None, why, prices)
    least, how = min(found)
    return hours_of(view, least, how, prices)


def saved_by_stop(view: RunView, prices: PricesConfig) -> Compute | None:
    """What was left of a training when it was stopped; None: it was not."""
    if view.outcome != "stopped" or view.ended_ms is None:
        return None
    return left_of(view, view.ended_ms, prices)


def hours_of(view: RunView, hours: float | None, how: str, prices: PricesConfig) -> Compute:
    """So many hours of the devices of a training; `how` they were found, or why they are None."""
    ranks = max(1, view.world_size)
    if view.devices:
        each = [(prices.device_price(name), count) for name, count in view.devices.items()]
    else:
        each = [(prices.cpu, ranks)]
    cost: float | None = None
    if hours is not None and all(price is not None for price, _ in each):
        cost = hours * sum(price * count for price, count in each if price is not None)
    return Compute(
        devices=view.devices,
        ranks=ranks,
        hours=hours,
        how=how,
        cost=cost,
        currency="" if cost is None else plain_line(prices.currency),
    )


def _rounded(number: float) -> str:
    """To three digits: `0.0123`, `1.55`, `26.5`, `1,234`."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{float(f'{number:.3g}'):g}"
