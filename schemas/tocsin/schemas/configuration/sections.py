"""The sections of the configuration file, as values: each model defines what the file may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from tocsin.schemas.configuration.docstrings import Documented
from tocsin.schemas.configuration.problems import Loc
from tocsin.schemas.configuration.routing.matches import Match
from tocsin.schemas.configuration.values import (
    Duration,
    FilePath,
    Name,
    Secret,
    format_duration,
)
from tocsin.schemas.configuration.yaml_document import Plain
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.issues import Severity
from tocsin.schemas.topics import Topics

DEFAULT_BUS_URL: Final = "embedded:.tocsin/bus.db"

CUSTOM_USE: Final = re.compile(r"[^:\x00-\x1f]+\.py:[A-Za-z_][A-Za-z0-9_]*")
"""How an entry names a rule in a file of the user's: `rules/my_rule.py:MyRule`."""

_KAFKA_URL: Final = re.compile(
    r"kafka://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"
    r"(?:,(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})*/?"
)


def parse_bus_url(value: object) -> str:
    """`embedded:PATH` or `kafka://host:port[,host:port…]`.

    Raises:
        ValueError: it is anything else; the message says what was expected, without the value.
    """
    if isinstance(value, str) and value.isprintable():
        if value.startswith("embedded:") and len(value) > len("embedded:"):
            return value
        if value.startswith("kafka://") and "@" in value:
            raise ValueError("a user or password does not belong in the URL: use bus.sasl")
        if _KAFKA_URL.fullmatch(value):
            return value
    raise ValueError(
        "expected embedded:PATH or kafka://host:port[,host:port…], "
        f"like {DEFAULT_BUS_URL} or kafka://kafka-1:9092"
    )


def _prefix(value: object) -> str:
    try:
        return Topics(str(value)).prefix
    except ConfigurationError as err:
        raise ValueError(str(err)) from err


SHORTEST_REPEAT: Final = timedelta(seconds=10)
LONGEST_GROUP_WAIT: Final = timedelta(minutes=10)


def _repeat_interval(value: timedelta) -> timedelta:
    if value < SHORTEST_REPEAT:
        raise ValueError(f"expected at least {format_duration(SHORTEST_REPEAT)}")
    return value


def _group_wait(value: timedelta) -> timedelta:
    if value > LONGEST_GROUP_WAIT:
        raise ValueError(f"expected at most {format_duration(LONGEST_GROUP_WAIT)}")
    return value


GroupWait = Annotated[Duration, AfterValidator(_group_wait)]
RepeatInterval = Annotated[Duration, AfterValidator(_repeat_interval)]
GroupBy = Annotated[tuple[str, ...], Field(strict=False)]
"""Labels, and `run`, `rule`, `severity` of the issue."""


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Part = Annotated[str, Field(min_length=1, max_length=100)]


class Section(Documented):
    """A frozen part of the configuration; unknown keys and wrong types are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        hide_input_in_errors=True,
    )


class Entry(Section):
    """One entry of a list of the file, which knows its place there."""

    MATCHES: ClassVar[tuple[str, ...]] = ()
    """Its keys that hold a match of labels."""

    _loc: Loc = PrivateAttr(default=())

    @property
    def loc(self) -> Loc:
        """Position in the document."""
        return self._loc

    def placed(self, loc: Loc, raw: object) -> None:
        """Note where it stands in the document, and how it was written there."""
        self._loc = loc


class SaslConfig(Section):
    """How to log in to Kafka."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="SCRAM-SHA-512", examples=["SCRAM-SHA-512"]
    )
    """The SASL mechanism."""
    username: str = Field(min_length=1, examples=["tocsin"])
    """The user."""
    password: Secret = Field(examples=[{"secret": "kafka"}])
    """The password."""


class TlsConfig(Section):
    """How to encrypt a connection; an empty mapping trusts the system's authorities."""

    ca: FilePath | None = Field(default=None, examples=["tls/ca.pem"])
    """PEM file of the authorities to trust, instead of the system's."""
    certificate: FilePath | None = Field(default=None, examples=["tls/client.pem"])
    """PEM file of the client certificate, for mutual TLS."""
    key: FilePath | None = Field(default=None, examples=["tls/client.key"])
    """PEM file of the client certificate's private key."""

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("expected 'certificate' and 'key' together")
        return self


