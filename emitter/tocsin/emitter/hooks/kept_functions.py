"""Which functions of torch the program keeps somewhere, so that nothing may take their place.

A pickle has a function as its name, and refuses one whose name stands for another thing by now. An
object that was made before `start()` and keeps `torch.nn.functional.cross_entropy` could not be
pickled any more, were there a function of ours under that name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence


def held(functions: Sequence[Callable[..., object]]) -> list[bool]:
    """For each of several functions, whether anything but torch itself has it: objects, or modules
    that make such. All are where the collector cannot tell (`gc.freeze()`).

    Goes through the heap once: 30 to 60 ms in a process that has little more than torch.
    """
    if gc.get_freeze_count() > 0:
        return [True] * len(functions)
    places = {id(function): i for i, function in enumerate(functions)}
    found = [False] * len(functions)
    for holder in gc.get_referrers(*functions):
        if holder is functions or _is_module_of_torch(holder):
            continue
        here = {places[id(thing)] for thing in gc.get_referents(holder) if id(thing) in places}
        # One that has them all is a table of torch's: of what can be overridden, or compiled.
        if len(here) < len(functions) or len(functions) == 1:
            for i in here:
                found[i] = True
    return found


def _is_module_of_torch(holder: object) -> bool:
    if type(holder) is not dict:
        return False
    name, spec = holder.get("__name__"), holder.get("__spec__")
    return spec is not None and isinstance(name, str) and name.partition(".")[0] == "torch"
