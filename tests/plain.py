"""The tiny task in plain PyTorch, without anything of ours but the seeds' own modules: the twin of an executor."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.layers import GateNetwork
from esper.leyline.lifecycle import Algorithm, HostFamily
from esper.leyline.random import Stream, permutation
from tiny import BATCH, CHANNELS, CLASSES, SGD, SLOTS, Bench

MULTIPLY, GATE = Algorithm.MULTIPLY, Algorithm.GATE


class PlainHost(nn.Module):
    """The host of the tiny task as anybody would write it; `grown` maps a slot to (seed, gate, algorithm, alpha).

    alpha None: the seed is hidden and learns straight through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.norm0 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)
        self.grown: dict[str, tuple[nn.Module, nn.Module | None, Algorithm, float | None]] = {}

    def take(self, of: dict[str, Tensor]) -> None:
        """Weights and statistics under the names of the population."""
        for i in (0, 1):
            conv, norm = (self.conv0, self.norm0) if i == 0 else (self.conv1, self.norm1)
            conv.weight.data = of[f"blocks.{i}.conv.weight"].clone()
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(norm, name).data = of[f"blocks.{i}.norm.{name}"].clone()
        self.head.weight.data, self.head.bias.data = of["head.weight"].clone(), of["head.bias"].clone()

    def give(self) -> dict[str, Tensor]:
        found = {"head.weight": self.head.weight, "head.bias": self.head.bias}
        for i, (conv, norm) in enumerate(((self.conv0, self.norm0), (self.conv1, self.norm1))):
            found[f"blocks.{i}.conv.weight"] = conv.weight
            for name in ("weight", "bias", "running_mean", "running_var"):
                found[f"blocks.{i}.norm.{name}"] = getattr(norm, name)
        return {name: value.detach() for name, value in found.items()}

    def slot(self, slot_id: str, h: Tensor) -> Tensor:
        if slot_id not in self.grown:
            return h
        seed, gate, algorithm, alpha = self.grown[slot_id]
        x = h.detach()
        if algorithm is MULTIPLY:
            change = torch.tanh(seed(x))
            if alpha is None:
                u = x * change
                return h + (u - u.detach())
            return h * (1 + alpha * change)
        u = seed(x) if gate is None else gate(x) * seed(x)
        return h + (u - u.detach()) if alpha is None else h + alpha * u

    def forward(self, x: Tensor) -> Tensor:
        h = self.slot("r0c0", F.relu(self.norm0(self.conv0(x))))
        h = self.slot("r1c0", F.max_pool2d(h, 2))
        h = self.slot("r0c1", F.relu(self.norm1(self.conv1(h))))
        return self.head(h.mean(dim=(2, 3)))


class PlainTraining:
    """One host of a bench, trained by torch.optim.SGD and clip_grad_norm_, host and each seed apart."""

    def __init__(self, bench: Bench, host: int = 0, frozen: tuple[str, ...] = ()) -> None:
        self.bench, self.host = bench, host
        self.model = PlainHost()
        self.model.take(bench.host_params(host))
        self.optimizers: list[tuple[list[nn.Parameter], torch.optim.Optimizer]] = []
        self._optimize(list(self.model.parameters()), SGD.host_lr, SGD.sgd_weight_decay)
        self.seeds: dict[str, nn.Module] = {}
        self.loss, self.correct, self.examples, self.label_smoothing = 0.0, 0, 0, 0.0
        for s, slot in enumerate(SLOTS):
            if bench.slots.stage[host, s] not in (1, 2, 8, 9, 10):
                alpha = float(bench.slots.alpha[host, s]) or None
                algorithm, index = Algorithm(int(bench.slots.algorithm[host, s])), int(bench.slots.blueprint[host, s])
                gate = bench.gate_params(slot, host) if algorithm is GATE else None
                self.grow(slot, index, algorithm, alpha, bench.seed_params(slot, host), gate, frozen=slot in frozen)

    def grow(
        self,
        slot: str,
        blueprint: int,
        algorithm: Algorithm,
        alpha: float | None,
        weights: dict[str, Tensor],
        gate_weights: dict[str, Tensor] | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        """Put a seed with these weights into a slot, with an optimizer of its own."""
        seed = registry.blueprint_at(blueprint, HostFamily.CNN).build(CHANNELS[slot])
        seed.load_state_dict(weights)
        gate = None
        if gate_weights is not None:
            gate = GateNetwork(CHANNELS[slot])
            gate.load_state_dict(gate_weights)
        self.model.grown[slot], self.seeds[slot] = (seed, gate, algorithm, alpha), seed
        if not frozen:
            both = [*seed.parameters(), *(gate.parameters() if gate is not None else ())]
            self._optimize(both, SGD.seed_lr, 0.0)

    def _optimize(self, parameters: list[nn.Parameter], lr: float, decay: float) -> None:
        self.optimizers.append((parameters, torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay)))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Of the validation split, in percentage points; hidden seeds are not heard."""
        grown, self.model.grown = self.model.grown, {k: v for k, v in self.model.grown.items() if v[3] is not None}
        data = self.bench.data.val
        hits = self.model.eval()(data.x).argmax(dim=1) == data.y
        self.model.train()
        self.model.grown = grown
        return 100.0 * float(hits.float().mean())

    def epoch(self, t: int, on_last_batch: Callable[[], None] = lambda: None) -> None:
        data, p = self.bench.data.train, self.bench.population
        order = permutation(
            p.run_seed, Stream.TRAIN_ORDER, p.host_ids[self.host : self.host + 1], len(data),
            episode=self.bench.episode, t=t,
        )[0]  # fmt: skip
        self.loss, self.correct, self.examples = 0.0, 0, 0
        batches = order.split(BATCH)
        for number, batch in enumerate(batches):
            for _, optimizer in self.optimizers:
                optimizer.zero_grad()
            logits = self.model(data.x[batch])
            loss = F.cross_entropy(logits, data.y[batch], label_smoothing=self.label_smoothing)
            loss.backward()
            if number == len(batches) - 1:
                on_last_batch()
            for parameters, optimizer in self.optimizers:
                nn.utils.clip_grad_norm_(parameters, p.optimizer_spec.grad_clip)
                optimizer.step()
            self.loss += loss.item() * len(batch)
            self.correct += int((logits.argmax(dim=1) == data.y[batch]).sum())
            self.examples += len(batch)


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-6) -> None:
    assert found.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            found[name], want[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
