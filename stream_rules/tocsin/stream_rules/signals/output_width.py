"""How many numbers a model puts out, as far as its parameters tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import TensorFrame

_MAX_BIASES: Final = 256


@dataclass(slots=True)
class OutputWidth:
    """Sizes of the biases, and of the last weight in forward order.

    The scores of a classifier come out of a layer with as many outputs as there are classes: it has
    such a bias, or else a weight that is as many times the width of a layer before it. Those of a
    contrastive loss or of a ranking are of pairs: their number is that of the batch, of a queue or
    of the candidates, and no parameter has it.
    """

    biases: list[int] = field(default_factory=list)
    last: int = 0

    def learn(self, frame: TensorFrame) -> None:
        """Take in a summary of the collection `weights`."""
        sizes = frame.count("numel")
        if self.last or sizes is None or frame.part != frame.parts - 1 or not len(frame.rows):
            return
        self.biases = sorted(
            {
                int(n)
                for name, n in zip(frame.rows, sizes.tolist(), strict=True)
                if name.partition("@")[0].endswith("bias")
            }
        )[:_MAX_BIASES]
        weights = [
            int(n)
            for name, n in zip(frame.rows, sizes.tolist(), strict=True)
            if not name.partition("@")[0].endswith("bias")
        ]
        self.last = weights[-1] if weights else 1

    def is_of(self, classes: int) -> bool:
        """Whether the model can have a layer that puts out so many numbers."""
        width, rest = divmod(self.last, classes)
        return classes in self.biases or (rest == 0 and width in self.biases)
