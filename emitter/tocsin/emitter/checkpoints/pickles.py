"""Which tensors a pickle of torch describes. Nothing of the pickle is executed or imported.

The opcodes are followed with symbols in place of objects: a class is its name, a call is the name
and its arguments. What torch calls to make a tensor is known by name; all else is only looked
through for more tensors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Final

MAX_BYTES: Final = 64 * 2**20
"""Longest pickle that is followed."""

MAX_TENSORS: Final = 100_000

_MAX_DEPTH: Final = 100

_MEMO_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_MEMO_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_EMPTY: Final = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": list,
}
_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TENSORS: Final = frozenset(
    {
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    }
)
_WRAPPERS: Final = frozenset(
    {
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._tensor._rebuild_from_type_v2",
    }
)


class BadPickle(ValueError):
    """It is no pickle, it is cut off, or it does what the pickles of torch do not."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by its name."""

    name: str


@dataclass(eq=False, slots=True)
class UnknownObject:
    """An object of a class that is not known here, with what it was made of."""

    kind: object
    args: object = ()
    state: object = None

    @property
    def fields(self) -> dict[object, object]:
        """Its attributes, as far as the pickle holds them."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:
            state = {**_mapping(state[0]), **_mapping(state[1])}
        return _mapping(state)


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers behind one or more tensors: where they are, and how many."""

    key: str
    kind: str
    numel: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, as the pickle describes it: from number `offset` of its storage on. `kind` names
    its type where its storage does not."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = ""

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        count = 1
        for each in self.shape:
            count *= each
        return count

    @property
    def in_a_row(self) -> bool:
        """Whether its numbers stand one behind the other."""
        following = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != following:
                return False
            following *= size
        return True


class _Mark:
    pass


_MARK: Final = _Mark()


