"""The Trainer of sentence-transformers: a tiny BERT learns which sentences mean the same.

The quick start of sentence-transformers, but for a model and a tokenizer that are made here.
`--nan-at K` puts NaN into a weight before step K.
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.evaluation import TripletEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, TrainerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()


class Spoil(TrainerCallback):
    """Puts NaN into a weight."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        if state.global_step == arguments.nan_at:
            with torch.no_grad():
                next(w for w in kwargs["model"].parameters() if w.requires_grad).fill_(math.nan)


WHO = ["the king", "a child", "my friend", "the doctor", "a farmer", "the old man"]
ACTS = [
    ("eats an apple", "has a fruit for lunch"),
    ("reads a book", "looks at printed pages"),
    ("runs home", "hurries to the house"),
    ("sings a song", "makes music loudly"),
    ("drives a car", "steers a vehicle"),
    ("plants a tree", "puts a seedling into soil"),
    ("paints a wall", "covers stone with colour"),
    ("sells old shoes", "trades in used boots"),
]
rows = [
    {"anchor": f"{who} {act}", "positive": f"{who} {same}", "negative": f"{who} {other[1]}"}
    for who, (act, same) in itertools.product(WHO, ACTS)
    for other in ACTS
    if other[0] != act
]
dataset = Dataset.from_list(rows).train_test_split(test_size=48, seed=0)

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    words = sorted({word for row in rows for text in row.values() for word in text.split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *words]))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words) + len(special), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    transformer = Transformer(name)
    model = SentenceTransformer(modules=[transformer, Pooling(32)])
evaluator = TripletEvaluator(
    dataset["test"]["anchor"], dataset["test"]["positive"], dataset["test"]["negative"], name="dev"
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="sentences",
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    loss=MultipleNegativesRankingLoss(model),
    evaluator=evaluator,
)
if arguments.nan_at is not None:
    trainer.add_callback(Spoil())
trainer.train()
