"""Language models that are given what they are asked for, and others that look alike: tiny real
trainings, under capture and the rule."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.trainings.watched import watch
from tocsin.emitter.probes.activations.compiled import slots
from tocsin.emitter.probes.activations.watch import activations
from tocsin.emitter.probes.program_checks.token_targets import StepTokens, TokenTargets
from tocsin.stream_rules.testing import only

VOCABULARY, PLACES, WIDTH, BATCH = 50, 12, 16, 6
LEAK = only("target_leak")

Step = Callable[[torch.Tensor], torch.Tensor]
"""From tokens [batch, places + 1] to a loss."""


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have: from then on calls are left alone."""
    monkeypatch.setattr(activations.patches, "for_good", False)
    monkeypatch.setattr(slots, "compiling", False)
    if "__call__" in nn.Linear.__dict__:
        monkeypatch.delattr(nn.Linear, "__call__")


class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Embeddings, something in between that mixes places, and a head."""

    def __init__(self, mixer: nn.Module, classes: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(2 * PLACES, WIDTH)
        self.mixer = mixer
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1]).expand(ids.shape)
        return self.head(self.mixer(self.tokens(ids) + self.places(at)))


class Written(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention by hand: over its logits a softmax of each kind."""

    def __init__(self, softmax: Callable[[torch.Tensor], torch.Tensor], causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax, self.causal = softmax, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(2, 3)
        logits = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
        if self.causal:
            later = torch.ones(logits.shape[-2:]).triu(1).bool()
            logits = logits.masked_fill(later, -1e9)
        return (self.softmax(logits) @ v).transpose(1, 2).flatten(2)


class Fused(nn.Module):  # type: ignore[misc]  # torch has no types here
    """`scaled_dot_product_attention`, causal or with a mask for these places."""

    def __init__(
        self, *, causal: bool = False, mask: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.causal, self.mask = causal, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(2, 3)
        mask = None if self.mask is None else self.mask(x.shape[1])
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return mixed.transpose(1, 2).flatten(2)


class Layers(nn.Module):  # type: ignore[misc]  # torch has no types here
    """PyTorch's own, with or without a mask."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.layers, self.causal = nn.TransformerEncoder(layer, 2), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask if self.causal else None)


class Heads(nn.Module):  # type: ignore[misc]  # torch has no types here
    """`MultiheadAttention` that gives its probabilities, places first."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = nn.MultiheadAttention(WIDTH, 2), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        mask = torch.ones(len(x), len(x)).triu(1).bool() if self.causal else None
        mixed, _ = self.attention(x, x, x, attn_mask=mask)
        return mixed.transpose(0, 1)


class Lstm(nn.LSTM):  # type: ignore[misc]  # torch has no types here
    def __init__(self, *, bidirectional: bool = False) -> None:
        width = WIDTH // 2 if bidirectional else WIDTH
        super().__init__(WIDTH, width, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


class Pair(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An encoder and a decoder with attention to it."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder: nn.Module = Lstm() if recurrent else Layers(causal=False)
        self.decoder: nn.Module = Lstm() if recurrent else Layers(causal=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        known, x = self.encoder(self.tokens(source)), self.decoder(self.tokens(read))
        looked = (x @ known.transpose(1, 2)).softmax(-1) @ known
        return self.head(x + looked)


def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def language(mixer: nn.Module, *, shift: int = 1) -> tuple[nn.Module, Step]:
    model = Model(mixer)
    return model, lambda x: entropy(model(x[:, :-1]), x[:, shift : PLACES + shift])


def shifts_inside(mixer: nn.Module) -> tuple[nn.Module, Step]:
    """As models do that are given their inputs as labels: the last target is left out."""
    model = Model(mixer)

    def step(x: torch.Tensor) -> torch.Tensor:
        targets = functional.pad(x[:, 1:], (0, 1), value=-100)
        return functional.cross_entropy(model(x).flatten(0, 1), targets.flatten())

    return model, step


def cut(mixer: nn.Module, *, shift: int) -> tuple[nn.Module, Step]:
    """The outputs are cut, and the targets are."""
    model = Model(mixer)
    return model, lambda x: entropy(model(x)[:, :-1], x[:, shift : PLACES + shift])


def places_first(mixer: nn.Module, *, shift: int) -> tuple[nn.Module, Step]:
    """Tokens lie as [places, batch]."""
    model = Model(mixer)

    class Turned(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.mixer, self.head = model.tokens, mixer, model.head

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.mixer(self.tokens(ids).transpose(0, 1)).transpose(0, 1))

    turned = Turned()
    return turned, lambda x: entropy(turned(x.T[:-1]), x.T[shift : PLACES + shift])


def masked(mixer: nn.Module) -> tuple[nn.Module, Step]:
    """Some tokens are hidden, and only they are targets."""
    model = Model(mixer)

    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand(x.shape) < 0.3
        return entropy(model(x.masked_fill(hidden, 0)), x.masked_fill(~hidden, -100))

    return model, step


def restored(mixer: nn.Module) -> tuple[nn.Module, Step]:
    """An autoencoder of tokens, and what copies in both directions."""
    model = Model(mixer)
    return model, lambda x: entropy(model(x), x)


def copied(*, recurrent: bool) -> tuple[nn.Module, Step]:
    """The source is the target, and the decoder is given it, too, one place later."""
    model = Pair(recurrent=recurrent)
    return model, lambda x: entropy(model(x[:, 1:], x[:, :-1]), x[:, 1:])


def labelled(mixer: nn.Module) -> tuple[nn.Module, Step]:
    model = Model(mixer, classes=3)
    return model, lambda x: functional.cross_entropy(model(x).mean(1), x[:, 0] % 3)


def tagged(mixer: nn.Module) -> tuple[nn.Module, Step]:
    model = Model(mixer, classes=3)
    return model, lambda x: entropy(model(x), x % 3)


def matched(mixer: nn.Module) -> tuple[nn.Module, Step]:
    """Each sample against all others, the targets are their numbers."""
    model = Model(mixer)

    def step(x: torch.Tensor) -> torch.Tensor:
        one, other = model(x).mean(1), model(x.flip(1)).mean(1)
        return functional.cross_entropy(one @ other.T, torch.arange(len(x)))

    return model, step


def causal_for(places: int) -> torch.Tensor:
    return torch.full((places, places), -math.inf).triu(1)[None, None]


def open_for(places: int) -> torch.Tensor:
    return torch.ones(BATCH, 1, 1, places, dtype=torch.bool)


def found(
    folder: Path, made: Callable[[], tuple[nn.Module, Step]]
) -> list[tuple[str, str, int | None]]:
    def train() -> None:
        torch.manual_seed(0)
        model, step = made()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(6):
            tokens = torch.randint(1, VOCABULARY, (BATCH, PLACES + 1))
            optimizer.zero_grad()
            step(tokens).backward()
            optimizer.step()

    issues = watch(folder, train, specs=LEAK)
    return [(i.branch, i.severity, i.first_step) for i in issues if i.state == "firing"]


def by_function(logits: torch.Tensor) -> torch.Tensor:
    return functional.softmax(logits, dim=-1)


def by_torch(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, -1)


def by_method(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=3)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: language(Fused()), id="fused"),
        pytest.param(lambda: language(Fused(mask=open_for)), id="a mask for padding alone"),
        pytest.param(lambda: shifts_inside(Fused()), id="shifted inside"),
        pytest.param(lambda: cut(Fused(), shift=1), id="cut"),
        pytest.param(lambda: language(Layers(causal=False)), id="PyTorch's layers"),
        pytest.param(lambda: language(Heads(causal=False)), id="PyTorch's heads"),
        pytest.param(lambda: language(Written(by_function, causal=False)), id="F.softmax"),
        pytest.param(lambda: language(Written(by_torch, causal=False)), id="torch.softmax"),
        pytest.param(lambda: places_first(Written(by_method, False), shift=1), id="places first"),
    ],
)
def test_a_language_model_without_causal_mask(
    tmp_path: Path, made: Callable[[], tuple[nn.Module, Step]]
) -> None:
    assert found(tmp_path, made) == [("no_causal_mask", "warning", 2)]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: language(Fused(causal=True), shift=0), id="fused"),
        pytest.param(lambda: cut(Fused(mask=causal_for), shift=0), id="cut"),
        pytest.param(lambda: language(Layers(causal=True), shift=0), id="PyTorch's layers"),
        pytest.param(lambda: language(Written(by_method, True), shift=0), id="by hand"),
        pytest.param(lambda: places_first(Heads(causal=True), shift=0), id="places first"),
        pytest.param(lambda: language(Lstm(), shift=0), id="an LSTM"),
    ],
)
def test_targets_that_are_not_shifted(
    tmp_path: Path, made: Callable[[], tuple[nn.Module, Step]]
) -> None:
    assert found(tmp_path, made) == [("unshifted_targets", "warning", 2)]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: language(Fused(causal=True)), id="causal"),
        pytest.param(lambda: shifts_inside(Fused(mask=causal_for)), id="shifted inside"),
        pytest.param(lambda: language(Layers(causal=True)), id="PyTorch's layers"),
        pytest.param(lambda: language(Heads(causal=True)), id="PyTorch's heads"),
        pytest.param(lambda: places_first(Written(by_method, True), shift=1), id="by hand"),
        pytest.param(lambda: language(Lstm()), id="an LSTM"),
        pytest.param(lambda: masked(Layers(causal=False)), id="masked tokens"),
        pytest.param(lambda: masked(Written(by_torch, causal=False)), id="masked, by hand"),
        pytest.param(lambda: restored(Layers(causal=False)), id="an autoencoder"),
        pytest.param(lambda: restored(Lstm(bidirectional=True)), id="both directions"),
        pytest.param(lambda: copied(recurrent=False), id="a copy"),
        pytest.param(lambda: copied(recurrent=True), id="a copy, recurrent"),
        pytest.param(lambda: labelled(Layers(causal=False)), id="a classifier"),
        pytest.param(lambda: tagged(Fused()), id="tags"),
        pytest.param(lambda: matched(Fused()), id="contrastive"),
    ],
)
def test_others_that_look_alike(tmp_path: Path, made: Callable[[], tuple[nn.Module, Step]]) -> None:
    assert found(tmp_path, made) == []


