"""What a rule may know of the run beside the record in its hands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from tocsin.schemas.records.checkpoints import Checkpoint
from tocsin.stream_rules.reading.restarts import Fault
from tocsin.stream_rules.reading.shedding import Shedding


class RunFacts(Protocol):
    """The run as its records have told so far; read only."""

    @property
    def run_id(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def labels(self) -> Mapping[str, str]:
        """The run's labels."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are, by their own records."""
        ...

    @property
    def optimizers(self) -> int:
        """How many optimizers step; 0 while unknown."""
        ...

    @property
    def one_loss(self) -> bool | None:
        """Whether all optimizers step after the same backward call, as those of one optimizer and
        of a loop without one do; None: no rank has told yet. The losses of several that each have
        a backward call of their own work against each other."""
        ...

    @property
    def acts(self) -> bool:
        """Whether the model learns from its own actions in an environment: its losses rise and jump
        with the values that it reaches, and with each copy of a target network."""
        ...

    @property
    def collections(self) -> Collection[str]:
        """What is captured, by the records of the ranks' start."""
        ...

    @property
    def started_ms(self) -> int:
        """Append time of its first record; of the launcher's, where it was launched by one."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether a rank has left its loop for a stop: no step will follow."""
        ...

    @property
    def fault(self) -> Fault | None:
        """The first issue of this incarnation that is worth a stop, or its failure; None: none."""
        ...

    @property
    def missing(self) -> int:
        """How many records are missing between those that have come."""
        ...

    @property
    def shedding(self) -> Shedding:
        """Which summaries of tensors no rule was given, because the worker could not keep up."""
        ...

    @property
    def postponed(self) -> str:
        """Why the run is read later than the others of its partition; empty: it is not."""
        ...

    @property
    def last_step(self) -> int | None:
        """The highest step of any rank."""
        ...

    def live_ranks(self) -> Collection[int]:
        """Ranks that were heard and have not ended."""
        ...

    def rank_last_step(self, rank: int) -> int | None:
        """The last step whose scalars came from a rank; None: none yet."""
        ...

    def all_reported(self, step: int) -> bool:
        """Whether each rank has sent the scalars of `step` (or later) or has ended."""
        ...

    def ranks_read(self) -> Collection[int]:
        """Ranks whose tensor summaries are read, for names that no lower one has; none where there
        is one rank only."""
        ...

    def heartbeat_ms(self, rank: int) -> int:
        """The interval of a rank's heartbeats, milliseconds."""
        ...

    def launcher_heard_ms(self) -> int | None:
        """Append time of the launcher's last record; None: there is none."""
        ...

    def checkpoint_before(self, step: int | None) -> Checkpoint | None:
        """The checkpoint to go back to after a fault at `step`; None: none is known.

        The newest verified one from before that step; without a verified one, the newest.
        """
        ...
