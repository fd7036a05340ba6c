"""Eager or compiled: the one place that decides how the reward kernel runs.

    "off"    eager, on every device
    "on"     compiled, on every device; on the CPU that needs a C++ compiler
    "auto"   compiled on CUDA; eager on the CPU, where a graph takes about half a minute to compile

Both forms give the same answer. A graph is compiled for each mode, formula of attribution and number of hosts, and for
nothing else: weights, epoch and length of the episode enter as tensors. On the CPU it is entered directly, see
`cpu_kernel.py`. `graphs_compiled` tells whether that held.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch

from esper.leyline.errors import ConfigError
from esper.leyline.messages import HostState, RewardInputs, SlotState
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.rewards.cpu_kernel import CpuKernel
from esper.simic.rewards.facts import potential_table

CompileChoice = Literal["auto", "off", "on"]
R = TypeVar("R")

_OPTIONS: dict[str, dict[str, Any]] = {
    # not the whole of "max-autotune": its CUDA graphs would overwrite the potential that the state keeps
    "cuda": {"max_autotune": True, "coordinate_descent_tuning": True},
}
_DTYPES = {"bool": torch.bool, "int64": torch.int64}


def is_compiled(choice: CompileChoice, device: torch.device) -> bool:
    """Whether this choice means a compiled kernel on this device."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def kernel_for(choice: CompileChoice, device: torch.device) -> Kernel:
    """The kernel as it was chosen; one that is compiled is compiled in its first call, see `warm_up`."""
    if not is_compiled(choice, device):
        return compute_reward_batched
    # said here and not where it is defined: saying it imports the compiler, two seconds that an eager run need not wait
    torch.compiler.assume_constant_result(potential_table)
    if device.type == "cpu":
        return CpuKernel()
    options = _OPTIONS.get(device.type, {}) | {"guard_filter_fn": _arguments_only}
    compiled: Kernel = torch.compile(compute_reward_batched, fullgraph=True, dynamic=False, options=options)
    return compiled


def graphs_compiled() -> int:
    """Graphs that this process has compiled so far; after a warm-up the number must not grow."""
    from torch._dynamo.utils import counters  # imported late: it takes a second, which an eager run need not wait for

    return CpuKernel.compiled + int(counters["stats"]["unique_graphs"])


def explained(error: Exception) -> ConfigError:
    """What a failed compilation means to the user."""
    first_line = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"the reward kernel could not be compiled ({type(error).__name__}: {first_line}); set compile = 'off', or "
        "install what is missing (on the CPU a C++ compiler such as g++)."
    )


def blank_inputs(n: int, slots: int, device: torch.device) -> RewardInputs:
    """A step in which nothing was measured and nothing was done, with the shapes and dtypes of the real ones."""
    whole = torch.zeros(n, dtype=torch.int64, device=device)
    return RewardInputs(
        epoch=1,
        max_epochs=1,
        slots=_blank(SlotState, n, slots, device),
        hosts=_blank(HostState, n, slots, device),
        interactions=torch.zeros(n, slots, slots, device=device),
        ops=whole,
        target=whole,
        success=whole.bool(),
        auto_pruned=whole,
    )


def _blank(kind: type[R], n: int, slots: int, device: torch.device) -> R:
    """A record of zeros; shapes and dtypes are those of its annotations."""
    sizes, values = {"N": n, "S": slots}, {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        annotation: Any = field.type
        shape = [sizes[axis] if axis in sizes else int(axis) for axis in annotation.dim_str.split()]
        dtype = next((d for name, d in _DTYPES.items() if name in annotation.dtypes), torch.float32)
        values[field.name] = torch.zeros(shape, dtype=dtype, device=device)
    return kind(**values)


def _arguments_only(guards: Sequence[Any]) -> list[bool]:
    """Check the arguments before each call, and not again the functions and constants of our own modules.

    There are hundreds of the latter, which nothing changes while a process lives; to check them takes about as long as
    to pay a thousand hosts.
    """
    return [not guard.is_global for guard in guards]
