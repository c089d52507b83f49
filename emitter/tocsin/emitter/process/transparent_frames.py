"""Frames of ours around functions of others, which neither warnings nor tracebacks show.

`warnings.warn(…, stacklevel=2)` names the line of whoever called a function, and filters go by
its module. With a function of ours in between it would name our line. Python passes over the frames
of its import system for that, which it knows by the words `importlib` and `_bootstrap` in the name
of their file. So the code of our functions has them in the name of its file, too: nothing is done
at a call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK: Final = " (passed over like importlib._bootstrap)"

_codes: Final[dict[int, tuple[CodeType, CodeType]]] = {}
"""The code of each `def` that was given a name before, by its id, and what it has become: one for
all functions that are made of it."""

_followers: Final[list[Callable[[CodeType], object]]] = []


def transparent(function: F) -> F:
    """Have warnings pass over the frames of this function, as far as they count levels."""
    plain: Any = function
    code: CodeType = plain.__code__
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = code, code.replace(co_filename=code.co_filename + _MARK)
        for follower in _followers:
            follower(known[1])
    plain.__code__ = known[1]
    return function


def follow_codes(follower: Callable[[CodeType], object]) -> None:
    """Call it with the code of each such function, now and whenever there is another: nobody finds
    it by the `def`. One that is a follower already is not added again.
    """
    if follower not in _followers:
        _followers.append(follower)
        for _, code in list(_codes.values()):
            follower(code)


def leave_traceback(error: BaseException) -> None:
    """Take the frame that has just caught this error out of its traceback; `raise` follows."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
