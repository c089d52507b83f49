"""Whether custom rules can be loaded, without a worker: for `tocsin check`, and before a start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.stream_rules.custom.call_limits import Limits
from tocsin.stream_rules.custom.host import CustomHost
from tocsin.stream_rules.custom.loading import Loaded


def load_apart(
    entries: Sequence[RuleEntry], *, folder: Path, limits: Limits | None = None
) -> Loaded:
    """A `CustomLoader` that loads in a child process, which ends with it: for checks."""
    if not entries:
        return Loaded()
    host = CustomHost(entries, folder, limits=limits)
    try:
        return host.start()
    finally:
        host.close()
