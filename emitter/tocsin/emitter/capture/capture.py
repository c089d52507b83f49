"""The numbers of each step of a training in torch, from what the hooks see.

The hooks (`tocsin.emitter.hooks.torch_patches`) call this isolated. Nothing here changes a
tensor of the user's, keeps a graph alive, touches a random generator, or waits for a GPU: on a GPU
results are copied without waiting and read at a later step.

The schedule (`tocsin.emitter.plan.schedule`) decides how deep a step is read: what each step costs
is a few microseconds of Python and a block of each gradient. Here are the scalars of a step and its
gradients; all else is read by the probes of the list (`tocsin.emitter.capture.probe_list`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import torch
from torch import nn

from tocsin.emitter.capture.hook_probes import HookProbes
from tocsin.emitter.capture.step_records import AT_ONCE, Draft, Reporter
from tocsin.emitter.model import discovery
from tocsin.emitter.model.discovery import MAX_GROUPS
from tocsin.emitter.model.optimizers import Optimizers, WatchedOptimizer
from tocsin.emitter.model.shared_losses import BackwardSharing
from tocsin.emitter.plan.schedule import NORMS, Due
from tocsin.emitter.probes.clipped_norms import Clipped, ClippedNorms
from tocsin.emitter.probes.gradients import GradientReader, Reading
from tocsin.emitter.probes.local_gradients import LOCAL_GRADIENTS, LocalGradients
from tocsin.emitter.probes.loss_scaler import LossScaler
from tocsin.emitter.probes.losses import Loss, LossBuffer, on_host
from tocsin.emitter.probes.skipped_steps import SkippedSteps
from tocsin.emitter.statistics.async_copy import HostCopy, is_recording
from tocsin.emitter.statistics.reductions import dense
from tocsin.emitter.statistics.tensor_rows import TensorRows, Wanted
from tocsin.emitter.training.training import Training
from tocsin.schemas.monotonic_clock import unix_us
from tocsin.schemas.records.program_facts import OptimizersSeen

SHARING: Final = "optimizers of one loss"

MAX_WAITING: Final = 1024
"""Steps whose numbers may be on their way from the GPU. Its queue holds some 1,000 launches: many
small steps, where a loop never waits for it."""


class FastPathControl(Protocol):
    """The fast path of the steps, as capture needs it."""

    until: int
    """The first step that takes the long way again."""

    def allow(
        self, capture: Capture, optimizer: torch.optim.Optimizer, until: int, *, nonfinite: bool
    ) -> None:
        """Up to that step, steps of this optimizer need not ask capture; nor need they be looked at
        at all, unless the last was `nonfinite`.
        """
        ...

    def refuse(self) -> None:
        """The next step goes the long way."""
        ...


class Capture:
    """The numbers of one training."""

    def __init__(
        self,
        training: Training,
        first: torch.optim.Optimizer,
        losses: LossBuffer,
        local: LocalGradients,
        clipped: ClippedNorms,
        hook_probes: HookProbes,
        fast_path: FastPathControl,
        *,
        preferred: torch.optim.Optimizer | None = None,
        used: Collection[torch.optim.Optimizer] = (),
        model: nn.Module | None = None,
    ) -> None:
        self.training: Final = training
        self._losses = losses
        self._local = local
        self._clipped = clipped
        self._hook_probes = hook_probes
        self._fast_path: Final = fast_path
        self.shared: list[Loss] = []
        """Losses that another optimizer has taken, for the one whose steps count."""
        self.optimizers: Final = Optimizers(first, preferred, used, model)
        self.optimizers.is_one_of_ranks = training.identity.world_size > 1
        self.schedule: Final = training.schedule
        training.is_evaluating = self._is_evaluating
        training.is_finite = self._weights_are_finite
        self.probes: Final = hook_probes.probes
        self._gradients: Final = GradientReader(self.schedule, self.optimizers)
        self._readings: dict[int, Reading] = {}
        self.waiting: Final[deque[Draft]] = deque()
        """Steps whose numbers are still on their way from a GPU, in order."""
        self._ended_at: float | None = None
        self._unseen = False
        """Whether steps may have been passed over since one was looked at."""
        self._reporter = Reporter(training, self.schedule)
        self._scaler: Final = LossScaler(training, losses)
        self._skips: Final = SkippedSteps(training)
        self._local_s = 0.0
        self._sharing: Final = BackwardSharing()
        if self.optimizers.homeless:
            training.isolation.switch_off(
                "model",
                "no module was found that has the optimizer's parameters (after gc.freeze(), or in "
                "a very large heap), so activations and names are missing; try "
                "tocsin.emitter.start().watch(model)",
            )
        hook_probes.start(training, self.optimizers)
        probes = self.probes.all
        training.skipped_tensors = lambda: self._gradients.skipped + sum(p.skipped for p in probes)

    def _report_sharing(self, step: int) -> None:
        if (found := self._sharing.news()) is not None:
            optimizers, losses = found
            self.training.emit(
                OptimizersSeen(**self.training.who, optimizers=optimizers, losses=losses, step=step)
            )

    def parameters(self) -> list[torch.Tensor]:
        """All parameters of all optimizers, of any shape, each once."""
        return self.optimizers.parameters()

    def _weights_are_finite(self) -> bool:
        tensors = (dense(parameter.detach()) for parameter in self.parameters())
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)

    def _is_evaluating(self) -> bool:
        """Whether `model.eval()` was called; on the sender's thread too."""
        root = self.optimizers.root
        return root is not None and not root.training

    # -- what the hooks see --------------------------------------------------------------------

    def gradients(
        self, optimizer: torch.optim.Optimizer, *, bad: bool = False, used: bool = False
    ) -> None:
        """The gradients that this optimizer is about to use, or has just `used`; `bad`: one of them
        is known not to be finite.
        """
        if is_recording():
            return
        reading = self._gradients.read(
            self.optimizers.watched(optimizer),
            self.training.next_step,
            nonfinite=bad or self._losses.nonfinite() is not None,
            at_once=self._reporter.nonfinite_streak < AT_ONCE,
        )
        if reading is None:
            self._readings.pop(id(optimizer), None)
            return
        # A fused one has divided them itself, once they are used.
        scale = None if used else getattr(optimizer, "grad_scale", None)
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            if scale.device.type == "cpu":
                reading.scale = float(scale)
            elif reading.has_numbers or self._clipped.any:
                reading.scale = HostCopy(scale.detach().reshape(1))
        self._readings[id(optimizer)] = reading

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer is about to change its weights."""
        due = self.schedule.due(self.training.next_step)
        if due and self.optimizers.is_primary(optimizer) and not is_recording():
            self.probes.updating(self.optimizers.watched(optimizer), due)

    def stepped(
        self, optimizer: torch.optim.Optimizer, *, backward: bool = True, quick: bool = False
    ) -> int | None:
        """An optimizer has made a step; the number of it if it is the primary's, else None.

        `backward`: whether there was a backward call since any optimizer's last step. `quick`: it
        is one that is known, and need not be looked at as closely as may be.
        """
        now, isolation = time.perf_counter(), self.training.isolation
        watched = self.optimizers.watched(optimizer, check=not quick)
        if not quick:
            isolation.run(SHARING, self._sharing.stepped, optimizer, backward=backward)
        if not self.optimizers.counts(optimizer, watched, check=not quick):
            losses = self._losses.drain()
            self.shared = losses or self.shared
            self._hook_probes.other_stepped(
                optimizer,
                losses,
                self.optimizers.modules,
                norm=self.schedule.is_due(NORMS, self.training.next_step),
            )
            if self._clipped.any:
                self._clipped.discard(p for _, p in watched.parameters)
            return None
        if discovery.found_inf(optimizer):
            # A fused optimizer under a GradScaler was called, and changed nothing.
            self._losses.skipped += 1
            self._drop_step()
            return None
        step_time = self.ended(now)
        step = self.training.stepped(step_time)
        columns, values = self._scalars(optimizer, step_time)
        if self._skips.any:
            self._skips.made(step, columns, values)
            self._hook_probes.checks.stepped_after_skips(step, self._hook_probes.loaders.newest)
        # Several that step after one backward call share its loss, whoever comes first.
        losses, self.shared = self._losses.drain() or self.shared, []
        if isinstance(optimizer, torch.optim.LBFGS):
            losses = losses[:1]  # the closure runs up to max_iter times a step
        draft = Draft(
            step=step,
            at_us=unix_us(),
            columns=columns,
            values=values,
            losses=on_host(losses),
            readings=list(self._readings.values()),
            clipped=self._clipped.drain(watched),
            local=self._local.drain(self.optimizers.names),
        )
        self._readings.clear()
        if due := self.schedule.due(step):
            draft.weights = isolation.run("weights", self._weights, watched, due)
        draft.probed = self.probes.read(step, watched, due)
        self.probes.prepare(step + 1, self.schedule.due(step + 1))
        if not self.waiting and draft.ready:
            isolation.run("report", self._reporter.finish, draft)
        else:
            self.waiting.append(draft)
            self.poll()
        self.training.step_at_us = draft.at_us
        self.probes.stepped(self.training, step)
        isolation.run(SHARING, self._report_sharing, step)
        if self._local.active:
            spent_s = isolation.spent.get(LOCAL_GRADIENTS, 0.0)
            self._local.plan(self.schedule, step + 1, spent_s - self._local_s)
            self._local_s = spent_s
        if step_time is not None and step > 1:
            self.schedule.stepped(step_time, isolation.seconds)
        until = self.quiet_until(step + 1)
        self._fast_path.allow(self, optimizer, until, nonfinite=self._reporter.nonfinite_streak > 0)
        return step

    def held_back(self, optimizer: torch.optim.Optimizer, timeout_s: float) -> None:
        """This optimizer's update is not made, since a gradient is not finite: send what is known
        of the step in progress. Waits for a GPU, for at most `timeout_s`.
        """
        self.gradients(optimizer, bad=True)
        self._skips.withheld(self.training.next_step)
        # The rates belong to it: a step without them is one that a loss scaler has skipped.
        columns, values = self._scalars(optimizer, None)
        losses, self.shared = self._losses.drain() or self.shared, []
        draft = Draft(
            step=self.training.next_step,
            at_us=unix_us(),
            columns=columns,
            values=values,
            losses=on_host(losses),
            readings=list(self._readings.values()),
            clipped=self._clipped.drain(self.optimizers.watched(optimizer)),
            local=self._local.drain(self.optimizers.names),
        )
        self._readings.clear()
        self.waiting.append(draft)
        until = time.monotonic() + timeout_s
        while self._flush() and time.monotonic() < until:
            time.sleep(0.002)

    @property
    def ended_at(self) -> float:
        """When the last step ended, by the clock of `time.perf_counter`."""
        return self._ended_at or 0.0

    def looks_away(self) -> None:
        """Steps are passed over from here on: what was seen last does not hold for the weights."""
        self._unseen = True

    def passed(self, steps: int, now: float) -> None:
        """So many steps were passed over; the last of them ended at `now`."""
        self._ended_at = now
        self.optimizers.passed(steps)

    def ended(self, now: float) -> float | None:
        """A step of the training ends; how long it took, seconds. None: it was the first."""
        self._unseen = False
        before, self._ended_at = self._ended_at, now
        return None if before is None else now - before

    def quiet_until(self, step: int) -> int:
        """The first step from this one on that may have more to send than loss, times and rates,
        and than what goes on around it.
        """
        if (
            self._skips.any
            or self._local.active
            or not self._reporter.each_loss
            or self.training.identity.world_size > 1
        ):
            return 0
        return min(self.probes.next_read, self.schedule.quiet_until(step))

    def stepped_quickly(
        self,
        step: int,
        at_us: int,
        columns: Sequence[str],
        values: Sequence[float],
        losses: list[Loss],
        clipped: Clipped | None,
    ) -> None:
        """A step went the quick way, and its losses, or those of steps before, are on their way:
        to be sent by a later `poll`. Each is a number, or a tensor `[1]` on a GPU.
        """
        coming = on_host(losses)
        draft = Draft(step, at_us, [*columns], [*values], coming, [], clipped, local=None)
        self.waiting.append(draft)

    def usual_scaler(self) -> tuple[float, ...] | None:
        """The values of a GradScaler in a usual step; None: the step is not usual."""
        if self._skips.any:
            return None
        if not (self._scaler.active or self._losses.skipped):
            return ()
        return self._scaler.usual()

    def settled(self, now: float) -> float:
        """A step went the quick way: what was kept for it is used up. How long it took, seconds."""
        self._losses.held = []
        if self._clipped.any:
            self._clipped.clear()
        if self._readings:
            self._readings.clear()
        if self.shared:
            self.shared = []
        before, self._ended_at, self._unseen = self._ended_at, now, False
        return 0.0 if before is None else now - before

    def _scalars(
        self, optimizer: torch.optim.Optimizer, step_time: float | None
    ) -> tuple[list[str], list[float]]:
        columns, values = self._hook_probes.phases.drain()
        if step_time is None:
            columns, values = [], []  # of the first step only the end was seen
        else:
            columns.append("step_time_s")
            values.append(step_time)
        for i, group in enumerate(optimizer.param_groups[:MAX_GROUPS]):
            rate = discovery.rate(group, "lr")
            if rate is not None:
                columns.append(f"lr.{i}")
                values.append(rate)
        self._scaler.add_to(columns, values)
        return columns, values

    def scaler_updated(self, scaler: object, *, made_step: bool) -> None:
        """GradScaler.update: without an optimizer step before it, the step was skipped."""
        if self._scaler.updated(scaler, made_step=made_step):
            self._fast_path.until = 0
            self._drop_step()

    def batch_skipped(self) -> None:
        """The loop has thrown away the gradients of what it computed since the last step."""
        self._fast_path.until = 0
        self._hook_probes.checks.batch_skipped()
        self._drop_step(by_loop=True)

    def bad_loss(self, loss: object) -> None:
        """This loss, a tensor with its graph, is not finite, and its backward call comes now. Takes
        up to a second: the origin is looked for.
        """
        self._skips.bad_loss(loss, self.optimizers.names, self.optimizers.state_of)

    def is_finite(self, step: int | None) -> bool | None:
        """Whether the weights after this step are finite, as far as it is known now."""
        if self.waiting or self._unseen or step is None:
            return None
        return self._reporter.finite_at(step)

    def close(self, timeout_s: float) -> None:
        """Hand over what is still waiting for the GPU; waits for that for at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        while self._flush() and time.monotonic() < until:
            time.sleep(0.002)
        self.probes.close(self.training)

    # -- from tensors to records ---------------------------------------------------------------

    def _weights(self, watched: WatchedOptimizer, due: Due) -> TensorRows | None:
        plans = (*due.get("weights", ()), *due.get("biases", ()))
        if not plans or is_recording():
            return None
        # The samples in front of the step have begun the pass.
        with self.schedule.costs(*(plan.name for plan in plans), more="weights" in due):
            names, flat = [], []
            for name, parameter in watched.parameters:
                tensor = dense(parameter)
                if tensor is None:
                    continue
                names.append(name)
                flat.append(tensor)
            wanted = [Wanted(p.name, self.optimizers.chosen(watched, p), p.columns) for p in plans]
            return TensorRows(names, flat, wanted) if flat else None

    def _drop_step(self, *, by_loop: bool = False) -> None:
        self._skips.skipped(self._losses.drain(), by_loop=by_loop)
        self._clipped.clear()
        self._readings.clear()
        self._local.clear()
        self.probes.dropped()

    def _flush(self) -> bool:
        """Send what has arrived; whether something is still on its way."""
        self.poll()
        return self.probes.flush() or bool(self.waiting)

    def poll(self) -> None:
        """Send the steps whose numbers have arrived; never waits."""
        while self.waiting and self.waiting[0].ready:
            self.training.isolation.run("report", self._reporter.finish, self.waiting.popleft())
            if self._reporter.nonfinite_streak:
                self._fast_path.refuse()
        while len(self.waiting) > MAX_WAITING:
            self.waiting.popleft()
