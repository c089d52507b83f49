"""The numbers of a training in torch: what each step says, from what the hooks see.

The hooks (`tocsin.emitter.torch_hooks`) call this inside a wall. Nothing here changes a tensor of
the user's, keeps a graph alive, touches a random generator, or waits for a GPU: on a GPU results
are copied without waiting and read at a later step.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tocsin.emitter import checkpoints, models
from tocsin.emitter.activations import activations
from tocsin.emitter.checkpoints import Written
from tocsin.emitter.clipping import ClippedNorms
from tocsin.emitter.evaluation import EvaluationLosses
from tocsin.emitter.host_copy import is_recording
from tocsin.emitter.losses import LocalGradients, LossBuffer, on_host
from tocsin.emitter.outbox import StepRow
from tocsin.emitter.step_report import AT_ONCE, Draft, Part, Reporter, part_of, rows_now
from tocsin.emitter.summaries import dense
from tocsin.emitter.training import Shape, Training
from tocsin.emitter.updates import UpdateProbe
from tocsin.schemas.events import clip
from tocsin.schemas.runs import Checkpoint, CheckpointWritten, Group

MAX_WAITING: Final = 64
"""Steps whose numbers may be on their way from the GPU."""

PRIMARY_PATIENCE: Final = 10
"""Steps that another optimizer makes while the primary makes none, before it takes its place."""

MAX_GROUPS: Final = 64

COMPILED: Final = "the model is compiled, what its ReLUs put out cannot be seen"


@dataclass(slots=True)
class Watched:
    """One optimizer and the names of its parameters, in forward order."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    size: int
    parameters: list[tuple[str, torch.Tensor]]
    steps: int = 0


