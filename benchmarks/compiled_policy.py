"""What compiling the policy step is worth on a CPU, cold start included.

eager      the default on a CPU
inductor   torch.compile, and the same with Inductor's C++ wrapper
package    AOTInductor: compiled ahead of time, kept as a file, loaded by a new process

python benchmarks/compiled_policy.py --hosts 16 1024
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.fx.experimental.proxy_tensor import make_fx

from esper.leyline.actions import head_sizes
from esper.leyline.structure import flatten, unflatten
from esper.simic.agent.policy_step import PolicyInputs, PolicyStep, blank_inputs
from esper.tamiyo.network import TamiyoNetwork, initialize
from paired import cpu_ms

SLOTS, STEPS = 3, 40
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare forms of the policy step on one core of a CPU."""

    hosts: tuple[int, ...] = (16, 1024)
    """Numbers of hosts."""
    repetitions: int = 200
    """Times each form is measured."""


def forms(step: PolicyStep, inputs: PolicyInputs, folder: Path) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Name, seconds until the first result, and a call, of each form."""
    step(inputs, False)  # fills the caches of tables, which would become part of the graph
    yield "eager", 0.0, lambda: step(inputs, False)
    tensors, form = flatten(inputs)

    def flat(*tensors: Tensor) -> list[Tensor]:
        return flatten(step(unflatten(form, tensors), False))[0]

    graph = make_fx(flat)(*tensors)  # Dynamo does not get through the step, see `CompiledStep`
    for name, wrapper in (("inductor", False), ("inductor, C++ wrapper", True)):
        torch.compiler.reset()
        begin = time.perf_counter()
        compiled = torch.compile(graph.forward, fullgraph=True, options={"cpp_wrapper": wrapper})
        compiled(*tensors)
        yield name, time.perf_counter() - begin, lambda compiled=compiled: compiled(*tensors)
    begin, path = time.perf_counter(), str(folder / "policy.pt2")
    aoti_compile_and_package(torch.export.export(graph, tuple(tensors)), package_path=path)
    yield "package, built", time.perf_counter() - begin, lambda: None
    begin = time.perf_counter()
    package = aoti_load_package(path)
    package(*tensors)
    yield "package, loaded", time.perf_counter() - begin, lambda: package(*tensors)


def measure(hosts: int, repetitions: int) -> None:
    """Print first result, median time, and the ratio to eager within a repetition, of each form."""
    network = TamiyoNetwork(num_slots=SLOTS, head_sizes=head_sizes(SLOTS))
    initialize(network, 0)
    inputs = blank_inputs(network, hosts, SLOTS, CPU)
    selectable = torch.ones(head_sizes(SLOTS)[1], dtype=torch.bool)
    step = PolicyStep(network, selectable, STEPS)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        found = list(forms(step, inputs, Path(folder)))
        for _, _, form in found:
            form()
        times = [[cpu_ms(form) for _, _, form in found] for _ in range(repetitions)]
    print(f"{hosts} hosts")
    for k, (name, first, _) in enumerate(found):
        ms = statistics.median(row[k] for row in times)
        ratio = statistics.median(row[0] / row[k] for row in times)
        speed = "" if name == "package, built" else f"    {ms:6.2f} ms    {ratio:5.2f} x eager"
        print(f"    {name:24}first {first:5.1f} s{speed}")


def main() -> None:
    """Measure each number of hosts."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    for hosts in options.hosts:
        measure(hosts, options.repetitions)


if __name__ == "__main__":
    main()