class BusConfig(Section):
    """The bus that carries all records."""

    url: Annotated[str, PlainValidator(parse_bus_url), WithJsonSchema({"type": "string"})] = Field(
        default=DEFAULT_BUS_URL, examples=[DEFAULT_BUS_URL, "kafka://kafka-1:9092,kafka-2:9092"]
    )
    """`embedded:PATH` (one SQLite file) or `kafka://host:port[,host:port…]`."""
    prefix: Annotated[str, PlainValidator(_prefix), WithJsonSchema({"type": "string"})] = Field(
        default="tocsin", examples=["vision"]
    )
    """Prefix of the topic names: one for each team."""
    sasl: SaslConfig | None = None
    """How to log in to Kafka. Absent: no log-in."""
    tls: TlsConfig | None = None
    """How to encrypt the connection to Kafka. Absent: no encryption."""

    @model_validator(mode="after")
    def _kafka_only(self) -> Self:
        if self.url.startswith("embedded:") and (self.sasl or self.tls):
            raise ValueError("sasl and tls belong to a kafka:// bus")
        return self


class SecretSource(Section):
    """Where the value of a secret comes from: exactly one of `file` and `env`."""

    file: FilePath | None = Field(default=None, examples=["/run/secrets/slack_url"])
    """File with the value; one line break at its end is removed."""
    env: str | None = Field(default=None, min_length=1, examples=["HOOK_KEY"])
    """Environment variable with the value."""
    optional: bool = Field(default=False, examples=[True])
    """Whether it may be missing; whatever refers to it then does without it."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("expected exactly one of 'file' and 'env'")
        return self


StopMode = Literal["enforce", "ask", "shadow"]
"""What becomes of a stop that the configuration asks for."""


class DefaultsConfig(Section):
    """Defaults for rules without their own settings."""

    rules: Literal["all", "none"] = Field(default="all", examples=["none"])
    """Which rules run without being listed: `all` or `none`."""
    mode: StopMode = Field(default="enforce", examples=["shadow"])
    """Effect of a stop action: `enforce` stops the job; `ask` stops it when people approve;
    `shadow` only records that the job would have been stopped."""
    send_resolved: bool = Field(default=True, examples=[False])
    """Whether receivers are notified when an issue resolves, too."""
    group_by: GroupBy = Field(default=("run", "rule"), examples=[["run"], ["run", "team"]])
    """What the issues of one message have in common: `run`, `rule`, `severity`, or labels of the
    run. Applies to receivers for people: mail, chat and SMS."""
    group_wait: GroupWait = Field(default=timedelta(0), examples=["2s"])
    """How long the first issue of a group waits for others, at most 10m. `0s`: each issue has
    its own message. A stop never waits. Unit: a duration."""
    repeat_interval: RepeatInterval | None = Field(default=None, examples=["4h"])
    """How often to repeat a notice while the issue is active and nobody has acknowledged it, at
    least 10s; absent: never. Unit: a duration."""


class PricesConfig(Section):
    """What devices cost. Without prices, estimates are in device-hours alone."""

    currency: str = Field(default="USD", min_length=1, max_length=16, examples=["EUR"])
    """Unit of all prices. It is only printed."""
    per_hour: Mapping[Part, Price] = Field(default_factory=dict, examples=[{"H100": 2.5}])
    """Price of an accelerator by a part of its name, in any case; the longest one that fits counts.
    Unit: currency per device and hour."""
    default: Price | None = Field(default=None, examples=[1.0])
    """Price of an accelerator that `per_hour` does not name. Unit: currency per device and hour."""
    cpu: Price | None = Field(default=None, examples=[0.4])
    """Price of a rank that trains on the CPU. Unit: currency per rank and hour."""

    def device_price(self, name: str) -> float | None:
        """The price of an hour of an accelerator; None: it has none."""
        fitting = [part for part in self.per_hour if part.casefold() in name.casefold()]
        return self.per_hour[max(fitting, key=len)] if fitting else self.default


class StopTrust(Section):
    """Public keys whose stop commands a training obeys."""

    trusted_keys: tuple[FilePath, ...] | None = Field(
        default=None, strict=False, examples=[["keys/actions.pub"]]
    )
    """Files of public keys. Absent: those in `~/.config/tocsin/keys`."""
    pin: Literal["off", "hard_link", "copy"] = Field(default="off", examples=["hard_link"])
    """Whether the last good checkpoint gets a second name, or a copy, in the folder `tocsin-pinned`
    beside it when its run is to be stopped, so that the job's rotation does not delete it."""
    on_restart: Literal["go_on", "hold"] = Field(default="go_on", examples=["hold"])
    """What `tocsin run` and `start()` do if the incarnation before was stopped: `go_on` starts the
    job and tells it why, `hold` does not start it and exits with 79."""
    before_update: bool = Field(default=False, examples=[True])
    """Whether ranks leave before an optimizer step that would write a gradient that is not finite,
    without waiting for the rule `nonfinite`: the weights stay good. Only where that rule stops the
    run at once (`mode: enforce`). Costs a pass over all gradients at each step."""


