"""Where in the mesh of ranks the local part of a parameter lies.

FSDP2 and tensor parallelism hold parameters as DTensors, of which each rank has a part; pipeline
parallelism gives each rank layers of its own. FSDP's first version joins parameters and cuts what
it has joined: a rank has some of them whole, one or two in part, and the others not at all. What a
rank reports of such a parameter is true of its part alone, so the name shows which:
`layers.0.weight@tp1`, behind a mark that no name and no pattern has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

MARK: Final = "@"


class Cut(NamedTuple):
    """One way in which parameters are parted among `ranks` ranks, which the tensor does not show:
    the stages of a pipeline, or FSDP's first version.
    """

    word: str
    ranks: int
    empty: bool = False
    """Whether nothing of the parameter is on this rank."""


class Place(NamedTuple):
    """Which part of a parameter is here, `""` where it is the whole, and in how many it is cut."""

    suffix: str
    parts: int
    empty: bool = False


WHOLE: Final = Place("", 1)

Cuts = Mapping[int, Sequence[Cut]]
"""By the id of a parameter."""


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any shape is a DTensor, or belongs to FSDP's first version."""
    return (hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")) or hasattr(
        tensor, "_fsdp_flattened"
    )


def whole(thing: object) -> object:
    """A DTensor of which each rank has everything, as it is here; None where it has a part. What is
    no DTensor, as it is.
    """
    if not hasattr(thing, "to_local"):
        return thing
    placements = getattr(thing, "placements", ())
    is_whole = bool(placements) and all(placement.is_replicate() for placement in placements)
    return thing.to_local() if is_whole else None


def place_of(tensor: torch.Tensor, cuts: Iterable[Cut] = ()) -> Place:
    """The place of a parameter, of any shape, that is cut in these ways.

    `@tp1`: the second part along the dimension `tp` of the mesh; `@shard1` where that has no name;
    `@pp1` of the second stage; `@pp1-tp0` of both.
    """
    words: list[str] = []
    parts, empty = 1, False
    for cut in cuts:
        words.append(cut.word)
        parts *= max(1, cut.ranks)
        empty |= cut.empty
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        mesh = tensor.device_mesh
        names, at = mesh.mesh_dim_names, mesh.get_coordinate()
        for i, placement in enumerate(tensor.placements):
            if placement.is_replicate() or placement.is_partial():
                continue
            name = names[i] if names else "shard" if mesh.ndim == 1 else f"shard{i}_"
            words.append(f"{name}{'' if at is None else at[i]}")
            parts *= mesh.size(i)
    return Place(MARK + "-".join(words), parts, empty) if words else WHOLE


def base_name(name: str) -> str:
    """A parameter's name without its place, as the model has it."""
    return name.partition(MARK)[0]


def stage_class() -> type | None:
    """The class of pipeline stages; None while nobody has imported it."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    found = getattr(module, "_PipelineStageBase", None)
    return found if isinstance(found, type) else None


def cuts_by_parameter(modules: Iterable[nn.Module], stages: Iterable[object]) -> Cuts:
    """How the parameters of these are cut: of objects of that class, and of wrappers of FSDP's
    first version among the modules.
    """
    found: dict[int, list[Cut]] = {}
    for thing in stages:
        module, index = getattr(thing, "submod", None), getattr(thing, "stage_index", None)
        ranks = getattr(thing, "group_size", None)
        if isinstance(module, nn.Module) and isinstance(index, int):
            cut = Cut(f"pp{index}", ranks if isinstance(ranks, int) else 1)
            for parameter in module.parameters():
                found.setdefault(id(parameter), [cut])
    for module in modules:
        for parameter, cut in _flat_cuts(module.__dict__.get("_handle")):
            found.setdefault(id(parameter), []).append(cut)
    return found


def _flat_cuts(handle: object) -> Iterator[tuple[torch.Tensor, Cut]]:
    """Of the flat parameter that such a wrapper has, and of the parameters joined in it, which are
    views of it (`use_orig_params`); none where each rank has the whole of it (`NO_SHARD`).
    """
    flat = getattr(handle, "flat_param", None)
    rank, ranks = getattr(handle, "rank", None), getattr(handle, "world_size", None)
    sharded = getattr(handle, "uses_sharded_strategy", False)
    if not (isinstance(flat, torch.Tensor) and isinstance(rank, int) and isinstance(ranks, int)):
        return
    if not sharded or ranks < 2:
        return
    word = f"shard{rank}"
    infos = getattr(flat, "_shard_param_infos", ())
    yield flat, Cut(word, ranks, not any(info.in_shard for info in infos))
    joined = getattr(flat, "_params", None) or ()
    for parameter, info in zip(joined, infos, strict=False):
        yield parameter, Cut(word, ranks, not info.in_shard)
    # Those that several modules share have no information of their own: nor are they given to an
    # optimizer, which has each of them once, as the first module has it.
