"""What the process of the custom rules may use."""

from __future__ import annotations

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one child process. Seconds are of the wall clock unless the name has CPU in it.

    Attributes:
        load_s: to load all files and packages that the configuration names.
        load_bytes: of resident memory, while they are loaded.
        call_s, call_cpu_s: of one call of a rule. A rule is quick (milliseconds); these bounds are
            so wide because the process is niced, and a training may use all cores.
        memory_bytes: of address space beyond what is there once all is loaded.
        behind_s, behind_bytes: how old and how much may be what waits for the rules.
        batch_records, batch_bytes: of one batch; two are under way at most.
        save_s, save_bytes: the states are asked for after so long, or so much, since the last time.
        starts: ends that no rule explains, one after the other and before anything was saved,
            before no rule is run any more.
        runs: in how many runs a rule may end the process before it is off in all of them.
    """

    load_s: float = 30.0
    load_bytes: int = 4096 * MEBIBYTE
    call_s: float = 5.0
    call_cpu_s: float = 2.0
    memory_bytes: int = 512 * MEBIBYTE
    behind_s: float = 10.0
    behind_bytes: int = 256 * MEBIBYTE
    batch_records: int = 256
    batch_bytes: int = MEBIBYTE
    save_s: float = 2.0
    save_bytes: int = 8 * MEBIBYTE
    starts: int = 3
    runs: int = 5
