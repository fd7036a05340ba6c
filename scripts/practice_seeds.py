"""What a seed in every slot of the networks of practice_hosts.py is worth from the start, in plain PyTorch.

Each network has the budget, the batches and the recipe of "plain, long, small batches" (practice_plain.py); with seeds
that cost FLOPs it has fewer steps. No code of growth takes part. A line of JSON for each training.

    python scripts/practice_seeds.py --data-dir DATA --hosts gpt --blueprints none norm depthwise
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_by_name
from esper.leyline.errors import EsperError
from esper.leyline.lifecycle import HostFamily
from esper.runs.assembly.run_config import data_folder
from practice_hosts import HOSTS, Data, Host
from practice_plain import accuracy, budget_of, forward_flops, num_params, plans, trained

SMALL = "plain, long, small batches"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train networks with seeds from the start."""

    hosts: tuple[str, ...] = tuple(host.name for host in HOSTS)
    """Names of the hosts."""
    blueprints: tuple[str, ...] = ("none", "norm")
    """In every slot; none is the network alone."""
    factors: tuple[float, ...] = (1.0, 3.0)
    """Of the learning rate."""
    seeds: tuple[int, ...] = (11, 12)
    """Of the split, the initial weights and the order of the examples; those of the tables are 1 to 3."""
    full: bool = False
    """Take all examples and epochs of the hosts, not those of the small table."""
    data_dir: Path | None = None
    """Folder of the data files. ($ESPER_DATA)"""


class Grown(nn.Module):
    """A module and a seed behind it; a vector is a sequence of one token."""

    def __init__(self, module: nn.Module, seed: nn.Module) -> None:
        super().__init__()
        self.module, self.seed = module, seed

    def forward(self, x: Tensor) -> Tensor:
        """What the module gives, and the seed adds."""
        h = self.module(x)
        return h + (self.seed(h[:, None])[:, 0] if h.dim() == 2 else self.seed(h))


def with_seeds(host: Host, data: Data, blueprint: str, width: float) -> nn.Module:
    """The network of a host, with a seed in every slot."""
    net, widths = host.net(width), {}
    for slot in host.slots:
        net.get_submodule(slot).register_forward_hook(lambda _, __, h, slot=slot: widths.update({slot: h.shape}))
    x = data.train[0][:2]
    net.eval()(x if data.inputs is None else data.inputs(x))
    for slot in host.slots if blueprint != "none" else ():
        family, channels = (HostFamily.CNN, 1) if len(widths[slot]) == 4 else (HostFamily.TRANSFORMER, -1)
        found = blueprint_by_name(blueprint, family)
        seed = found.build(widths[slot][channels])
        for name, value in found.init.items():
            nn.init.constant_(seed.get_parameter(name), value)
        net.set_submodule(slot, Grown(net.get_submodule(slot), seed))
    for module in net.modules():
        module._forward_hooks.clear()
    return net.train()


def main(options: Options) -> int:
    """Train and print; returns the exit code."""
    try:
        folder = data_folder(options.data_dir)
        for host, seed in product((host for host in HOSTS if host.name in options.hosts), options.seeds):
            examples, epochs = (host.examples, host.epochs) if options.full else host.small
            whole = host.load(folder, seed)
            data = whole.fewer(examples, max(1, len(whole.val[1]) * examples // host.examples))
            plan = plans(host, data, budget_of(host, data, epochs))[SMALL]
            for blueprint, factor in product(options.blueprints, options.factors):
                grown = replace(host, batch=plan.batch, net=partial(with_seeds, host, data, blueprint))
                price = forward_flops(grown, data, 1.0) / forward_flops(host, data, 1.0)
                net = trained(grown, data, 1.0, factor * plan.rates[0], int(plan.steps / price), seed)
                line = {
                    "host": host.name, "seed": seed, "blueprint": blueprint, "factor": factor, "price": round(price, 3),
                    "parameters": num_params(net), "val": round(accuracy(net, data, data.val), 2),
                    "test": round(accuracy(net, data, data.test), 2),
                }  # fmt: skip
                print(json.dumps(line), flush=True)
    except EsperError as error:
        print(f"practice_seeds: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(tyro.cli(Options)))
