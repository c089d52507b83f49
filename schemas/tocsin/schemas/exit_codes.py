"""Exit codes of tocsin's commands and of a training that it stopped.

`docs/reference/exit-codes.md` explains them; a test compares both.
"""

from typing import Final

FAILED: Final = 1
"""The command ran and did not reach its goal."""

WRONG_USAGE: Final = 2
"""The command line, the configuration or the bus is wrong: nothing was started."""

STOPPED: Final = 79
"""tocsin stopped the training."""

NOT_EXECUTABLE: Final = 126
"""The job's command is not executable, as a shell reports it."""

NOT_FOUND: Final = 127
"""The job's command does not exist, as a shell reports it."""

SIGNALLED: Final = 128
"""Plus n: signal n ended the job, as a shell reports it."""