CheckpointChoice = Literal["protect_last_good", "save", "skip"]


class ApproveOptions(Section):
    """Who must agree before a stop is sent. People answer with `tocsin approve`."""

    timeout: Duration = Field(
        default=timedelta(minutes=10), examples=["10m"], validate_default=True
    )
    """How long it waits for answers; at most 7d."""
    on_timeout: Literal["skip", "stop"] = Field(default="skip", examples=["stop"])
    """What happens if they do not come: `skip` does not stop the job, `stop` does."""
    quorum: int = Field(default=1, ge=1, le=16, examples=[2])
    """How many people must approve. One who rejects is enough for no stop."""
    via: Name | None = Field(default=None, examples=["vision-chat"])
    """A receiver that gets the question, even if it would get no notice of the issue."""

    @model_validator(mode="after")
    def _bounded_timeout(self) -> Self:
        if not timedelta(seconds=1) <= self.timeout <= timedelta(days=7):
            raise ValueError("expected a timeout from 1s to 7d")
        return self


class StopOptions(Section):
    """When a stop action stops a job, and how."""

    at: Severity | None = Field(default=None, examples=["warning"])
    """Stop at issues of this severity and above. Absent: at stop-worthy issues, for a rule that
    may stop by default; at all issues, for any other rule."""
    mode: StopMode | None = Field(default=None, examples=["ask"])
    """`enforce`, `ask` or `shadow`; absent: `defaults.mode`."""
    approve: ApproveOptions = ApproveOptions()
    """Who is asked with `mode: ask`, and for how long."""
    checkpoint: CheckpointChoice = Field(default="protect_last_good", examples=["save"])
    """`protect_last_good` names the newest checkpoint from before the onset, and saves none; `save`
    has the training save one before it leaves, if its weights are finite; `skip` does neither."""
    grace: Duration = Field(default=timedelta(seconds=30), examples=["30s"], validate_default=True)
    """Time for the job to leave before SIGTERM, and again before SIGKILL; at most 1d."""

    @model_validator(mode="after")
    def _bounded_grace(self) -> Self:
        if self.grace > timedelta(days=1):
            raise ValueError("expected a grace of at most 1d")
        return self


class ActionEntry(Section):
    """One entry of a rule's action list."""

    kind: Literal["stop", "by_route", "receiver"]
    """Stop the job, notify by the routes, or notify one receiver."""
    receiver: str | None = None
    """The receiver's name, for the kind `receiver`."""
    options: StopOptions | None = None
    """How to stop, for the kind `stop`."""
    loc: Loc = Field(default=(), repr=False, exclude=True)
    """Position in the document."""


class RuleEntry(Section):
    """One entry of the list `rules`, in whichever of its forms it was written."""

    name: str
    """Name of the instance; that of the rule unless the file gives another."""
    use: str
    """Name of the rule, or `FILE.py:CLASS` for one of your own."""
    off: bool = False
    """Whether the rule is switched off."""
    match: Match = Field(default_factory=dict)
    """Labels that a run must have: each with patterns (`*`, `?`), one of which must match."""
    preset: str | None = None
    """A set of parameters of the rule, such as `sagemaker`. Absent: its defaults."""
    params: Mapping[str, Plain] = Field(default_factory=dict)
    """Parameters as the file has them; the rule's own model checks them."""
    severity: Severity | None = None
    """Severity of its issues; absent: the rule's own."""
    actions: tuple[ActionEntry, ...] | None = None
    """What to do; absent: the default for the severity."""
    loc: Loc = Field(default=(), repr=False, exclude=True)
    """Position in the document."""
    short: bool = Field(default=False, repr=False, exclude=True)
    """Whether it was written as `rulename: …`."""

    def at(self, part: Literal["use", "match", "preset", "params", "severity", "actions"]) -> Loc:
        """Where a part of it stands in the document, for problems."""
        return (*self.loc, self.use) if self.short else (*self.loc, part)