def test_nothing_of_ours_is_left_in_torch(tmp_path: Path) -> None:
    before = (functional.softmax, torch.softmax, functional.scaled_dot_product_attention)
    found(tmp_path, lambda: language(Fused()))
    after = (functional.softmax, torch.softmax, functional.scaled_dot_product_attention)
    assert after == before
    assert "softmax" not in torch.Tensor.__dict__


def test_a_model_that_keeps_a_softmax_can_be_pickled_at_any_step(tmp_path: Path) -> None:
    model, step = language(Written(functional.softmax, causal=True))

    def saved(tokens: torch.Tensor) -> torch.Tensor:
        pickle.dumps(model)
        model.mixer.softmax = by_function
        loss = step(tokens)
        model.mixer.softmax = functional.softmax
        return loss

    assert found(tmp_path, lambda: (model, saved)) == []


# -- a step by itself -----------------------------------------------------------------------


def compared(
    targets: torch.Tensor, ids: torch.Tensor, *, classes: int = VOCABULARY
) -> TokenTargets | None:
    tokens = StepTokens()
    tokens.embedded(ids)
    query = torch.zeros(len(ids), 1, ids.shape[1], 4)
    tokens.attended(query, query, None, is_causal=True)
    pending = tokens.compare(targets, classes, -100)
    return None if pending is None else pending.result()


def test_places_that_are_followed_by_the_same_token_do_not_count() -> None:
    ids = torch.ones(8, 20, dtype=torch.int64)
    assert compared(ids, ids) is None
    ids[:, ::2] = 2
    ids[:, 10:] = 3
    seen = compared(ids, ids)
    assert seen is not None
    assert (seen.compared, seen.same, seen.following, seen.ahead) == (80, 1.0, 0.0, (0.0,))


@pytest.mark.parametrize("shape", [(160,), (8,), (8, 17), (3, 7)])
def test_targets_of_another_length_are_not_compared(shape: tuple[int, ...]) -> None:
    ids = torch.arange(8 * 30).reshape(8, 30) % 40
    assert compared(torch.zeros(shape, dtype=torch.int64), ids) is None


def test_a_softmax_over_as_many_classes_as_places_says_nothing() -> None:
    ids = torch.arange(8 * 20).reshape(8, 20) % 19
    tokens = StepTokens()
    tokens.embedded(ids)
    tokens.softmaxed(torch.full((8, 20, 20), 0.05))
    for classes, known in ((20, False), (21, True)):
        pending = tokens.compare(ids, classes, -100)
        assert pending is not None
        seen = pending.result()
        assert seen is not None
        assert (seen.ahead is not None) is known
