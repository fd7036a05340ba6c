"""The three pure phases of a step, eager or compiled (`runs/kernels.py` chooses); both give the same answers."""

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
"""Turns a phase into the function that a run calls: itself, or a compiled one."""


def eager(phase: Callable[..., Any]) -> Callable[..., Any]:
    """The phase itself."""
    return phase


@final
class ControlPlane:
    """The phases with the configuration of an engine, all in one form."""

    def __init__(self, config: EngineConfig, costs: SeedCosts, form: PhaseForm = eager) -> None:
        self.observe: Callable[..., tuple[ObserveOutput, Measurements]] = form(partial(observe, config=config))
        self.execute: Callable[..., ExecuteOutput] = form(partial(execute, costs=costs, config=config))
        self.end_step: Callable[..., EndStepOutput] = form(partial(end_step, config=config))

    def warm_up(self, state: ParallelEnvState, coalitions: Iterable[Coalitions], num_terms: int) -> None:
        """Call each phase on blank inputs, once for each shape of `coalitions`, so that all is compiled before a step.

        `state` is any state of the engine without the reward's own; the reward has `num_terms`.

        Raises:
            ConfigError: a phase cannot be compiled.
        """
        device, (n, slots) = state.slots.stage.device, state.slots.stage.shape
        sizes, t = {"N": n, "S": slots, "M": num_terms}, torch.ones((), dtype=torch.int64, device=device)
        trained, penalty = blank(TrainPass, sizes, device), torch.zeros(n, device=device)
        for some in coalitions:
            validated = blank(ValidationPass, sizes | {"K": some.sets.shape[1]}, device)
            observed, _ = self.observe(state, trained, validated, some, penalty, t)
        decision = blank(Decision, sizes, device)
        executed = self.execute(observed, decision.actions, t)
        self.end_step(observed.verdict, executed, decision, blank(RewardOutput, sizes, device), t)
