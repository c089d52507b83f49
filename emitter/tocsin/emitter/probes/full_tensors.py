"""Tensors that are saved in full, at the steps that `capture.collections.NAME.steps` lists.

The training's thread copies them, and no more: on a GPU into pinned memory, without waiting. A
thread of the sender's side writes the file, and reports where it is (`send.tensor_files`).
No copy is made that the budget or the memory of the machine does not allow.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import torch

from tocsin.emitter.plan.collections import CollectionPlan
from tocsin.emitter.probes.probe import NEVER, Probe
from tocsin.emitter.send.tensor_files import BUCKETS, Job, Saved, TensorFiles, size_of
from tocsin.emitter.statistics.async_copy import is_recording
from tocsin.emitter.statistics.driver_objects import DriverObjects
from tocsin.emitter.statistics.readable import FLOATS, types
from tocsin.schemas.records.runs import CaptureDegraded
from tocsin.schemas.records.saved_tensors import SavedTensor, TensorsSaved
from tocsin.schemas.store_paths import tensors_path

if TYPE_CHECKING:
    from tocsin.emitter.model.optimizers import Optimizers
    from tocsin.emitter.training.training import Training

MEMORY_SHARE: Final = 0.25
"""Copies take at most so much of the memory that is free."""

MANY: Final = 1_000
"""Tensors that one record is about."""

_SAVED: Final = FLOATS | types("float8_e4m3fn", "float8_e5m2")


class FullTensors(Probe):
    """The tensors of one training that are saved in full."""

    name = "full tensors"

    def start(self, training: Training, optimizers: Optimizers) -> None:
        """The first step is being made."""
        self._optimizers = optimizers
        self._files: TensorFiles | None = None
        self._plans = [plan for plan in training.settings.plans.values() if plan.saves]
        self.wakes = self._next(training.next_step - 1)
        if self.wakes == NEVER:
            return
        isolation = training.isolation
        root = _root(training.settings.full.url, training.bus_url)
        needs = ["safetensors"]
        if root is not None and root.startswith(BUCKETS):
            needs.append("obstore")
        if any(importlib.util.find_spec(name) is None for name in needs):
            self.wakes = NEVER
            isolation.switch_off(self.name, "it needs the extra 'store': pip install '.[store]'")
        elif root is None:
            self.wakes = NEVER
            isolation.switch_off(
                self.name, "on Kafka, capture.full_tensors.url or store.url has to say where"
            )
        else:
            self._files = self._open(training, root)

    def stepped(self, training: Training, step: int) -> None:
        """Copy what is to be saved at this step."""
        files = self._files
        self.wakes = self._next(step)
        if files is None or files.off or is_recording():
            return
        for plan in self._plans:
            if step in plan.saves and (copied := self._copy(plan, files)) is not None:
                origin = training.origin
                path = tensors_path(
                    origin.run_id, origin.incarnation, plan.name, step=step, rank=origin.rank
                )
                files.put(Job(copied, path, plan.name, step))

    def close(self, training: Training) -> None:
        """The training is over: wait a little for what is under way."""
        if self._files is not None:
            self._files.close()

    def _open(self, training: Training, root: str) -> TensorFiles:
        def saved(one: Saved) -> None:
            for start in range(0, len(one.tensors), MANY):
                training.emit(
                    TensorsSaved(
                        **training.who,
                        collection=one.job.collection,
                        step=one.job.step,
                        uri=one.uri,
                        path=one.job.path,
                        size_bytes=0 if start else one.size_bytes,
                        tensors=tuple(one.tensors[start : start + MANY]),
                    )
                )

        def failed(reason: str) -> None:
            training.emit(CaptureDegraded(**training.who, probe=self.name, reason=reason))

        settings = training.settings.full
        return TensorFiles(
            root,
            training.origin.run_id,
            training.origin.incarnation,
            ranks=training.identity.world_size,
            budget_bytes=settings.budget_bytes,
            options=settings.options,
            saved=saved,
            failed=failed,
        )

    def _copy(self, plan: CollectionPlan, files: TensorFiles) -> HostTensors | None:
        watched = self._optimizers.primary
        chosen = self._optimizers.chosen(watched, plan)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in watched.parameters:
            if chosen is None or name in chosen:
                whole = parameter.grad if plan.of == "gradients" else parameter
                tensor = None if whole is None else _readable(whole)
                if tensor is not None:
                    found[name] = tensor
        planned = HostTensors(found)
        size_bytes = size_of(planned)
        if not found:
            return None
        if size_bytes > files.most_bytes:
            files.use_up()
            return None
        if size_bytes > MEMORY_SHARE * psutil.virtual_memory().available:
            raise MemoryError(f"copies of {size_bytes:,} bytes would take too much memory")
        planned.start()
        return planned

    def _next(self, step: int) -> int:
        later = (save for plan in self._plans for save in plan.saves if save > step)
        return min(later, default=NEVER)


class HostTensors(DriverObjects):
    """Copies of named tensors, of any shape, on the host.

    See `tocsin.emitter.send.tensor_files.Copied`.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copies nothing yet."""
        super().__init__()
        self._tensors = tensors
        self._events: list[torch.cuda.Event] = []
        self.size_bytes = sum(t.numel() * t.element_size() for t in tensors.values())

    @property
    def names(self) -> Sequence[str]:
        """The tensors."""
        return list(self._tensors)

    def start(self) -> None:
        """Copy: from the CPU now, from a CUDA device behind what is queued there, without waiting.

        From other devices it waits for the copy.
        """
        copies: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if tensor.device.type != "cuda":
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    copies[name] = copy.copy_(tensor)
                    continue
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                with torch.cuda.device(tensor.device):
                    host.copy_(tensor, non_blocking=True)
                copies[name] = host
            for device in {t.device for t in self._tensors.values() if t.device.type == "cuda"}:
                with torch.cuda.device(device):
                    event = torch.cuda.Event()
                    event.record()
                self._events.append(event)
        self._tensors = copies

    def ready(self) -> bool:
        """Whether they are there; never waits."""
        return all(event.query() for event in self._events)

    def write(self, path: Path) -> Sequence[SavedTensor]:
        """Write them into that file, in the format safetensors, each in its own shape and type.

        Blocks. Raises what `safetensors.torch.save_file` raises.
        """
        from safetensors.torch import save_file

        save_file(self._tensors, path)
        return [
            SavedTensor(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                sha256=hashlib.sha256(_octets(tensor)).hexdigest(),
            )
            for name, tensor in self._tensors.items()
        ]


def _octets(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _readable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its numbers as they lie here, in its own type and shape; of a DTensor the local part."""
    local = getattr(tensor, "to_local", None)
    tensor = (tensor if local is None else local()).detach()
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    return tensor if tensor.dtype in _SAVED else None


def _root(url: str | None, bus: str) -> str | None:
    """Where files go; None: it is not configured."""
    if url is not None:
        return url if url.startswith(BUCKETS) else os.path.abspath(url)
    if not bus.startswith("embedded:"):
        return None
    return os.path.join(os.path.dirname(os.path.abspath(bus.removeprefix("embedded:"))), "store")
