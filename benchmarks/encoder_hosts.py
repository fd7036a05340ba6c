"""Networks of users with `nn.TransformerEncoder`: a train pass fused against streamed, in CPU time of one thread.

Both run in turn; a ratio is the median over repetitions of the ratio within each. Above 1 fused is faster.

    python benchmarks/encoder_hosts.py
    python benchmarks/encoder_hosts.py --width 16 --context 16 --batch 4 16
"""

from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.stages import HostFamily
from esper.tasks.datasets import Dataset, Split
from esper.tasks.objectives import NextToken
from esper.tasks.registry import TaskSpec
from esper.telemetry.machine import environment
from esper.tolaria.build import build_engine
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.runtime import keep_freed_memory
from grown_hosts import CPU
from paired import Row, compare, comparisons

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare fused with streamed hosts."""

    hosts: int = 8
    """N."""
    layers: int = 2
    """Of the encoder, with a slot after each."""
    width: int = 64
    """Of the features; the hidden layer has four times as many."""
    context: int = 64
    """Tokens of an example."""
    batch: tuple[int, ...] = (4, 16)
    """Examples per batch and host."""
    dropout: tuple[float, ...] = (0.0, 0.1)
    """Of the encoder."""
    batches: int = 2
    """In a train pass."""
    repetitions: int = 7
    """Measurements of each; a first one is not counted."""


class Reader(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, options: Options, dropout: float) -> None:
        super().__init__()
        width = options.width
        self.embed, self.out = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.out(self.encoder(self.embed(x)))


def compared(options: Options, batch: int, dropout: float) -> Row:
    """A train pass of hosts without seeds."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (options.batches * batch, options.context + 1), generator=generator)
    split = Split(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    slots = [f"encoder.layers.{i}" for i in range(options.layers)]
    data = Dataset(identity={"name": "random tokens"}, train=split, val=split, test=split)
    task = TaskSpec(
        name="encoder",
        description="Random tokens, for benchmarks.",
        family=HostFamily.TRANSFORMER,
        host=ModuleHostSpec.of(lambda: Reader(options, dropout), slots, split.x[:8]),
        load=lambda folder, seed: data,
        enabled=tuple(slots),
        objective=NextToken(VOCABULARY),
        batch_train=batch,
        batch_val=batch,
        episode_length=8,
        min_training_epochs=1,
    )
    config = EngineConfig(num_envs=options.hosts, slots=task.enabled, episode_length=8, executor="streamed")
    streamed = build_engine(config, task, data, CPU).executor
    assert isinstance(streamed, StreamedExecutor)
    streamed.reset(0)
    fused, nothing = FusedExecutor(streamed.data), empty_slots(options.hosts, len(slots), CPU)
    name = f"{options.hosts} x {options.context} tokens, {options.layers} layers of {options.width}, batch {batch}"
    return compare(
        f"{name}, dropout {dropout:g}",
        "streamed",
        "fused",
        [lambda: streamed.train_epoch(1, nothing), lambda: fused.train_epoch(1, nothing)],
        options.repetitions,
    )


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = [compared(options, batch, dropout) for batch in options.batch for dropout in options.dropout]
    Console(width=140).print(comparisons("hosts with nn.TransformerEncoder, train pass", rows, environment(CPU)))


if __name__ == "__main__":
    main(tyro.cli(Options))
