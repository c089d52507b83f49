"""Lightning: a small network learns handwritten digits, with an evaluation after each epoch.

    cd examples/lightning
    tocsin run -- python train.py
    tocsin run -- python train.py --learning-rate 1e6    # goes bad, and is stopped
    tocsin run -- python train.py --callback             # what it logs is recorded by name

Needs `pip install lightning scikit-learn`, with which the data comes. Knows nothing of tocsin but
its callback, which is not needed.
"""

from __future__ import annotations

import argparse
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64


class Digits(lightning.LightningDataModule):
    """1,797 images of 8x8 pixels; every fifth is kept for the evaluation."""

    def setup(self, stage: str) -> None:
        """Read and divide them."""
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32) / 16
        classes = torch.tensor(labels)
        held_out = torch.arange(len(classes)) % 5 == 0
        self.train = TensorDataset(images[~held_out], classes[~held_out])
        self.validation = TensorDataset(images[held_out], classes[held_out])

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Shuffled anew for each epoch."""
        return DataLoader(self.train, batch_size=BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Always in the same order."""
        return DataLoader(self.validation, batch_size=BATCH)


class Classifier(lightning.LightningModule):
    """Two layers, a loss, and AdamW with one cycle of the learning rate."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss: torch.Tensor = self.loss(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Log loss and accuracy of a batch that is not trained on."""
        images, labels = batch
        logits = self.layers(images)
        self.log("loss", self.loss(logits, labels))
        self.log("accuracy", (logits.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW; the schedule is called after each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, evaluate, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--callback", action="store_true", help="use tocsin's callback")
    arguments = parser.parse_args()
    lightning.seed_everything(arguments.seed, verbose=False)
    model = Classifier(arguments.learning_rate)
    callbacks: list[lightning.Callback] = []
    if arguments.callback:
        from tocsin.emitter.lightning import TocsinCallback

        callbacks.append(TocsinCallback())
    with tempfile.TemporaryDirectory() as folder:
        callbacks.append(ModelCheckpoint(dirpath=folder, monitor="loss"))
        trainer = lightning.Trainer(
            max_epochs=arguments.epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, datamodule=Digits())
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"{trainer.global_step} steps, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
