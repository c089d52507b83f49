"""What there is once per process: the wall, and the session that `start()` or the hook has made.

Cheap to import, since a process with the hook imports it together with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tocsin.emitter.process.isolation import Wall

if TYPE_CHECKING:
    from tocsin.emitter.training.session import Session


class Current:
    """The wall and the session of this process."""

    def __init__(self) -> None:
        self.wall: Final = Wall()
        self.session: Session | None = None


current: Final = Current()