@dataclass(slots=True)
class _Machine:
    """Stack and memo of a pickle under way."""

    stack: list[object] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)

    def run(self, source: IO[bytes]) -> object:
        for opcode, argument, _ in pickletools.genops(source):
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise BadPickle("it has no end")

    def step(self, name: str, argument: object) -> None:
        stack = self.stack
        if name in _MEMO_PUTS:
            assert isinstance(argument, int)
            self.memo[argument] = stack[-1]
        elif name in _MEMO_GETS:
            assert isinstance(argument, int)
            stack.append(self.memo[argument])
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("POP", "POP_MARK"):
            _ = self.marked() if name == "POP_MARK" else stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in ("PROTO", "FRAME"):
            pass
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.named(name, argument)
        elif name in ("BINPERSID", "PERSID"):
            stack.append(_storage(stack.pop() if name == "BINPERSID" else argument))
        elif not (self.collected(name) or self.made(name)):
            if argument is None:
                raise BadPickle(f"it has the opcode {name}, which torch does not write")
            stack.append(argument)

    def named(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            self.stack.append(Global(str(argument).replace(" ", ".", 1)))
            return
        attribute, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Global(f"{module}.{attribute}"))

    def collected(self, name: str) -> bool:
        """Tuples, lists, mappings and sets."""
        stack = self.stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise BadPickle("its stack is empty")
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            items = self.marked()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name == "DICT":
            stack.append(_pairs(self.marked()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else self.marked()
            if isinstance(found := stack[-1], list):
                found.extend(items)
            elif isinstance(found, UnknownObject):
                found.args = (found.args, items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self.marked()
            if isinstance(found := stack[-1], dict):
                found.update(_pairs(items))
            elif isinstance(found, UnknownObject):
                found.args = (found.args, _pairs(items))
        else:
            return False
        return True

    def made(self, name: str) -> bool:
        """Objects: made by a call, and given their state."""
        stack = self.stack
        if name == "BUILD":
            state = stack.pop()
            if isinstance(found := stack[-1], UnknownObject):
                found.state = state
        elif name in ("REDUCE", "NEWOBJ"):
            args, kind = stack.pop(), stack.pop()
            stack.append(_called(kind, args))
        elif name == "NEWOBJ_EX":
            named, args, kind = stack.pop(), stack.pop(), stack.pop()
            stack.append(UnknownObject(kind, (args, named)))
        elif name == "OBJ":
            kind, *given = self.marked()
            stack.append(UnknownObject(kind, tuple(given)))
        else:
            return False
        return True

    def marked(self) -> list[object]:
        """What stands above the topmost mark; both are taken off the stack."""
        stack = self.stack
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is _MARK:
                found = stack[place + 1 :]
                del stack[place:]
                return found
        raise BadPickle("it has no mark")


def structure(source: IO[bytes]) -> object:
    """What a pickle describes, of symbols. Reads to its end.

    Raises:
        BadPickle: it cannot be followed.
    """
    try:
        return _Machine().run(source)
    except BadPickle:
        raise
    except (ValueError, LookupError, AssertionError, TypeError, OverflowError) as error:
        raise BadPickle(str(error) or type(error).__name__) from error


def tensors(found: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a structure, as described, by their names: the keys on the way there, with
    dots between. At most `MAX_TENSORS`.
    """
    seen: set[int] = set()
    stack: list[tuple[str, object, int]] = [("", found, 0)]
    count = 0
    while stack and count < MAX_TENSORS:
        name, value, depth = stack.pop()
        if isinstance(value, Tensor):
            count += 1
            yield name, value
            continue
        inside = list(_inside(value))
        if not inside or depth >= _MAX_DEPTH or id(value) in seen:
            continue
        seen.add(id(value))
        for key, each in reversed(inside):
            stack.append((f"{name}.{key}" if name and key else name or key, each, depth + 1))


def _inside(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield str(key) if isinstance(key, str | int) else "", each
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield str(place), each
    elif isinstance(value, UnknownObject):
        for each in (value.args, value.state):
            yield "", each


def _called(kind: object, args: object) -> object:
    name = kind.name if isinstance(kind, Global) else ""
    if isinstance(args, tuple):
        if name in _TENSORS and len(args) >= 4 and isinstance(args[0], Storage):
            typed = args[6] if name.endswith("_v3") and len(args) > 6 else None
            kind_name = typed.name if isinstance(typed, Global) else ""
            return _tensor(args[0], args[1], args[2], args[3], kind_name)
        if name in _WRAPPERS and args:
            # `_rebuild_from_type_v2` has the function and its arguments in front.
            if name.endswith("_from_type_v2") and len(args) >= 3:
                return _called(args[0], args[2])
            return args[0]
        if name in ("collections.OrderedDict", "builtins.dict"):
            return _pairs([each for pair in args[0] for each in pair]) if args else {}
    return UnknownObject(kind, args)


def _storage(reference: object) -> object:
    """A persistent id, as `torch.save` writes it: ('storage', class, key, location, numel)."""
    if isinstance(reference, tuple) and len(reference) >= 5 and reference[0] == "storage":
        _, kind, key, _, numel = reference[:5]
        if isinstance(kind, Global) and isinstance(key, str) and isinstance(numel, int):
            return Storage(key, kind.name, numel)
    return UnknownObject(Global("persistent"), reference)


def _tensor(storage: Storage, offset: object, size: object, stride: object, kind: str) -> Tensor:
    shape, strides = _sizes(size), _sizes(stride)
    if not isinstance(offset, int) or offset < 0 or len(shape) != len(strides):
        raise BadPickle("a tensor has no place in its storage")
    return Tensor(storage, offset, shape, strides, kind)


def _sizes(found: object) -> tuple[int, ...]:
    if isinstance(found, UnknownObject):  # torch.Size
        found = found.args[0] if isinstance(found.args, tuple) and found.args else ()
    if not isinstance(found, tuple | list):
        raise BadPickle("the shape of a tensor is not a tuple")
    sizes = tuple(each for each in found if isinstance(each, int) and each >= 0)
    if len(sizes) != len(found):
        raise BadPickle("the shape of a tensor contains a value that is not a size")
    return sizes


def _pairs(items: list[object]) -> dict[object, object]:
    found: dict[object, object] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Symbols are hashed by identity; a list or mapping as a key never comes from Python.
        found[key] = value
    return found


def _mapping(value: object) -> dict[object, object]:
    return value if isinstance(value, dict) else {}
