"""The compiled forms of the reward kernel, and inputs to compile them with.

A graph is compiled for each mode, formula of attribution and number of hosts, and for nothing else: weights, epoch and
length of the episode enter as tensors. On the CPU it is entered directly, see `cpu_kernel.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from esper.leyline.messages import HostState, RewardInputs, SlotState
from esper.leyline.record import blank
from esper.simic.compilation import CompileChoice, is_compiled
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.rewards.cpu_kernel import CpuKernel
from esper.simic.rewards.facts import potential_table

_OPTIONS: dict[str, dict[str, Any]] = {
    # not the whole of "max-autotune": its CUDA graphs would overwrite the potential that the state keeps
    "cuda": {"max_autotune": True, "coordinate_descent_tuning": True},
}


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


def blank_inputs(n: int, slots: int, device: torch.device) -> RewardInputs:
    """A step in which nothing was measured and nothing was done, with the shapes and dtypes of the real ones."""
    sizes = {"N": n, "S": slots}
    whole = torch.zeros(n, dtype=torch.int64, device=device)
    return RewardInputs(
        epoch=1,
        max_epochs=1,
        slots=blank(SlotState, sizes, device),
        hosts=blank(HostState, sizes, device),
        interactions=torch.zeros(n, slots, slots, device=device),
        ops=whole,
        target=whole,
        success=whole.bool(),
        auto_pruned=whole,
    )


def _arguments_only(guards: Sequence[Any]) -> list[bool]:
    """Check the arguments before each call, and not again the functions and constants of our own modules.

    There are hundreds of the latter, which nothing changes while a process lives; to check them takes about as long as
    to pay a thousand hosts.
    """
    return [not guard.is_global for guard in guards]
