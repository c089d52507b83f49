"""What may be configured of a command."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from tocsin.schemas.configuration.receivers import ReceiverConfig
from tocsin.schemas.configuration.values import Duration, TextOrSecret

_Argument = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
_Variable = Annotated[str, StringConstraints(pattern=r"^TOCSIN_[A-Z0-9_]{1,50}$")]


class CommandReceiver(ReceiverConfig):
    """Runs a program of this machine for each issue, with the issue as JSON on its standard input.
    The program must also be allowed on the command line of tocsin: `--allow-command PROGRAM`."""

    type: Literal["command"] = Field(examples=["command"])
    """The kind of receiver."""
    run: tuple[_Argument, ...] = Field(
        strict=False,
        json_schema_extra={"minItems": 1, "maxItems": 50},
        examples=[["/usr/local/bin/page", "--team", "vision"]],
    )
    """The program with its full path, and its arguments. No shell reads them."""
    environment: Mapping[_Variable, TextOrSecret] = Field(default_factory=dict)
    """Environment variables for it; their names begin with `TOCSIN_`."""
    timeout: Duration = Field(
        default=timedelta(seconds=30), examples=["30s"], validate_default=True
    )
    """After this it is killed, with all that it has started; at most 10m. Unit: a duration."""

    @field_validator("run")
    @classmethod
    def _program(cls, run: tuple[str, ...]) -> tuple[str, ...]:
        if not 1 <= len(run) <= 50:
            raise ValueError("expected a program, and at most 49 arguments")
        if not run[0].startswith("/"):
            raise ValueError("expected the full path of a program first, like /usr/local/bin/page")
        if any("\0" in argument for argument in run):
            raise ValueError("expected text without a zero character")
        return run

    @field_validator("timeout")
    @classmethod
    def _bounded(cls, timeout: timedelta) -> timedelta:
        if not timedelta() < timeout <= timedelta(minutes=10):
            raise ValueError("expected a timeout of at most 10m")
        return timeout
