"""How many tokens a model reads, to distinguish labels that are its own tokens from classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tocsin.schemas.records.frames import TensorFrame

_MAX_SIZES: Final = 64


@dataclass(slots=True)
class Vocabulary:
    """The numbers of rows of the model's embeddings.

    A language model of characters has a cross-entropy over some dozens of classes, like a
    classifier. Its classes are as many as the rows of its embedding: how often each comes is the
    language's, and no fault of the data.
    """

    sizes: list[int] = field(default_factory=list)

    def learn(self, frame: TensorFrame) -> None:
        """Take in a summary of the collection `embeddings`."""
        rows = frame.count("numel")
        for size in () if rows is None else rows.tolist():
            if size not in self.sizes and len(self.sizes) < _MAX_SIZES:
                self.sizes.append(int(size))

    def holds(self, classes: int) -> bool:
        """Whether labels of so many classes are tokens of the model's own."""
        return classes in self.sizes
