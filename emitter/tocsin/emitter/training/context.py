"""What there is once per process: isolation, and the session that `start()` or the hook has made.

Cheap to import, since a process with the hook imports it together with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tocsin.emitter.process.isolation import Isolation

if TYPE_CHECKING:
    from tocsin.emitter.training.session import Session


class Current:
    """The isolation and the session of this process."""

    def __init__(self) -> None:
        self.isolation: Final = Isolation()
        self.session: Session | None = None


current: Final = Current()
