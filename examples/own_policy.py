"""A controller of your own, written by hand: it grows what a table says, and keeps it as soon as it may. Ten seconds.

python examples/own_policy.py
"""

import torch
from torch import Tensor

import esper
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.messages import EngineSpec, Observation
from esper.tamiyo.schedules import NoMemory, Stateless, canonical_action


@esper.register_policy("greedy")
class Greedy(Stateless):
    """Fossilizes where that is legal, else germinates `depthwise` in the first free slot, else waits."""

    def __init__(self, spec: EngineSpec) -> None:
        blueprint = spec.blueprint_names.index("depthwise")
        slots = range(spec.num_slots)
        keep = [canonical_action(LifecycleOp.FOSSILIZE, slot=s) for s in slots]
        grow = [canonical_action(LifecycleOp.GERMINATE, slot=s, blueprint=blueprint) for s in slots]
        wait = [canonical_action(LifecycleOp.WAIT)]
        self._rows = torch.tensor(keep + grow + wait, device=spec.device)  # in order of preference

    def decide(self, obs: Observation, memory: NoMemory) -> Tensor:
        """An action for each host: the first row that is legal."""
        always = torch.ones_like(obs.legal[:, 0, :1])
        possible = torch.cat((obs.legal[:, LifecycleOp.FOSSILIZE], obs.legal[:, LifecycleOp.GERMINATE], always), dim=1)
        return self._rows[possible.int().argmax(dim=1)]


def main() -> None:
    """Beside a network that does not grow."""
    for controller in ("wait_only", "greedy"):
        grown = esper.grow("digits", method=controller, best_of=4)
        print(f"{controller}: {grown.num_params:,} parameters, {grown.unit} on the test split {grown.test_points:.1f}")
    print(grown.timeline)


if __name__ == "__main__":
    main()
