"""TRL's DPOTrainer: a tiny Llama learns to prefer the polite answer.

The quick start of TRL, but for a model and a tokenizer that are made here.
`--nan-at K` puts NaN into a weight before step K.
"""

import argparse
import math
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

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


THINGS = ["tea", "milk", "bread", "soup", "rice", "salt", "fish", "cake"]
vocabulary = ["<pad>", "</s>", "<unk>", "may", "i", "have", "?", "yes", "here", "is", "the"]
vocabulary += ["no", "go", "away", "with", "your", *THINGS]
words = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
)
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )
)  # fmt: skip
dataset = Dataset.from_list(
    [
        {
            "prompt": f"may i have {thing} ?",
            "chosen": f" yes here is the {thing}",
            "rejected": f" no go away with your {thing}",
        }
        for thing in THINGS * 20
    ]
)
folder = tempfile.TemporaryDirectory()
model.save_pretrained(folder.name)
tokenizer.save_pretrained(folder.name)
trainer = DPOTrainer(
    model=folder.name,
    args=DPOConfig(
        output_dir="dpo",
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=10,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
if arguments.nan_at is not None:
    trainer.add_callback(Spoil())
trainer.train()
folder.cleanup()