class Capture:
    """The numbers of one training."""

    def __init__(
        self,
        training: Training,
        first: torch.optim.Optimizer,
        losses: LossBuffer,
        local: LocalGradients,
        clipped: ClippedNorms,
        *,
        preferred: torch.optim.Optimizer | None = None,
    ) -> None:
        self.training: Final = training
        self._losses = losses
        self._local = local
        self._clipped = clipped
        found = models.find()
        self._modules = [weakref.ref(module) for module in found.modules]
        alive = [o for o in found.optimizers if models.hooked(o)]
        if not any(o is first for o in alive):
            alive.append(first)
        self._watched: dict[int, Watched] = {}
        self.optimizers: Final = len(alive)
        primary = max(
            alive,
            key=lambda o: (
                o is preferred,
                sum(p.numel() for *_, p in models.parameters_of(o)),
                o is first,
            ),
        )
        self._primary = id(primary)
        self._root: weakref.ref[torch.nn.Module] | None = None
        training.is_evaluating = self._is_evaluating
        self._name_of: dict[int, str] = {}
        for optimizer in (primary, *(o for o in alive if o is not primary)):
            self._watch(optimizer)
        self._parts: dict[int, Part] = {}
        self._waiting: deque[Draft] = deque()
        self._ended_at: float | None = None
        self._reporter = Reporter(training)
        self._others = 0
        self._saved: deque[Written] = deque(maxlen=100)
        self._skipped = 0
        self._skip_said = False
        self._scaling = False
        self.skipped_tensors = 0
        self._updates: Final = UpdateProbe()
        self._evaluated: Final = EvaluationLosses(training)
        activations.forget()

    # -- what the training is like -------------------------------------------------------------

    def shape(self) -> Shape:
        """What RunStarted says of model and optimizer."""
        watched = self._watched[self._primary]
        optimizer = watched.optimizer()
        if optimizer is None:
            return {}
        return {
            "optimizer": type(optimizer).__name__[:200],
            "optimizers": self.optimizers,
            "groups": tuple(
                Group(
                    index=i,
                    parameters=len(group["params"]),
                    lr=models.rate(group, "lr"),
                    # Set by the constructor of a schedule (PyTorch's own and timm's).
                    initial_lr=models.rate(group, "initial_lr"),
                )
                for i, group in enumerate(optimizer.param_groups[:MAX_GROUPS])
            ),
            "tensors": len(watched.parameters),
            "parameters": sum(parameter.numel() for _, parameter in watched.parameters),
            "versions": {
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "cuda": torch.version.cuda if torch.cuda.is_available() else None,
            },
        }

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of all optimizers, each once."""
        found = {id(p): p for w in self._watched.values() for _, p in w.parameters}
        return list(found.values())

    def _watch(self, optimizer: torch.optim.Optimizer) -> Watched:
        entries = models.parameters_of(optimizer)
        parameters = [p for *_, p in entries]
        unknown = [p for p in parameters if id(p) not in self._name_of]
        order: dict[int, int] = {}
        if unknown:
            live = [m for m in (ref() for ref in self._modules) if m is not None]
            names = models.name_parameters(parameters, live)
            order = names.order
            if self._root is None and names.root is not None:
                self._root = weakref.ref(names.root)
            taken = set(self._name_of.values())
            for group, place, parameter in entries:
                if id(parameter) in self._name_of:
                    continue
                name = names.by_id.get(id(parameter), f"group{group}.{place}")
                if name in taken:
                    name = f"optimizer{len(self._watched)}.{name}"
                taken.add(name)
                self._name_of[id(parameter)] = name
        named = [(self._name_of[id(p)], p) for p in parameters]
        if order:
            last = len(order)
            named.sort(key=lambda pair: order.get(id(pair[1]), last))
        watched = Watched(weakref.ref(optimizer), len(parameters), named)
        self._watched[id(optimizer)] = watched
        return watched

    def _watched_of(self, optimizer: torch.optim.Optimizer) -> Watched:
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.optimizer() is not optimizer:
            if watched is None and len(self._watched) > 1000:
                self._watched = {self._primary: self._watched[self._primary]}
            self._modules = [weakref.ref(module) for module in models.find().modules]
            watched = self._watch(optimizer)
        elif watched.size != models.size(optimizer):
            steps = watched.steps
            self._modules = [weakref.ref(module) for module in models.find().modules]
            watched = self._watch(optimizer)
            watched.steps = steps
        return watched

    def _is_evaluating(self) -> bool:
        """Whether `model.eval()` was called; on the sender's thread too."""
        root = None if self._root is None else self._root()
        return root is not None and not root.training

    # -- what the hooks see --------------------------------------------------------------------

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that this optimizer is about to use, or has just used."""
        if is_recording():
            return
        watched = self._watched_of(optimizer)
        names, flat = [], []
        # Backward order: the gradient that was computed first stands first.
        for name, parameter in reversed(watched.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            tensor = dense(gradient)
            if tensor is None:
                self.skipped_tensors += 1
                continue
            names.append(name)
            flat.append(tensor)
        if not flat:
            self._parts.pop(id(optimizer), None)
            return
        step = self.training.next_step
        due = self.training.settings.due("gradients", step)
        part = part_of(names, flat, full=due)
        scale = getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor) and scale.device.type == "cpu":
            part.scale = float(scale)
        part.primary = id(optimizer) == self._primary
        if isinstance(part.norms, np.ndarray) and part.rows is None:
            odd = self._losses.nonfinite() is not None or not np.isfinite(part.norms).all()
            if odd and self._reporter.odd_streak < AT_ONCE:
                part.rows = rows_now(flat)
        self._parts[id(optimizer)] = part

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer is about to change its weights."""
        due = self.training.settings.due("weights", self.training.next_step)
        if due and id(optimizer) == self._primary and not is_recording():
            self._updates.before(self._watched_of(optimizer).parameters)

    def stepped(self, optimizer: torch.optim.Optimizer) -> int | None:
        """An optimizer has made a step; the number of it if it is the primary's, else None."""
        now = time.perf_counter()
        watched = self._watched_of(optimizer)
        watched.steps += 1
        if id(optimizer) != self._primary:
            self._others += 1
            stepping = watched.steps > self._watched[self._primary].steps + PRIMARY_PATIENCE
            gone = self._watched[self._primary].optimizer() is None
            if not gone and (not stepping or self._others <= PRIMARY_PATIENCE):
                self._losses.take()
                self._clipped.forget(p for _, p in watched.parameters)
                return None
            self._primary = id(optimizer)
        self._others = 0
        if models.found_inf(optimizer):
            # A fused optimizer under a GradScaler was called, and changed nothing.
            self._drop_step()
            return None
        step_time = None if self._ended_at is None else now - self._ended_at
        self._ended_at = now
        step = self.training.stepped(step_time)
        columns, values = [], []
        if step_time is not None:
            columns.append("step_time_s")
            values.append(step_time)
        for i, group in enumerate(optimizer.param_groups[:MAX_GROUPS]):
            rate = models.rate(group, "lr")
            if rate is not None:
                columns.append(f"lr.{i}")
                values.append(rate)
        if self._scaling:
            columns.append("scaler_skipped")
            values.append(float(self._skipped))
            self._skipped = 0
            self._skip_said = False
        settings = self.training.settings
        weights = self._weights(watched) if settings.due("weights", step) else None
        losses = self._losses.take()
        if isinstance(optimizer, torch.optim.LBFGS):
            losses = losses[:1]  # the closure runs up to max_iter times a step
        draft = Draft(
            step=step,
            at_us=time.time_ns() // 1000,
            columns=columns,
            values=values,
            losses=on_host(losses),
            parts=list(self._parts.values()),
            weights=weights,
            due=settings.due("gradients", step),
            local=self._local.take(self._name_of),
            clipped=on_host(self._clipped.take(p for _, p in watched.parameters)),
            updates=self.training.wall.call("updates", self._updates.after),
            activations=self.training.wall.call("activations", activations.take),
        )
        self.training.wall.call("activations", self._look_at_activations)
        self._parts.clear()
        if draft.ready and not self._waiting:
            self._reporter.finish(draft)
        else:
            self._waiting.append(draft)
            self._poll()
        if self._evaluated.waiting:
            self._evaluated.flush()
        if self._saved:
            self.report_checkpoints()
        return step

    def _look_at_activations(self) -> None:
        """Arm for the next step if it is due; the second step always is."""
        following = self.training.next_step
        if activations.blind:
            self.training.wall.switch_off("activations", COMPILED)
            return
        if following == 1 or self.training.settings.due("activations", following):
            activations.arm(None if self._root is None else self._root())

    def scaler_updated(self, made_step: bool) -> None:
        """GradScaler.update: without an optimizer step before it, the step was skipped."""
        self._scaling = True
        if made_step:
            return
        lost = self._losses.nonfinite()
        self._skipped += 1
        if lost is not None and not self._skip_said:
            # Not the scaler's business: the loss itself is bad, and no step may ever follow.
            self._skip_said = True
            row = StepRow(self.training.next_step, time.time_ns() // 1000, ("loss",), (lost,))
            self.training.sender.row(row, urgent=True)
        self._drop_step()

    def evaluation_loss(self, name: str, loss: torch.Tensor) -> None:
        """A loss of one number that was computed without a gradient."""
        self.training.activity += 1
        self._evaluated.add(name, loss)

    def saved(self, target: object, step: int | None, duration_s: float) -> None:
        """`torch.save` has written something; `step` is the last one when it began."""
        path = checkpoints.target_path(target)
        if path is None or step is None:
            return
        written = checkpoints.look(
            path,
            step=step,
            duration_s=duration_s,
            finite=None if self._waiting else self._reporter.finite_at(step),
        )
        if written is not None:
            self._saved.append(written)

    def report_checkpoints(self) -> None:
        """Say which files were written; later than `saved`, when they have their final names."""
        while self._saved:
            written = self._saved.popleft()
            path, size = checkpoints.final_path(written)
            checkpoint = Checkpoint(
                path=clip(str(path)), step=written.step, size_bytes=size, finite=written.finite
            )
            self.training.emit(
                CheckpointWritten(
                    **self.training.who, checkpoint=checkpoint, duration_s=written.duration_s
                )
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Hand over what is still waiting for the GPU, for at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        self._evaluated.flush()
        while (self._waiting or self._evaluated.waiting) and time.monotonic() < until:
            time.sleep(0.002)
            self._poll()
            self._evaluated.flush()
        self.report_checkpoints()

    # -- from tensors to records ---------------------------------------------------------------

    def _weights(self, watched: Watched) -> Part | None:
        if is_recording():
            return None
        names, flat = [], []
        for name, parameter in watched.parameters:
            tensor = dense(parameter)
            if tensor is None:
                self.skipped_tensors += 1
                continue
            names.append(name)
            flat.append(tensor)
        return part_of(names, flat, full=True) if flat else None

    def _drop_step(self) -> None:
        self._losses.take()
        self._clipped.clear()
        self._parts.clear()
        self._local.clear()
        self._updates.forget()

    def _poll(self) -> None:
        while self._waiting and self._waiting[0].ready:
            self._reporter.finish(self._waiting.popleft())
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
