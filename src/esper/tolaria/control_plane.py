"""The control plane of an engine: the three pure phases of a step, in the form that a run has chosen.

    form      `observe`, `execute` and `end_step` of `phases.py` are
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
from esper.tolaria.phases import EndStepOutput, ExecuteOutput, ObserveOutput, end_step, execute, observe
from esper.tolaria.reading import Decision
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
        self.observe: Callable[..., tuple[ObserveOutput, Measurements]] = form(partial(observe, config=config))
        self.execute: Callable[..., ExecuteOutput] = form(partial(execute, costs=costs, config=config))
        self.end_step: Callable[..., EndStepOutput] = form(partial(end_step, config=config))

    def warm_up(self, state: ParallelEnvState, coalitions: Iterable[Coalitions], num_terms: int) -> None:
        """Call each phase on hosts that do nothing, for each form of `coalitions`; the answers are forgotten.

        `state` is any that the engine could be in, but without what the reward carries; the reward has `num_terms`.
        """
        device, (n, slots) = state.slots.stage.device, state.slots.stage.shape
        sizes, t = {"N": n, "S": slots, "M": num_terms}, torch.ones((), dtype=torch.int64, device=device)
        trained, penalty = blank(TrainPass, sizes, device), torch.zeros(n, device=device)
        for some in coalitions:
            validated = blank(ValidationPass, sizes | {"K": some.sets.shape[1]}, device)
            seen, _ = self.observe(state, trained, validated, some, penalty, t)
        done = self.execute(seen, blank(Decision, sizes, device).actions, t)
        self.end_step(seen.judged, done, blank(Decision, sizes, device), blank(RewardOutput, sizes, device), t)
