"""A small GPT learns to write Python's own help texts, which ship with Python.

python -m tocsin.console.demo.trainings.gpt --steps 200
python -m tocsin.console.demo.trainings.gpt --fault nan_gradient --fault-at 50
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

from tocsin.console.demo.trainings import common

BYTES = 256
FAULTS = ("nan_gradient", "nan_loss")


@dataclasses.dataclass(frozen=True, slots=True)
class GptSize:
    """The shape of the model and of one batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocabulary: int = BYTES
    fused_attention: bool = True


SIZES = {
    "test": GptSize(layers=4, width=96, heads=4, context=64, batch=8),
    # One tensor for each projection: more and smaller tensors, the harder case for a watcher.
    "bench": GptSize(6, 256, 8, context=128, batch=8, vocabulary=4096, fused_attention=False),
}


class Attention(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Causal self-attention."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.fused = size.fused_attention
        if self.fused:
            self.qkv = nn.Linear(size.width, 3 * size.width)
        else:
            self.query = nn.Linear(size.width, size.width)
            self.key = nn.Linear(size.width, size.width)
            self.value = nn.Linear(size.width, size.width)
        self.output = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = (
            self.qkv(x).chunk(3, dim=-1)
            if self.fused
            else (self.query(x), self.key(x), self.value(x))
        )
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention and a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            collections.OrderedDict(
                up=nn.Linear(size.width, 4 * size.width),
                activation=nn.GELU(),
                down=nn.Linear(4 * size.width, size.width),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A decoder-only transformer: token numbers in, logits of the next token out."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(size.vocabulary, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def text_tokens(vocabulary: int) -> torch.Tensor:
    """Return Python's help topics as token numbers.

    The first 256 tokens are the bytes; the others the most frequent words of the text. A word
    outside the vocabulary is spelt in bytes.
    """
    words = re.findall(r" ?\w+|\W", "\n".join(topics[name] for name in sorted(topics)))
    counted = collections.Counter(word for word in words if len(word.encode()) > 1)
    frequent = sorted(counted, key=lambda word: (-counted[word], word))[: vocabulary - BYTES]
    number = {word: BYTES + index for index, word in enumerate(frequent)}
    tokens: list[int] = []
    for word in words:
        tokens.extend([number[word]] if word in number else word.encode())
    return torch.tensor(tokens)


def batches(
    tokens: torch.Tensor, size: GptSize, *, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, next tokens) cut from random places of the text, for ever."""
    chance = torch.Generator().manual_seed(seed)
    window = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(len(tokens) - size.context, (size.batch, 1), generator=chance)
        piece = tokens[starts + window]
        yield piece[:, :-1], piece[:, 1:]


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, GptSize]:
    parser = common.training_parser(
        "Train a small GPT on English text that ships with Python.",
        learning_rate=3e-4,
        faults=FAULTS,
        sizes=tuple(SIZES),
    )
    parser.add_argument("--layers", type=int, help="default: the size's own, as the next two")
    parser.add_argument("--width", type=int, help="a multiple of the number of heads")
    parser.add_argument("--context", type=int, help="tokens of one sample")
    parser.add_argument(
        "--fault-tensor", metavar="NAME", help="default: attention weights of the last block"
    )
    arguments = parser.parse_args(argv)
    given = {
        name: getattr(arguments, name)
        for name in ("layers", "width", "context", "batch")
        if getattr(arguments, name) is not None
    }
    return arguments, dataclasses.replace(SIZES[arguments.size], **given)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit code."""
    arguments, size = _arguments(argv)
    device = common.prepare(seed=arguments.seed, threads=arguments.threads, device=arguments.device)
    model = Gpt(size).to(device)
    first_projection = "qkv" if size.fused_attention else "query"
    fault_tensor = (
        arguments.fault_tensor or f"blocks.{size.layers - 1}.attention.{first_projection}.weight"
    )
    fault_parameter = common.parameter_named(model, fault_tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    data = batches(text_tokens(size.vocabulary), size, seed=arguments.seed)
    printer = common.Printer(every=arguments.print_every, times=arguments.times)
    step = 0
    try:
        for step in range(arguments.steps):
            fault = arguments.fault if step == arguments.fault_at else None
            tokens, targets = (part.to(device) for part in next(data))
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            if fault == "nan_loss":
                loss = loss * float("nan")
                printer.fault(fault, step, "the loss is NaN")
            optimizer.zero_grad()
            loss.backward()
            if fault == "nan_gradient":
                common.poison_gradient(fault_parameter)
                printer.fault(fault, step, f"one NaN in the gradient of {fault_tensor}")
            optimizer.step()
            printer.step(step, loss)
            if arguments.save_every and (step + 1) % arguments.save_every == 0:
                common.save_checkpoint(
                    arguments.save_to, step=step, model=model, optimizer=optimizer
                )
    finally:
        printer.left(step)
    common.finish(model, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
