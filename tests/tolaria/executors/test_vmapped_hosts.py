"""Users' networks that run as a whole through `torch.vmap`, or with PyTorch's own attention: fused is as streamed."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_streamed import ALGORITHMS, CONDITIONS, TWELVE, compare, host_of, in_every_stage_and_blend
from torch import Tensor, nn

import tokens
from esper.kasmina.parameters.stacking import HOST_EXAMPLES, Vmapped
from esper.tasks.datasets import Dataset, Split
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.network import HostData
from tokens import TOKENS, VOCABULARY, token_seeds

D = 6


class Reader(nn.Module):
    """Positions without an axis of examples, a recurrent layer, running statistics, dropout and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, D, padding_idx=0), nn.Embedding(TOKENS, D)
        self.r0c0, self.r0c1, self.recurrent = nn.Linear(D, D), nn.Linear(D, D), nn.LSTM(D, D, batch_first=True)
        self.r1c0, self.drop = nn.BatchNorm1d(TOKENS), nn.Dropout(0.2)
        self.out = nn.Linear(D, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.place(torch.arange(x.shape[1])))
        h, _ = self.recurrent(self.drop(h).tanh())
        return self.out(self.r0c1(self.r1c0(h)).relu())


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them, and a learned first state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.start = nn.Parameter(0.1 * torch.randn(1, 1, D))
        self.r0c0, self.r1c0, self.r0c1 = nn.Linear(D, D), nn.Dropout(0.3), nn.LayerNorm(D)
        self.first, self.second = nn.LSTM(D, D, 2, batch_first=True), nn.GRU(D, D // 2, bidirectional=True)
        self.late, self.out = nn.Dropout(0.2), nn.Linear(D, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x))
        start = self.start.expand(2, len(h), -1).contiguous()
        h, _ = self.first(h, (start, start))
        h, _ = self.second(self.r1c0(h).transpose(0, 1))
        return self.out(self.late(self.r0c1(h.transpose(0, 1))))


class Normed(nn.Module):
    """Batch normalization of channels and an average of its own, beside positions without an axis of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(TOKENS, D)
        self.r0c0, self.norm, self.r1c0 = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)
        self.late, self.r0c1, self.out = nn.BatchNorm1d(D, affine=False), nn.Linear(D, D), nn.Linear(D, VOCABULARY)
        self.register_buffer("average", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.pos(torch.arange(x.shape[1])))
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean(dim=(0, 1)), alpha=0.1)
        h = h - self.average.clone()
        h = self.r1c0(self.norm(h.transpose(1, 2)).transpose(1, 2).relu())
        return self.out(self.r0c1(self.late(h.flatten(0, 1)).view(h.shape)).tanh())


class Einsum(nn.Module):
    """Tied embeddings of which padding is a row, and weights of its own in einsum and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, D, padding_idx=0), nn.Parameter(0.4 * torch.randn(2, D, D))
        self.pos, self.bias = nn.Parameter(0.1 * torch.randn(TOKENS, D)), nn.Parameter(torch.zeros(VOCABULARY))
        self.r0c0, self.r1c0, self.r0c1 = nn.Linear(D, D), nn.Identity(), nn.LayerNorm(D)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.pos)
        scores = torch.einsum("btd,de,bse->bts", h, self.mix[0], h)
        weights = self.drop(scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0.0, -torch.inf).softmax(-1))
        h = self.r1c0(h + torch.einsum("bts,bsd,de->bte", weights, h, self.mix[1]))
        return torch.einsum("btd,vd->btv", self.r0c1(h), self.embed.weight) + self.bias


def compare_fused(
    network: Callable[[], nn.Module],
    grow,
    together,
    num_envs,
    data: Dataset | None = None,
    *,
    vmapped: bool = True,
    **settings,
):
    data = tokens.tokens() if data is None else data
    host = host_of(network, data.train.x)

    def fused(data: HostData) -> FusedExecutor:
        executor = FusedExecutor(data, measures_together=together)
        assert isinstance(executor.stacked_modules.host.module, Vmapped) is vmapped
        return executor

    with token_seeds():
        compare(fused, grow, num_envs=num_envs, host=host, data=data, objective=tokens.OBJECTIVE, **settings)


def grow_some(bench):
    """Seeds of all hosts but the last, in all slots, so that no two hosts are alike."""
    (hidden, none), (blending, some), (holding, full), _ = CONDITIONS
    add, multiply, gate = ALGORITHMS
    bench.grow("r0c0", "token_mlp", hidden, alpha=none, algorithm=gate, hosts=[0, 3])
    bench.grow("r0c0", "token_scale", blending, alpha=some, algorithm=multiply, hosts=[1])
    bench.grow("r1c0", "token_scale", holding, alpha=full, algorithm=add, hosts=[0, 1, 2])
    bench.grow("r0c1", "token_mlp", blending, alpha=some, algorithm=gate, hosts=[0])
    bench.grow("r0c1", "token_scale", hidden, alpha=none, algorithm=add, hosts=[1, 2])
    bench.grow("r0c1", "token_mlp", CONDITIONS[3][0], alpha=full, algorithm=multiply, hosts=[3])


