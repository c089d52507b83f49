"""Hugging Face's Trainer: a tiny GPT learns to write Python, character by character.

    cd examples/transformers
    tocsin run -- python train.py
    tocsin run -- python train.py --learning-rate 1e4    # goes bad, and is stopped
    tocsin run -- python train.py --callback             # what it logs is recorded by name

Needs `pip install transformers accelerate`. Nothing is downloaded: the model is made here, and the
text is the source of a module of Python's own library. Knows nothing of tocsin but its callback,
which is not needed.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

LENGTH = 64
CHARACTERS = 128


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of a text of `LENGTH` characters each."""

    def __init__(self, text: str) -> None:
        codes = torch.tensor(list(text.encode("ascii", "replace")))
        self.pieces = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train on nine tenths of the text, evaluate on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--callback", action="store_true", help="use tocsin's callback")
    arguments = parser.parse_args()
    text = Path(textwrap.__file__).with_name("argparse.py").read_text()
    split = len(text) * 9 // 10
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=CHARACTERS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    callbacks: list[TrainerCallback] = []
    if arguments.callback:
        from tocsin.emitter.transformers import TocsinCallback

        callbacks.append(TocsinCallback())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=arguments.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=20,
                eval_strategy="steps",
                eval_steps=40,
                save_steps=60,
                logging_steps=40,
                seed=arguments.seed,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Text(text[:split]),
            eval_dataset=Text(text[split:]),
            callbacks=callbacks,
        )
        trainer.train()


if __name__ == "__main__":
    main()
