"""timm as its own train.py uses it: a small ResNet, mixup, an average of weights, a schedule.

The images are made here: bars of two colours, in five directions. `--nan-at K` puts NaN into an
image of the batch of step K.
"""

import argparse
import math

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, accuracy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()
CLASSES = 5


def bars(count: int) -> TensorDataset:
    """Images of 64x64 points, each with waves in the direction of its class."""
    labels = torch.randint(CLASSES, (count,))
    angle = labels * math.pi / CLASSES
    y, x = torch.meshgrid(torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    waves = torch.sin(12 * along + torch.rand(count, 1, 1) * 6)
    images = waves[:, None] * torch.randn(count, 3, 1, 1) + torch.randn(count, 3, 64, 64) * 0.5
    return TensorDataset(images, labels)


timm.utils.random_seed(0)
train, valid = bars(512), bars(128)
loader_train = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
loader_eval = DataLoader(valid, batch_size=32)
model = timm.create_model("test_resnet", pretrained=False, num_classes=CLASSES, drop_path_rate=0.1)
model_ema = ModelEmaV3(model, decay=0.99)
optimizer = create_optimizer_v2(
    model, opt="adamw", lr=1e-3, weight_decay=0.05, filter_bias_and_bn=True
)
mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
lr_scheduler, num_epochs = create_scheduler_v2(
    optimizer,
    sched="cosine",
    num_epochs=arguments.epochs,
    warmup_epochs=1,
    warmup_lr=1e-5,
    step_on_epochs=False,
    updates_per_epoch=len(loader_train),
)
train_loss_fn = SoftTargetCrossEntropy()
validate_loss_fn = torch.nn.CrossEntropyLoss()
num_updates = 0
for epoch in range(num_epochs):
    model.train()
    losses_m = AverageMeter()
    for input, target in loader_train:
        input, target = mixup_fn(input, target)
        if num_updates == arguments.nan_at:
            input[0] = float("nan")
        loss = train_loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_updates += 1
        model_ema.update(model, step=num_updates)
        losses_m.update(loss.item(), input.size(0))
        lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    for name, network in (("model", model), ("ema", model_ema)):
        network.eval()
        top1_m, eval_losses_m = AverageMeter(), AverageMeter()
        with torch.inference_mode():
            for input, target in loader_eval:
                output = network(input)
                eval_losses_m.update(validate_loss_fn(output, target).item(), input.size(0))
                top1_m.update(accuracy(output, target)[0].item(), input.size(0))
        print(
            f"epoch {epoch} {name}: train {losses_m.avg:.4f} eval {eval_losses_m.avg:.4f} "
            f"top1 {top1_m.avg:.1f}",
            flush=True,
        )
    lr_scheduler.step(epoch + 1, eval_losses_m.avg)
