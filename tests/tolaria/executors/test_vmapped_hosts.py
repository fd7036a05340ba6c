"""Users' networks that run as a whole through `torch.vmap`: streamed and fused agree, seeds included."""

import pytest
import torch
from torch import Tensor, nn

import tokens
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.stacked_layers import Vmapped
from esper.leyline.stages import SeedStage
from esper.tolaria.executors.fused.executor import FusedExecutor
from tiny import SLOTS, Bench
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


@pytest.mark.parametrize(
    ("slot", "blueprint", "stage", "alpha"),
    [("r0c0", "token_mlp", SeedStage.HOLDING, 1.0), ("r0c0", "token_mlp", SeedStage.BLENDING, 0.4),
     ("r0c1", "token_scale", SeedStage.TRAINING, 0.0)],
)  # fmt: skip
def test_fused_is_streamed_for_a_network_that_runs_through_vmap(slot, blueprint, stage, alpha):
    x, losses = tokens.tokens().train.x, []
    with token_seeds():
        for fused in (False, True):
            host = ModuleHostSpec.of(Reader, SLOTS, x[:8]).build(SLOTS, x[:1])
            bench = Bench(2, host=host, data=tokens.tokens(), objective=tokens.OBJECTIVE)
            bench.grow(slot, blueprint, stage, alpha=alpha, hosts=[0])
            executor = FusedExecutor(bench.executor.data) if fused else bench.executor
            assert not fused or isinstance(executor.stacked_modules.host.module, Vmapped)
            losses.append(torch.stack([executor.train_epoch(t, bench.slots).loss for t in (1, 2)]))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=0.0)
