"""What is checked of a published network: it trains, agrees with plain PyTorch, is saved, loads without esper."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.api.run import in_process
from esper.leyline.random import Stream, permutation
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.presets import resolve
from esper.runs.evaluation import controllers
from published.entry import Published
from published.loading import call, leaves, part

TESTS = Path(__file__).parent.parent
BATCH, STEPS, PER_STEP = 16, 3, 2
AGREES, LOADS = 1e-4, 1e-5
"""Largest difference of an output, relative to the largest output: after six batches of training, and after loading."""
_RATES = ("p", "dropout", "dropout_p", "drop_prob", "drop_rate", "attn_dropout", "sd_prob", "layerdrop")
"""Attributes of layers that say how often they drop something."""


class CheckError(Exception):
    """A network does not do what it should; the message says what was found."""


def evaluated(network: nn.Module, x: object) -> list[Tensor]:
    """The tensors of a network in evaluation; what is drawn in evaluation too is drawn from the same numbers."""
    network.eval()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with torch.no_grad():
        return leaves(call(network, x))


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of two results, relative to the largest value of a tensor."""
    if [x.shape for x in found] != [x.shape for x in expected] or not expected:
        raise CheckError(f"outputs {[list(x.shape) for x in found]} instead of {[list(x.shape) for x in expected]}")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        a, b = a.double(), b.double()
        worst = max(worst, float((a - b).abs().max()) / max(float(b.abs().max()), 1e-12))
        if not torch.isfinite(a).all():
            raise CheckError("outputs are not finite")
    return worst


def trained(of: Published, executor: str) -> "esper.Grown":
    """A network with a seed in every slot, the better one of two."""
    grown = esper.grow(
        of.task(batches_per_step=PER_STEP),
        method="fixed_schedule_fill",
        best_of=2,
        progress=False,
        executor=executor,
    )
    germinated = {row.slot for row in grown.timeline if row.event == "germinated"}
    if germinated != set(of.slots):
        raise CheckError(f"{executor}: seeds germinated in {sorted(germinated)} of {sorted(of.slots)}")
    if grown.points is None or grown.points != grown.points:
        raise CheckError(f"{executor}: validation points {grown.points}")
    return grown


def is_random(network: nn.Module, x: object) -> bool:
    """Whether some of 32 passes in training mode, from the same state and other random numbers, give other outputs.

    Two passes alone often drop the same layers. The generators of Python and numpy are seeded too.
    """
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    first: list[Tensor] | None = None
    for seed in range(32):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with torch.no_grad():
            found = leaves(call(network, x))
        network.load_state_dict(state)
        if first is None:
            first = found
        elif difference(found, first) > 0.0:
            return True
    return False


@dataclass(frozen=True)
class Quiet:
    """Gives networks in which nothing is dropped."""

    model: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        network = self.model()
        for module in network.modules():
            for name in _RATES:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return network


def plain_network(model: Callable[[], nn.Module], x: object) -> nn.Module:
    """A new network as PyTorch alone has it: lazy layers have their shapes, and nothing is compiled."""
    network = model()
    network = getattr(network, "_orig_mod", network)
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    if any(isinstance(value, lazy) for value in (*network.parameters(), *network.buffers())):
        call(network, part(x, slice(0, 2)))
    return network


def first_weights(task: "esper.Task", executor: str) -> tuple[dict[str, Tensor], str]:
    """Parameters and buffers of the first host before training, by their names in the network; the executor taken."""
    with in_process(task.spec):
        config = resolve({"task": task.spec.name, "seed": 0, "executor": executor, "compile": "off"})
        device = device_of(config)
        engine = engine_of(config, dataset_of(config, device), device, engine_config=config.engine(num_envs=2))
        engine.reset(controllers.baseline("wait_only", config).make(engine.spec), episode=0)
        population = engine.executor.data.population
        template, rows = population.host_kind.template, population.host
        both = {**template.parameters.unpack(rows.params[0]), **template.buffers.unpack(rows.buffers[0])}
        both |= template.shared
        return {name.removeprefix("network."): x.clone() for name, x in both.items()}, engine.config.executor


def mean_loss(of: Published, result: Any, y: Any) -> Tensor:
    """The loss of a batch as `docs/api.md` says, computed by PyTorch alone."""
    outputs = of.options["outputs"](result) if "outputs" in of.options else result
    if "loss" in of.options:
        return of.options["loss"](outputs, y).mean()
    if y.is_floating_point():
        return F.mse_loss(outputs, y.view_as(outputs))
    if y.dim() == 2:
        return F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=-1)
    return F.cross_entropy(outputs, y)