@pytest.mark.parametrize(
    ("network", "together"),
    [(Reader, False), pytest.param(Recurrent, True, marks=pytest.mark.slow), (Normed, True), (Einsum, False)],
)
def test_fused_is_streamed_for_a_network_that_runs_through_vmap(network, together):
    compare_fused(network, grow_some, together, 5)


@pytest.mark.parametrize(
    ("network", "slot", "blueprint"), [(Reader, "r0c1", "token_mlp"), (Einsum, "r1c0", "token_scale")]
)
def test_fused_is_streamed_inside_vmap_in_every_stage_and_blend(network, blueprint, slot):
    compare_fused(network, in_every_stage_and_blend(blueprint, slot), True, TWELVE, epochs=1)


def test_one_host_alone_through_vmap_is_streamed():
    compare_fused(Normed, lambda bench: bench.grow("r0c0", "token_scale", CONDITIONS[1][0], alpha=0.4), True, 1)


class Attending(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]: two layers of an encoder, and an attention to the embedding."""

    def __init__(self, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        settings = {"dim_feedforward": 8, "dropout": dropout, "batch_first": True}
        self.r0c0 = nn.TransformerEncoderLayer(D, 2, activation="gelu", **settings)
        self.r1c0 = nn.TransformerEncoderLayer(D, 3, norm_first=True, **settings)
        self.attend = nn.MultiheadAttention(D, 2, dropout=dropout)
        self.r0c1, self.out = nn.LayerNorm(D), nn.Linear(D, VOCABULARY)
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))
        if frozen:
            self.r0c0.requires_grad_(False)
            self.r1c0.self_attn.out_proj.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        start = self.embed(x)
        h = self.r1c0(self.r0c0(start, src_mask=self.later), src_mask=self.later, is_causal=True)
        seen, _ = self.attend(h.transpose(0, 1), start.transpose(0, 1), start.transpose(0, 1))
        return self.out(self.r0c1(h + seen.transpose(0, 1)))


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, pytest.param({"frozen": True}, marks=pytest.mark.slow)])
def test_fused_is_streamed_for_pytorchs_attention(settings):
    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(itertools.product(CONDITIONS[1:3], ALGORITHMS[::2])):
            bench.grow("r0c0", "token_mlp", stage, alpha=alpha, algorithm=algorithm, hosts=[n])
        bench.grow("r0c1", "token_scale", CONDITIONS[0][0], algorithm=ALGORITHMS[2], hosts=[1])

    # not with AdamW: a bias of all keys has no gradient but rounding, which it would enlarge to steps of the full rate
    compare_fused(lambda: Attending(**settings), grow, True, 4, vmapped=False)


class OwnEmbedding(nn.Embedding):
    """A user's subclass."""


class Looked(nn.Module):
    """A table of the user's own; the last row is that of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, D))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, -1, scale_grad_by_freq=True)


class Padded(nn.Module):
    def __init__(self, embed: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.pos = embed(), nn.Embedding(TOKENS, D)
        self.r0c0, self.r1c0, self.r0c1 = nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.pos(torch.arange(x.shape[1])))
        return self.out(self.r0c1(self.r1c0(h)).relu())


EMBEDDINGS = {
    "layer": lambda: nn.Embedding(VOCABULARY, D, padding_idx=VOCABULARY - 1),
    "by frequency": lambda: nn.Embedding(VOCABULARY, D, padding_idx=-1, scale_grad_by_freq=True),
    "subclass": lambda: OwnEmbedding(VOCABULARY, D, padding_idx=VOCABULARY - 1),
    "function": Looked,
}


@pytest.mark.parametrize(
    "embed", ["layer", *(pytest.param(name, marks=pytest.mark.slow) for name in EMBEDDINGS if name != "layer")]
)
def test_padding_that_the_trial_does_not_meet_stays_untrained_through_vmap(embed):
    data, padding = tokens.tokens(), VOCABULARY - 1
    x = data.train.x.clamp(max=padding - 1)
    x[HOST_EXAMPLES:, 2] = padding
    data = dataclasses.replace(data, train=Split(x, data.train.y))
    compare_fused(lambda: Padded(EMBEDDINGS[embed]), grow_some, False, 5, data)


class Renormed(nn.Module):
    """An operation that `torch.vmap` runs for one host after another, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCABULARY, D), nn.Parameter(torch.randn(TOKENS, D))
        self.r0c0, self.r1c0, self.r0c1 = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.pos)
        h = h.flatten(0, 1).renorm(2, 0, 1.0).view(h.shape)
        return self.out(self.r0c1(self.r1c0(h).tanh()))


def test_what_vmap_says_of_slow_operations_is_kept_from_users_but_not_switched_off():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compare_fused(Renormed, grow_some, False, 5)
        assert [str(warning.message) for warning in found if "performance drop" in str(warning.message)] == []
        torch.vmap(lambda h: h.renorm(2, 0, 1.0))(torch.ones(2, 3, 4))
    assert "performance drop" in str(found[-1].message)
