"""Every function that is compiled or replayed, with its eager twin: the one place where a run chooses among them.

    function      what it is                            setting `compile`        setting `capture`
    see           losses judged, measurements to state  compiled, or native      as it is
    policy_step   a decision of all hosts               compiled, or native      replayed, CUDA
    act           ops, tick and feedback of all hosts   compiled, or native      as it is
    reward        the pay of a step of all hosts, in    compiled                 replayed, CUDA
                  all modes but `objective`
    store         the row of the rollout buffer         compiled, or native      as it is
    close         tally, snapshots, what is told        compiled, or native      as it is
    train_batch   forward, backward and optimizer step  always eager             replayed, CUDA, executor "fused"
                  of a batch of all hosts

All forms of a function give the same answer, and the eager one stays importable. Compiling and recording happen here,
before the first step; `graphs_compiled` and `Captured.num_recordings` tell whether it happened again later. What
`compile` and `capture` mean on a device is decided by `form_of` and in `tolaria/capture.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from esper.kasmina.native.compiled import compiler
from esper.leyline.errors import ConfigError
from esper.leyline.protocols import EngineSpec
from esper.simic.agent.policy_step import PolicyFunction, PolicyStep, blank_inputs
from esper.simic.agent.stored_row import RowFunction, StoreFunction, copied, kept
from esper.simic.compilation import CompileChoice, CompiledStep, is_compiled
from esper.simic.lanes.step import RecordedStep
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.training.config import RunConfig
from esper.tolaria import phases
from esper.tolaria.capture import Captured, capture, recorder_for
from esper.tolaria.control_plane import PhaseForm, as_it_is
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.native import NativeExecutor
from esper.tolaria.executors.sharded import ShardedExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.executors.training_program import train_batch


def compiled_reward(kernel: Kernel) -> Kernel:
    """One graph for each mode, formula of attribution and number of hosts: numbers and clocks enter as tensors."""
    step = CompiledStep(lambda given: kernel(**given), name="the reward kernel")
    return lambda **given: step(given)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """One function: the eager twin, and what makes its other forms (None where there is none)."""

    eager: Callable[..., Any]
    compiled: Callable[..., Any] | None
    native: Callable[..., Any] | None


FUNCTIONS: Mapping[str, Forms] = {
    "see": Forms(eager=phases.see, compiled=CompiledStep, native=RecordedStep),
    "policy_step": Forms(eager=PolicyStep, compiled=CompiledStep, native=RecordedStep),
    "act": Forms(eager=phases.act, compiled=CompiledStep, native=RecordedStep),
    "reward": Forms(eager=compute_reward_batched, compiled=compiled_reward, native=None),
    "store": Forms(eager=kept, compiled=CompiledStep, native=RecordedStep),
    "close": Forms(eager=phases.close, compiled=CompiledStep, native=RecordedStep),
    "train_batch": Forms(eager=train_batch, compiled=None, native=None),
}
"""By name; `tolaria.capture.CAPTURED` are those that can be replayed."""


def form_of(choice: CompileChoice, device: torch.device) -> Literal["off", "on", "native"]:
    """What a setting of `compile` means here.

    Raises:
        ConfigError: "native" on another device than a CPU.
    """
    if choice == "native" and device.type != "cpu":
        raise ConfigError(
            f"compile is 'native', but the device is {device}, and compiled C++ runs on a CPU; set compile to 'auto'."
        )
    if choice != "auto":
        return choice
    if device.type == "cpu":
        return "off" if compiler() is None else "native"
    return "on" if is_compiled(choice, device) else "off"


def policy_form(config: RunConfig, spec: EngineSpec) -> Callable[[PolicyStep], PolicyFunction]:
    """What makes the policy step of a run: eager, or compiled, and then recorded or not.

    Raises:
        ConfigError: it was asked for and cannot be, here or when it is made.
    """
    recorder = recorder_for(config.capture, "policy_step", spec.device)

    def made(step: PolicyStep) -> PolicyFunction:
        decide: PolicyFunction = step
        example = blank_inputs(step.network, spec.num_envs, spec.num_slots, spec.device)
        form = form_of(config.compile, spec.device)
        if form != "off":
            decide = (CompiledStep if form == "on" else RecordedStep)(step, name="the policy step")
            decide(example, False)
        if recorder is not None:
            decide = capture(decide, example, False, recorder=recorder, name="the policy step")
        return decide

    return made


def store_form(config: RunConfig, device: torch.device) -> Callable[[RowFunction], StoreFunction]:
    """What makes the function that stores a step: eager or compiled and then copied, or written in place."""
    form, name = form_of(config.compile, device), "the stored row"
    if form == "native":
        return lambda function: RecordedStep(function, name=name).write
    return (lambda function: copied(CompiledStep(function, name=name))) if form == "on" else copied


def phase_form(config: RunConfig, device: torch.device) -> PhaseForm:
    """What makes the pure phases of a control step: eager, or compiled or recorded in the first reset of the engine."""
    form, name = form_of(config.compile, device), "a phase of the control step"
    if form == "native":
        return partial(RecordedStep, name=name)
    return partial(CompiledStep, name=name, narrow=True) if form == "on" else as_it_is


def reward_form(config: RunConfig, spec: EngineSpec) -> Callable[[Kernel], Kernel] | None:
    """What makes the form of the reward kernel, None where it is eager: compiled, and then captured or not.

    Raises:
        ConfigError: capture was asked for on a device that cannot.
    """
    compiled = form_of(config.compile, spec.device) == "on"
    recorder = recorder_for(config.capture, "reward", spec.device)
    if not compiled and recorder is None:
        return None

    def made(kernel: Kernel) -> Kernel:
        kernel = compiled_reward(kernel) if compiled else kernel
        return kernel if recorder is None else Captured(kernel, recorder, name="the reward kernel")

    return made


def require_replayed_training(config: RunConfig, engine: VectorizedEngine) -> None:
    """Refuse `capture = "on"` where hosts are trained by an executor that cannot be replayed; raises ConfigError."""
    if config.capture == "on" and isinstance(engine.executor, StreamedExecutor | NativeExecutor | ShardedExecutor):
        raise ConfigError(
            f"capture is 'on', but the executor is {engine.config.executor!r}, whose hosts are trained one after "
            "another and not replayed; use executor 'fused', or capture 'auto'."
        )
