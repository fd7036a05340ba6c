"""Users' networks that run as a whole through `torch.vmap`: streamed and fused agree, seeds included."""

import itertools

import pytest
import torch
from against_streamed import ALGORITHMS, CONDITIONS, compare
from torch import Tensor, nn

import tokens
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.stacked_layers import Vmapped
from esper.tolaria.executors.fused.executor import FusedExecutor
from tiny import SLOTS
from tokens import TOKENS, VOCABULARY, token_seeds


class Reader(nn.Module):
    """Positions without an axis of examples, a recurrent layer, running statistics, dropout and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, 6, padding_idx=0), nn.Embedding(TOKENS, 6)
        self.r0c0, self.r0c1, self.recurrent = nn.Linear(6, 6), nn.Linear(6, 6), nn.LSTM(6, 6, batch_first=True)
        self.r1c0, self.drop = nn.BatchNorm1d(TOKENS), nn.Dropout(0.2)
        self.out = nn.Linear(6, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.r0c0(self.embed(x) + self.place(torch.arange(x.shape[1])))
        h, _ = self.recurrent(self.drop(h).tanh())
        return self.out(self.r0c1(self.r1c0(h)).relu())


@pytest.mark.parametrize("together", [False, True])
def test_fused_is_streamed_for_a_network_that_runs_through_vmap(together):
    x = tokens.tokens().train.x
    host = ModuleHostSpec.of(Reader, SLOTS, x[:8]).build(SLOTS, x[:1])

    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(itertools.product(CONDITIONS[1:3], ALGORITHMS[::2])):
            bench.grow("r0c0", "token_mlp", stage, alpha=alpha, algorithm=algorithm, hosts=[n])
        bench.grow("r0c1", "token_scale", CONDITIONS[0][0], hosts=[1])

    def fused(data):
        executor = FusedExecutor(data, measures_together=together)
        assert isinstance(executor.stacked_modules.host.module, Vmapped)
        return executor

    with token_seeds():
        compare(fused, grow, num_envs=4, host=host, data=tokens.tokens(), objective=tokens.OBJECTIVE)
