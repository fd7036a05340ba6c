"""Chooses for each function of a run whether it runs eagerly, compiled, or as a captured CUDA graph.

    function      what it is                            setting `compile`   setting `capture`
    observe       losses judged, measurements to state  compiled            eager
    policy_step   a decision of all hosts               compiled            captured, CUDA
    execute       ops, tick and feedback of all hosts   compiled            eager
    reward        the reward of a step of all hosts,    compiled            captured, CUDA
                  in all modes but `objective`
    end_step      tally, snapshots, outputs of a step   compiled            eager
    train_batch   forward, backward and optimizer step  eager               captured, CUDA, executor "fused"
                  of a batch of all hosts

All forms give the same results. Functions are compiled and captured before the first step; `graphs_compiled` and
`Captured.num_captures` count recompilations and recaptures.
"""

from collections.abc import Callable
from functools import partial

import torch

from esper.leyline.errors import ConfigError
from esper.leyline.protocols import EngineSpec
from esper.runs.config import RunConfig
from esper.simic.agent.policy_step import PolicyFunction, PolicyStep, blank_inputs
from esper.simic.compilation import CompiledStep, is_compiled
from esper.simic.rewards.compiled_rewards import Kernel, RewardOutput
from esper.tolaria.capture import Captured, capture, capture_backend_for
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.executors.static.executor import StaticExecutor
from esper.tolaria.phases import PhaseForm, eager


def compiled_reward(kernel: Kernel) -> Kernel:
    """The compiled kernel: one graph per reward mode, attribution formula and number of hosts."""
    step = CompiledStep(lambda given: _transposed(kernel(**given)), name="the reward kernel")
    return lambda **given: _transposed(step(given))


def _transposed(output: RewardOutput) -> RewardOutput:
    """The output with a row for each column: a graph writes one contiguously, and a table only by transposing it."""
    total, breakdown, info, escrow_next, drip_opened, flags = output
    return RewardOutput(total, breakdown.T, info.T, escrow_next, drip_opened, flags.T)


def policy_form(config: RunConfig, spec: EngineSpec) -> Callable[[PolicyStep], PolicyFunction]:
    """Wraps the policy step as the configuration asks; raises ConfigError if it cannot be compiled or captured."""
    recorder = capture_backend_for(config.capture, spec.device)

    def wrap(step: PolicyStep) -> PolicyFunction:
        decide: PolicyFunction = step
        example = blank_inputs(step.network, spec.num_envs, spec.num_slots, spec.device)
        if is_compiled(config.compile, spec.device):
            decide = CompiledStep(step, name="the policy step")
            decide(example, False)
        if recorder is not None:
            decide = capture(decide, example, False, recorder=recorder, name="the policy step")
        return decide

    return wrap


def phase_form(config: RunConfig, device: torch.device) -> PhaseForm:
    """Wraps the phases of a control step: eager, or compiled at the first reset of the engine."""
    compiled = is_compiled(config.compile, device)
    return partial(CompiledStep, name="a phase of the control step") if compiled else eager


def reward_form(config: RunConfig, spec: EngineSpec) -> Callable[[Kernel], Kernel] | None:
    """Wraps the reward kernel, None if it stays eager; raises ConfigError if the device does not support capture."""
    compiled = is_compiled(config.compile, spec.device)
    recorder = capture_backend_for(config.capture, spec.device)
    if not compiled and recorder is None:
        return None

    def wrap(kernel: Kernel) -> Kernel:
        kernel = compiled_reward(kernel) if compiled else kernel
        return kernel if recorder is None else Captured(kernel, recorder, name="the reward kernel")

    return wrap


def require_replayed_training(config: RunConfig, engine: VectorizedEngine) -> None:
    """Raise ConfigError if `capture` is on and the executor cannot be captured."""
    if config.capture == "on" and not isinstance(engine.executor, FusedExecutor | StaticExecutor | ScriptedExecutor):
        raise ConfigError(
            f"capture is 'on', but executor {engine.config.executor!r} cannot be captured; use executor 'fused', or "
            "leave capture out."
        )
