"""Where in the mesh of ranks the local part of a parameter lies.

FSDP2 and tensor parallelism hold parameters as DTensors, of which each rank has a part; pipeline
parallelism gives each rank layers of its own. What a rank says of such a parameter is true of its
part alone, so the name says which: `layers.0.weight@tp1`, behind a mark that no name and no pattern
has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch
from torch import nn

MARK: Final = "@"


class Stage(NamedTuple):
    """A stage of a pipeline over `ranks` ranks."""

    number: int
    ranks: int


class Place(NamedTuple):
    """Which part of a parameter is here, `""` where it is the whole, and in how many it is cut."""

    suffix: str
    parts: int


WHOLE: Final = Place("", 1)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def place_of(tensor: torch.Tensor, stage: Stage | None = None) -> Place:
    """The place of a parameter, of that stage if it is in one.

    `@tp1`: the second part along the dimension `tp` of the mesh; `@shard1` where that has no name;
    `@pp1` of the second stage; `@pp1-tp0` of both.
    """
    words: list[str] = []
    parts = 1
    if stage is not None:
        words.append(f"pp{stage.number}")
        parts = max(1, stage.ranks)
    if is_distributed(tensor):
        mesh = tensor.device_mesh
        names, at = mesh.mesh_dim_names, mesh.get_coordinate()
        for i, placement in enumerate(tensor.placements):
            if placement.is_replicate() or placement.is_partial():
                continue
            name = names[i] if names else "shard" if mesh.ndim == 1 else f"shard{i}_"
            words.append(f"{name}{'' if at is None else at[i]}")
            parts *= mesh.size(i)
    return Place(MARK + "-".join(words), parts) if words else WHOLE


def base_name(name: str) -> str:
    """A parameter's name without its place, as the model has it."""
    return name.partition(MARK)[0]


def stage_class() -> type | None:
    """The class of pipeline stages; None while nobody has imported it."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    found = getattr(module, "_PipelineStageBase", None)
    return found if isinstance(found, type) else None


def stages_by_parameter(things: Iterable[object]) -> dict[int, Stage]:
    """The stage of each parameter by its id, as objects of that class say."""
    found: dict[int, Stage] = {}
    for thing in things:
        module, index = getattr(thing, "submod", None), getattr(thing, "stage_index", None)
        ranks = getattr(thing, "group_size", None)
        if isinstance(module, nn.Module) and isinstance(index, int):
            stage = Stage(index, ranks if isinstance(ranks, int) else 1)
            found.update(dict.fromkeys((id(p) for p in module.parameters()), stage))
    return found
