"""TRL's SFTTrainer with LoRA: a tiny Llama learns questions and answers about sums.

The quick start of TRL, but for a model and a tokenizer that are made here.
`--nan-at K` puts NaN into a weight before step K.
"""

import argparse
import math
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()


class Spoil(TrainerCallback):
    """Puts NaN into a weight."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        if state.global_step == arguments.nan_at:
            with torch.no_grad():
                next(w for w in kwargs["model"].parameters() if w.requires_grad).fill_(math.nan)


WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
vocabulary = ["<pad>", "</s>", "<unk>", "what", "is", "plus", "?", "it", ".", *WORDS]
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
pairs = [(a, b) for a in range(10) for b in range(10) if a + b < 10]
dataset = Dataset.from_list(
    [
        {
            "prompt": f"what is {WORDS[a]} plus {WORDS[b]} ?",
            "completion": f" it is {WORDS[a + b]} .",
        }
        for a, b in pairs * 10
    ]
)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="sft",
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
if arguments.nan_at is not None:
    trainer.add_callback(Spoil())
trainer.train()
