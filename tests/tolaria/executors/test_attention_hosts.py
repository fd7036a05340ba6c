"""Users' networks with PyTorch's own attention: streamed and fused agree, and `auto` runs them fused."""

import itertools
from functools import partial

import pytest
import torch
from against_streamed import ALGORITHMS, CONDITIONS, compare, fused
from torch import Tensor, nn

import tiny
import tokens
from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.leyline.lifecycle import Algorithm, HostFamily
from esper.tolaria.build import build_engine
from esper.tolaria.engine_config import EngineConfig
from tiny import CPU, SLOTS
from tokens import TOKENS, VOCABULARY, token_seeds


class Reader(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]: two layers of an encoder, and an attention to the embedding."""

    def __init__(self, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        settings = {"dim_feedforward": 8, "dropout": dropout, "batch_first": True}
        self.r0c0 = nn.TransformerEncoderLayer(6, 2, activation="gelu", **settings)
        self.r1c0 = nn.TransformerEncoderLayer(6, 3, norm_first=True, **settings)
        self.attend = nn.MultiheadAttention(6, 2, dropout=dropout)
        self.r0c1 = nn.LayerNorm(6)
        self.out = nn.Linear(6, VOCABULARY)
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))
        if frozen:
            self.r0c0.requires_grad_(False)
            self.r1c0.self_attn.out_proj.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        start = self.embed(x)
        h = self.r1c0(self.r0c0(start, src_mask=self.later), src_mask=self.later, is_causal=True)
        seen, _ = self.attend(h.transpose(0, 1), start.transpose(0, 1), start.transpose(0, 1))
        return self.out(self.r0c1(h + seen.transpose(0, 1)))


def spec(**settings: object) -> ModuleHostSpec:
    return ModuleHostSpec.of(partial(Reader, **settings), SLOTS, tokens.tokens().train.x[:8])


def host(**settings: object) -> ModuleHost:
    return spec(**settings).build(SLOTS, tokens.tokens().train.x[:1])


@pytest.fixture(autouse=True)
def seeds():
    with token_seeds():
        yield


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, {"frozen": True}])
def test_fused_is_streamed_for_pytorchs_attention(settings):
    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(itertools.product(CONDITIONS[1:3], ALGORITHMS[::2])):
            bench.grow("r0c0", "token_mlp", stage, alpha=alpha, algorithm=algorithm, hosts=[n])
        bench.grow("r0c1", "token_scale", CONDITIONS[0][0], algorithm=Algorithm.GATE, hosts=[1])

    data = {"data": tokens.tokens(), "objective": tokens.OBJECTIVE}
    # not with AdamW: a bias of all keys has no gradient but rounding, which it would enlarge to steps of the full rate
    compare(fused, grow, num_envs=4, host=host(**settings), **data)


def test_auto_runs_an_encoder_natively_without_a_word():
    task = tiny.task(
        family=HostFamily.TRANSFORMER, objective=tokens.OBJECTIVE, host=spec(dropout=0.1),
        load=lambda folder, seed: tokens.tokens(),
    )  # fmt: skip
    config = EngineConfig(num_envs=2, episode_length=4, slots=SLOTS, run_seed=5, executor="auto")
    assert build_engine(config, task, tokens.tokens(), CPU).config.executor == "native"
