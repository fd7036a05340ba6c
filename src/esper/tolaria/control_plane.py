"""The control plane of an engine: the three pure phases of a step, in the form that a run has chosen.

    form      `see`, `act` and `close` of `phases.py` are
    eager     called as they are: some 700 operators
    compiled  three graphs (`runs/kernels.py` makes them)

All forms give the same answers. `warm_up` calls each phase once with every form of arguments that a step will have, so
that what is compiled is compiled before the first step.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch

from esper.kasmina.rules.lifecycle import SeedCosts
from esper.leyline.messages import Measurements, RewardOutput
from esper.leyline.tensor_dataclass import blank
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.config import EngineConfig
from esper.tolaria.executors.protocol import TrainPass, ValidationPass
from esper.tolaria.phases import CloseOutput, ExecuteOutput, ObserveOutput, act, close, see
from esper.tolaria.reading import Chosen
from esper.tolaria.state import ParallelEnvState

PhaseForm = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What makes the form of a phase that a run has chosen."""


def eager(phase: Callable[..., Any]) -> Callable[..., Any]:
    """Eager."""
    return phase


@final
class ControlPlane:
    """The phases with the rules of an engine, all in one form; what is not eager raises ConfigError where it fails."""

    def __init__(self, config: EngineConfig, costs: SeedCosts, form: PhaseForm = eager) -> None:
        self.see: Callable[..., tuple[ObserveOutput, Measurements]] = form(partial(see, config=config))
        self.act: Callable[..., ExecuteOutput] = form(partial(act, costs=costs, config=config))
        self.close: Callable[..., CloseOutput] = form(partial(close, config=config))

    def warm_up(self, state: ParallelEnvState, coalitions: Iterable[Coalitions], num_terms: int) -> None:
        """Call each phase on hosts that do nothing, for each form of `coalitions`; the answers are forgotten.

        `state` is any that the engine could be in, but without what the reward carries; the reward has `num_terms`.
        """
        device, (n, slots) = state.slots.stage.device, state.slots.stage.shape
        sizes, t = {"N": n, "S": slots, "M": num_terms}, torch.ones((), dtype=torch.int64, device=device)
        trained, penalty = blank(TrainPass, sizes, device), torch.zeros(n, device=device)
        for some in coalitions:
            validated = blank(ValidationPass, sizes | {"K": some.sets.shape[1]}, device)
            seen, _ = self.see(state, trained, validated, some, penalty, t)
        done = self.act(seen, blank(Chosen, sizes, device).actions, t)
        self.close(seen.judged, done, blank(Chosen, sizes, device), blank(RewardOutput, sizes, device), t)
