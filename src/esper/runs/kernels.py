"""Every function that is compiled or replayed, with its eager twin: the one place where a run chooses among them.

    function      what it is                            setting `compile`   setting `capture`
    observe       losses judged, measurements to state  compiled            eager
    policy_step   a decision of all hosts               compiled            replayed, CUDA
    execute       ops, tick and feedback of all hosts   compiled            eager
    reward        the reward of a step of all hosts,    compiled            replayed, CUDA
                  in all modes but `objective`
    end_step      tally, snapshots, outputs of a step   compiled            eager
    train_batch   forward, backward and optimizer step  eager               replayed, CUDA, executor "fused"
                  of a batch of all hosts

All forms of a function give the same answer, and the eager one stays importable. Compiling and recording happen here,
before the first step; `graphs_compiled` and `Captured.num_captures` tell whether it happened again later. What
`compile` and `capture` mean on a device is decided in `simic/compilation.py` and `tolaria/capture.py`.
"""

from collections.abc import Callable
from functools import partial

import torch

from esper.leyline.errors import ConfigError
from esper.leyline.protocols import EngineSpec
from esper.runs.config import RunConfig
from esper.simic.agent.policy_step import PolicyFunction, PolicyStep, blank_inputs
from esper.simic.compilation import CompiledStep, is_compiled
from esper.simic.rewards.compiled_rewards import Kernel
from esper.tolaria.capture import Captured, capture, capture_backend_for
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.executors.static.executor import StaticExecutor
from esper.tolaria.phases import PhaseForm, eager


def compiled_reward(kernel: Kernel) -> Kernel:
    """One graph for each mode, formula of attribution and number of hosts: numbers and clocks enter as tensors."""
    step = CompiledStep(lambda given: kernel(**given), name="the reward kernel")
    return lambda **given: step(given)


def policy_form(config: RunConfig, spec: EngineSpec) -> Callable[[PolicyStep], PolicyFunction]:
    """What makes the policy step of a run: eager or compiled, recorded or not.

    Raises:
        ConfigError: it was asked for and cannot be, here or when it is made.
    """
    recorder = capture_backend_for(config.capture, spec.device)

    def made(step: PolicyStep) -> PolicyFunction:
        decide: PolicyFunction = step
        example = blank_inputs(step.network, spec.num_envs, spec.num_slots, spec.device)
        if is_compiled(config.compile, spec.device):
            decide = CompiledStep(step, name="the policy step")
            decide(example, False)
        if recorder is not None:
            decide = capture(decide, example, False, recorder=recorder, name="the policy step")
        return decide

    return made


def phase_form(config: RunConfig, device: torch.device) -> PhaseForm:
    """What makes the pure phases of a control step: eager, or compiled in the first reset of the engine."""
    compiled = is_compiled(config.compile, device)
    return partial(CompiledStep, name="a phase of the control step") if compiled else eager


def reward_form(config: RunConfig, spec: EngineSpec) -> Callable[[Kernel], Kernel] | None:
    """What makes the form of the reward kernel, None where it is eager: compiled, and then captured or not.

    Raises:
        ConfigError: capture was asked for on a device that cannot.
    """
    compiled = is_compiled(config.compile, spec.device)
    recorder = capture_backend_for(config.capture, spec.device)
    if not compiled and recorder is None:
        return None

    def made(kernel: Kernel) -> Kernel:
        kernel = compiled_reward(kernel) if compiled else kernel
        return kernel if recorder is None else Captured(kernel, recorder, name="the reward kernel")

    return made


def require_replayed_training(config: RunConfig, engine: VectorizedEngine) -> None:
    """Refuse `capture = "on"` where hosts are trained by an executor that cannot be replayed; raises ConfigError."""
    if config.capture == "on" and not isinstance(engine.executor, FusedExecutor | StaticExecutor | ScriptedExecutor):
        raise ConfigError(
            f"capture is 'on', but the executor is {engine.config.executor!r}, whose hosts are trained one after "
            "another and not replayed; use executor 'fused', or leave capture out."
        )