def agreement(of: Published, executor: str) -> tuple[str, str]:
    """Train without seeds by esper and by plain PyTorch from the same weights, and compare outputs in evaluation.

    Three steps of two batches, with momentum. What is dropped at random is switched off; where a network draws in
    training nevertheless, weights trained by esper are evaluated by PyTorch.

    Returns:
        What was compared, and the executor.
    """
    x, y = of.data()
    few = part(x, slice(0, BATCH))
    model, drops = of.model, is_random(plain_network(of.model, x), few)
    if drops:
        model = Quiet(of.model)
    draws = drops and is_random(plain_network(model, x), few)
    quiet = Published(**{**{field.name: getattr(of, field.name) for field in fields(of)}, "model": model})
    changes = {"optimizer": "sgd", "lr": 0.01, "batches_per_step": PER_STEP, "episode_length": STEPS}
    task = quiet.task(val=(x, y), test=(x, y), **changes)
    weights, taken = first_weights(task, executor)
    grown = esper.grow(task, method="wait_only", steps=STEPS, progress=False, executor=executor)
    network = plain_network(model, x)
    load(network, weights)
    before = evaluated(network, x)
    if draws:
        esper_weights = {
            name: value for name, value in user_state(grown.module).items() if name in network.state_dict()
        }
        load(network, esper_weights)
    else:
        train_plainly(of, network, x, y, task.spec.optimizer)
    expected = evaluated(network, x)
    if not draws and difference(expected, before) < 10 * AGREES:
        raise CheckError("plain training changes the outputs too little to compare anything")
    found = difference(evaluated(grown.module, x), expected)
    if not found < AGREES:
        raise CheckError(f"{taken}: outputs differ by {found:.1e} of the largest one from plain PyTorch")
    how = "evaluation" if draws else "nothing dropped" if drops else "training"
    return how, taken


def train_plainly(of: Published, network: nn.Module, x: Any, y: Any, spec: Any) -> None:
    """One pass over the examples in the order of the first host."""
    own = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(own, lr=spec.host_lr, momentum=spec.momentum, weight_decay=spec.sgd_weight_decay)
    count = len(leaves(x)[0])
    order = permutation(0, Stream.TRAIN_ORDER, torch.zeros(1, dtype=torch.int64), count, episode=0, t=1)[0]
    network.train()
    for batch in order.split(BATCH)[: STEPS * PER_STEP]:
        optimizer.zero_grad()
        mean_loss(of, call(network, part(x, batch)), part(y, batch)).backward()
        nn.utils.clip_grad_norm_(own, spec.grad_clip)
        optimizer.step()


def load(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights and statistics into a network; what is not given must be constant: integers, or frozen."""
    known = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    missing, unknown = network.load_state_dict(weights, strict=False)
    unexpected = [name for name in unknown if name not in known]
    for name in set(unknown) - set(unexpected):  # buffers that are kept out of the state_dict
        known[name].copy_(weights[name])
    first = {id(value): name for name, value in reversed(known.items())}
    trained = [
        name
        for name in missing
        if known[name].is_floating_point() and known[name].requires_grad and first[id(known[name])] in missing
    ]
    if unexpected or trained:
        raise CheckError(f"names of weights: {unexpected} are not the network's own, {trained} are missing")


def user_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of the user's own network in a grown one."""
    inner = module.get_submodule("network" if hasattr(module, "network") else "host.network")
    return dict(inner.state_dict())


LOADER = """
import importlib.util, pickle, sys
from pathlib import Path

class NoEsper:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "esper":
            raise ImportError("there is no esper in this process")

sys.meta_path.insert(0, NoEsper())
import torch
from published.loading import call, leaves

folder = Path(sys.argv[1])
if (folder / "model.py").is_file():
    spec = importlib.util.spec_from_file_location("grown_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    name, model = "model.py", module.load_model(folder)
elif (folder / "model.pt2").is_file():
    name, model = "model.pt2", torch.export.load(folder / "model.pt2").module()
else:
    name = "model.pkl"
    with (folder / name).open("rb") as file:
        model = pickle.load(file)
x = torch.load(sys.argv[2], weights_only=False)
torch.manual_seed(0)
with torch.no_grad():
    found = leaves(call(model, x))
assert "esper" not in sys.modules
torch.save(found, sys.argv[3])
print(name)
"""


def saved(grown: "esper.Grown", folder: Path) -> str:
    """Save with defaults; the names of the files from which the network can be loaded."""
    grown.save(folder)
    names = [name for name in ("model.py", "model.pt2", "model.pkl") if (folder / name).is_file()]
    if not names:
        raise CheckError(f"save wrote {sorted(path.name for path in folder.iterdir())}, no network that can be loaded")
    return ", ".join(names)


def loaded(of: Published, grown: "esper.Grown", folder: Path) -> str:
    """Load in a process that cannot import esper, and compare outputs; the name of the file that was loaded."""
    x = part(of.data()[0], slice(0, BATCH))
    expected = evaluated(grown.module, x)
    inputs, outputs = folder.parent / f"{folder.name}-inputs.pt", folder.parent / f"{folder.name}-outputs.pt"
    torch.save(x, inputs)
    ran = subprocess.run(
        [sys.executable, "-c", LOADER, str(folder), str(inputs), str(outputs)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        cwd=folder.parent,
        check=False,
    )
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        raise CheckError(lines[-1])
    found = difference(torch.load(outputs, weights_only=False), expected)
    if not found <= LOADS:
        raise CheckError(f"outputs differ by {found:.1e} of the largest one")
    return ran.stdout.split()[-1]
