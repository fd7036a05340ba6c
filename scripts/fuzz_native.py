"""Random networks in compiled C++ and in PyTorch: outputs, gradients, running statistics, and three optimizer steps.

    python scripts/fuzz_native.py --count 300                  a table; exit code 1 if anything was found
    python scripts/fuzz_native.py --seed 3 --only 17           one of its networks again, with all that is known of it
    python scripts/fuzz_native.py --count 300 --sanitize       with the address and undefined behaviour sanitizers

A network that has an operation without a rule is counted by the reason, and tried again without that operation. What
must not be is found: other numbers than PyTorch's, another exception, a crash. Each is reduced to a few steps.

float64 is compared to 1e-8 of the largest number of a tensor; float32 to how far PyTorch's own float32 is off.
"""

import copy
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.dropout import with_keyed_dropout
from esper.kasmina.parameters.layout import Template
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.leyline.messages import SlotState
from esper.leyline.tensor_dataclass import replace as changed
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import Classification, MeanSquaredError
from esper.tasks.registry import TaskSpec
from esper.tolaria.build import build_engine
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.native.compare import TOLERANCE, Outcome, by_instructions, by_torch
from esper.tolaria.executors.native.machine import cached_library
from esper.tolaria.executors.native.trace import NoRuleError, trace
from esper.tolaria.executors.protocol import Structure, empty_structure
from random_networks import Network, Plan, RefusedError, Step, check, draw

BLENDS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)
CHUNK, LARGEST_BATCH = 16, 40
_OF_FLOAT, _TIMES = 2e-5, 20.0
"""A float32 number may be off by this share of the largest, and by so many times as PyTorch's own."""
_GROUP, _SECONDS = 10, 120
"""Networks that a process runs, and how long it may take for one."""
SANITIZED = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"
Status = Literal["ran", "refused", "difference", "exception", "crash"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare random networks."""

    seed: int = 0
    """Of all networks."""
    count: int = 100
    """How many."""
    only: int | None = None
    """One of them alone, in this process."""
    workers: int = 1
    """Processes."""
    sanitize: bool = False
    """Compile with sanitizers, which end a process where it reads what it must not."""
    reduce: bool = True
    """Look for a smaller network with the same finding."""
    steps: bool = False
    """Also train three optimizer steps through the engine, beside the streamed executor."""


@dataclass(frozen=True)
class Found:
    """What became of a network; `refusals` are the reasons why steps were left out."""

    k: int
    status: Status
    words: str = ""
    plan: str = ""
    refusals: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def steps_left_out(self) -> bool:
        """Whether it ran in part."""
        return any(not reason.startswith("as a host") for reason in self.refusals)


@dataclass
class Report:
    """All networks."""

    found: list[Found] = field(default_factory=list)

    def of(self, status: Status) -> list[Found]:
        """Those with a status."""
        return [f for f in self.found if f.status == status]

    @property
    def findings(self) -> list[Found]:
        """What must not be."""
        return [f for f in self.found if f.status not in ("ran", "refused")]

    def table(self) -> Table:
        """A row for each number, and one for each reason of a refusal."""
        page = Table(title="random networks in compiled C++ and in PyTorch")
        page.add_column("what")
        page.add_column("count", justify="right")
        ran = self.of("ran")
        rows: dict[str, object] = {
            "networks": len(self.found), "ran whole": sum(not f.steps_left_out for f in ran),
            "ran without some steps": sum(f.steps_left_out for f in ran), "refused": len(self.of("refused")),
            "differences": len(self.of("difference")), "exceptions": len(self.of("exception")),
            "crashes": len(self.of("crash")), "seconds": f"{sum(f.seconds for f in self.found):.0f}",
        }  # fmt: skip
        for name, value in rows.items():
            page.add_row(name, str(value))
        page.add_section()
        reasons = Counter(reason for f in self.found for reason in f.refusals)
        for reason, count in reasons.most_common():
            page.add_row(f"refused: {reason}", str(count))
        return page


# -- one network -------------------------------------------------------------------------------------------------------


class Subject:
    """A network with weights, ready to be compared."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.template = plan, Template(with_keyed_dropout(Network(plan)))
        self._graphs: dict[bool, fx.Graph] = {}
        t, generator = self.template, torch.Generator().manual_seed(plan.seed)
        self.row, self.buffers = (
            layout.pack({name: x.detach() for name, x in tensors}).double()
            for layout, tensors in (
                (t.parameters, t.module.named_parameters()), (t.buffers, t.module.named_buffers())
            )
        )  # fmt: skip
        self.row += 0.1 * torch.randn(self.row.shape, generator=generator, dtype=torch.float64)
        if len(self.row):
            self.row[t.parameters.padding_mask] = 0.0

    def plain(self, batch: int, dtype: torch.dtype, *, training: bool, draw: int = 0) -> Outcome:
        """In PyTorch."""
        x = self.plan.inputs(batch, draw, dtype)
        return by_torch(self.template, self.row.to(dtype), self.buffers.to(dtype), x, training=training)

    def native(
        self, batch: int, dtype: torch.dtype, *, training: bool, draw: int = 0, chunk: int | None = None
    ) -> Outcome:
        """As instructions; raises NoRuleError."""
        x, row, buffers = self.plan.inputs(batch, draw, dtype), self.row.to(dtype), self.buffers.to(dtype)
        if training not in self._graphs:
            example = x if self.plan.vocabulary else x.float()
            self._graphs[training] = trace(Template(copy.deepcopy(self.template.module)), example, training=training)
        return by_instructions(self._graphs[training], row, buffers, x, training=training, chunk=chunk)

    def tensors(self, outcome: Outcome) -> Iterator[tuple[str, Tensor | None]]:
        """What is compared, by name."""
        yield "the outputs", outcome.outputs
        if not self.plan.vocabulary:
            yield "the gradient of the input", outcome.input_grads
        if outcome.weight_grads is not None:
            for name, x in self.template.parameters.unpack(outcome.weight_grads).items():
                yield f"the gradient of {name}", x
        for name, x in self.template.buffers.unpack(outcome.buffers).items():
            yield f"buffer {name}", x


subject_of = lru_cache(4)(Subject)


def refusal(plan: Plan, *, whole: bool = True) -> str | None:
    """Why a network is refused (if not `whole`, in training alone); None if it is not."""
    subject = subject_of(plan)
    for training in (True, False) if whole else (True,):
        try:
            subject.native(2, torch.float32, training=training)
        except NoRuleError as error:
            return re.sub(r" \([^()]*, line \d+\)|\b\d+\b", "", str(error)).replace("  ", " ")[:100]
    return None


def differs(plan: Plan) -> str | None:
    """How a network differs as instructions; None if it does not."""
    subject, r = subject_of(plan), random.Random(plan.seed)
    few, many = r.randint(1, LARGEST_BATCH), r.randint(CHUNK + 1, LARGEST_BATCH)
    few = 2 if few == 1 and not _means_the_same_alone(subject) else few
    for training, batch, chunk in ((True, few, None), (False, few, None), (True, many, CHUNK), (False, many, CHUNK)):
        exact = subject.plain(batch, torch.float64, training=training)
        given = {"training": training, "draw": 0, "chunk": chunk}
        where = f"in {'training' if training else 'evaluation'}, {batch} examples{(chunk and ' in chunks') or ''}"
        found = subject.native(batch, torch.float64, **given)  # type: ignore[arg-type]
        if words := _unlike(subject, found, exact, lambda name, scale: TOLERANCE * scale):
            return f"{words} {where}, float64"
        if chunk is not None:
            continue
        for draw_number in range(3):  # a maximum or threshold may fall otherwise by rounding, but not every time
            exact = subject.plain(batch, torch.float64, training=training, draw=draw_number)
            rounded = dict(subject.tensors(subject.plain(batch, torch.float32, training=training, draw=draw_number)))
            of_torch = {
                name: 0.0 if x is None or not x.numel() else float((x - rounded[name].double()).abs().max())  # type: ignore[union-attr]
                for name, x in subject.tensors(exact)
            }
            found = subject.native(batch, torch.float32, **{**given, "draw": draw_number})  # type: ignore[arg-type]
            words = _unlike(subject, found, exact, lambda name, scale: _OF_FLOAT * scale + _TIMES * of_torch[name])  # noqa: B023
            if words is None:
                break
        else:
            return f"{words} {where}, float32"
    return None


def _means_the_same_alone(subject: Subject) -> bool:
    """Whether PyTorch runs a batch of one example, and gives it what it has beside others."""
    try:
        alone = subject.plain(1, torch.float64, training=False).outputs
        subject.plain(1, torch.float64, training=True)
        x = subject.plan.inputs(1, 0, torch.float64)
        both = by_torch(subject.template, subject.row, subject.buffers, torch.cat([x, x]), training=False).outputs
    except Exception:  # PyTorch refuses it
        return False
    return alone.shape[0] == 1 and torch.allclose(alone[0], both[0])


def _unlike(
    subject: Subject, found: Outcome, want: Outcome, allowed: Callable[[str, float], float]
) -> str | None:  # fmt: skip
    """Which tensor differs by more than is allowed."""
    of_want = dict(subject.tensors(want))
    for name, a in subject.tensors(found):
        b = of_want[name]
        if (a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape):
            return f"{name} has another shape"
        if a is None or b is None or not a.numel() or not bool(b.isfinite().all()):
            continue
        off, scale = float((a.double() - b).abs().max()), max(1.0, float(b.abs().max()))
        if not off <= allowed(name, scale):  # also if it is not a number
            return f"{name} is off by {off:.1e} of {scale:.1e}"
    return None


def without_refused(plan: Plan) -> Plan | None:
    """The network without the first step that is refused, or up to it; None if little is left."""
    by_evaluation = refusal(plan, whole=False) is None
    low, high = 0, len(plan.steps)  # refused with `high` steps, not with `low`
    while high - low > 1:
        middle = (low + high) // 2
        if refusal(replace(plan, steps=plan.steps[:middle]), whole=by_evaluation) is None:
            low = middle
        else:
            high = middle
    if low == 0 and plan.vocabulary:
        return None
    for smaller in (_without(plan, high - 1), replace(plan, steps=plan.steps[: high - 1])):
        if smaller is not None and len(smaller.steps) >= 2 and _sound(smaller):
            return smaller
    return None


def _without(plan: Plan, gone: int) -> Plan | None:
    """The network without a step: who reads its value reads its first source; None where its module is used again."""
    if any(f"steps[{gone}]" in step.code for step in plan.steps):
        return None
    source = plan.steps[gone].sources[0]

    def moved(k: int) -> int:
        return source if k == gone + 1 else k - (k > gone + 1)

    steps = []
    for k, step in enumerate(plan.steps):
        if k != gone:
            code = re.sub(r"steps\[(\d+)\]", lambda m: f"steps[{int(m[1]) - (int(m[1]) > gone)}]", step.code)
            steps.append(Step(code, tuple(moved(k) for k in step.sources)))
    return replace(plan, steps=tuple(steps))


def _sound(plan: Plan) -> bool:
    try:
        check(plan)
    except RefusedError:
        return False
    return True


def one(seed: int, k: int, look: Callable[[Plan], str | None]) -> tuple[Found, Plan]:
    """Compare the k-th network."""
    began = time.perf_counter()
    plan = draw(seed, k)
    refusals: list[str] = []

    def found(status: Status, words: str = "") -> tuple[Found, Plan]:
        return Found(k, status, words, str(plan), tuple(refusals), time.perf_counter() - began), plan

    try:
        while (reason := refusal(plan)) is not None:
            refusals.append(reason)
            smaller = without_refused(plan)
            if smaller is None:
                return found("refused")
            plan = smaller
        words = look(plan)
    except NotAHostError as error:
        refusals.append("as a host: " + re.sub(r"steps\.\d+|\d+", "", " ".join(str(error).split()))[:90])
        return found("ran")
    except Exception:  # it is reported
        return found("exception", traceback.format_exc(limit=-4))
    return found("ran") if words is None else found("difference", words)


# -- three optimizer steps ---------------------------------------------------------------------------------------------


class NotAHostError(Exception):
    """A network that esper refuses; the message says why."""


def trains_otherwise(plan: Plan) -> str | None:
    """How two hosts with seeds differ after three optimizer steps from the same by the streamed executor, in float32.

    Raises:
        NotAHostError: esper does not take the network.
    """
    words = None
    for draw_number in range(2):  # a maximum may fall otherwise by rounding, but not every time
        words = _trained(plan, random.Random(f"{plan.seed} {draw_number}"))
        if words is None:
            return None
    return words


def _trained(plan: Plan, r: random.Random) -> str | None:
    batch, spec = r.randint(2, LARGEST_BATCH), _host(plan, r)
    count, outputs = 3 * batch, Network(plan)(plan.inputs(4, 0, torch.float32)).detach()
    classes = outputs.shape[1] if outputs.dim() == 2 and outputs.shape[1] > 1 and r.random() < 0.5 else 0

    def split(n: int) -> Split:
        generator = torch.Generator().manual_seed(n)
        y = torch.arange(n) % classes if classes else torch.randn(n, *outputs.shape[1:], generator=generator)
        return Split(plan.inputs(n, n, torch.float32), y)

    parts = {"train": split(count), "val": split(20), "test": split(4)}
    data = Dataset(identity={"name": "random"}, **parts, num_classes=classes)
    kind = r.choice(["sgd", "adamw"])
    task = TaskSpec(
        name="random", description="A random network.", family=spec.family, host=spec, load=lambda folder, seed: data,
        enabled=tuple(point.slot_id for point in spec.points()), episode_length=8, min_training_epochs=1,
        objective=Classification(classes) if classes else MeanSquaredError(1.0), batch_train=batch, batch_val=16,
        optimizer=OptimizerSpec(kind=kind, host_lr=0.02, seed_lr=0.02, eps=0.01),
    )  # fmt: skip
    structure, slots, coalitions = _grown(spec, r)
    found = []
    for executor in ("streamed", "native"):
        config = EngineConfig(num_envs=2, slots=task.enabled, episode_length=8, executor=executor)
        try:
            engine = build_engine(config, task, data, torch.device("cpu"))
        except ConfigError as error:
            raise NotAHostError(str(error)) from error
        engine.executor.reset(0)
        engine.executor.apply_structure(structure)
        trained = engine.executor.train_epoch(1, slots)
        # states are read before anything is measured
        state = {name: x.clone() for name, x in engine.executor.state_dict().items() if isinstance(x, Tensor)}
        measured = engine.executor.evaluate(1, slots, coalitions)
        found.append({**state, "loss of training": trained.loss, "loss of validation": measured.loss})
    for name, want in found[0].items():
        got = found[1][name]
        if want.numel() and want.is_floating_point():
            scale = max(1.0, float(want.abs().max()))
            off = float((got.double() - want.double()).abs().nan_to_num(0.0).max())
            if not off <= 2e-3 * scale or not torch.equal(got.isnan(), want.isnan()):
                return f"{name} is off by {off:.1e} of {scale:.1e} after three steps by {kind}, {batch} examples"
    return None


def _host(plan: Plan, r: random.Random) -> ModuleHostSpec:
    """The network as a host, with one or two slots."""
    features: dict[int, list[str]] = {}
    network = Network(plan)
    used = Counter(id(module) for module in network.steps)
    for k, module in enumerate(network.steps):

        def note(module: nn.Module, given: object, y: Tensor, k: int = k) -> None:
            features.setdefault(y.dim(), []).append(f"steps.{k}")

        if used[id(module)] == 1:
            module.register_forward_hook(note)
    x = plan.inputs(8, 0, torch.float32)
    network(x)
    words = "no place for a slot"
    for axes in sorted(features, key=lambda axes: -axes):
        for count in (2, 1, 1):
            slots = tuple(sorted(r.sample(features[axes], min(count, len(features[axes])))))
            try:
                return ModuleHostSpec.of(partial(Network, plan), slots, x)
            except ConfigError as error:
                words = str(error)
    raise NotAHostError(words)


def _grown(spec: ModuleHostSpec, r: random.Random) -> tuple[Structure, SlotState, Coalitions]:
    """Seeds in some slots of two hosts."""
    count = len(spec.points())
    holds = np.array([[r.random() < 0.6 for _ in range(count)] for _ in range(2)])
    stage = np.where(holds, int(SeedStage.HOLDING), int(SeedStage.DORMANT)).astype(np.int64)
    choice = registry.selectable(spec.family)
    blueprint = np.array([[r.choice(choice) for _ in range(count)] for _ in range(2)])
    algorithm = np.array([[int(r.choice(BLENDS)) for _ in range(count)] for _ in range(2)])
    coalitions = enumerate_coalitions(torch.from_numpy(stage), torch.from_numpy(holds))
    structure = replace(
        empty_structure(2, count), stage=stage, blueprint=np.where(holds, blueprint, -1), algorithm=algorithm,
        has_gate=holds & (algorithm == Algorithm.GATE), alpha=np.where(holds, np.float32(0.5), np.float32(0.0)),
        germinated=holds, sets=coalitions.sets.numpy(), sets_valid=coalitions.valid.numpy(),
    )  # fmt: skip
    names = "stage", "blueprint", "algorithm", "has_gate", "alpha"
    fields = {name: torch.from_numpy(getattr(structure, name)) for name in names}
    return structure, changed(empty_slots(2, count, torch.device("cpu")), **fields), coalitions


def both(plan: Plan) -> str | None:
    """`differs`, and `trains_otherwise`."""
    return differs(plan) or trains_otherwise(plan)


# -- processes ---------------------------------------------------------------------------------------------------------


def in_process(work: Callable[[Connection], None], timeout: float = _SECONDS) -> Iterator[object]:
    """What `work` sends from a process of its own; at last the words of how it ended, if not well."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:

        def run() -> None:
            gc.freeze()  # what the process before holds, such as a library's threads, cannot be collected in this one
            os.dup2(log.fileno(), 2)
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
            work(theirs)

        process = context.Process(target=run)
        process.start()
        theirs.close()
        try:
            while True:
                if not ours.poll(timeout):
                    process.kill()
                    process.join()
                    yield f"it took more than {timeout:.0f} seconds"
                    return
                yield ours.recv()
        except EOFError:
            process.join()
        if process.exitcode != 0:
            code = process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            log.seek(0)
            said = [line for line in log.read().splitlines() if re.search(r"ERROR|runtime error|#[0-9] ", line)][:8]
            yield "\n".join([name, *said])


def networks(options: Options, numbers: list[int], look: Callable[[Plan], str | None]) -> Iterator[Found]:
    """Compare some networks; a process that ends is followed by another one."""
    todo = list(numbers)
    while todo:
        group, began = todo[:_GROUP], time.perf_counter()

        def work(pipe: Connection, group: list[int] = group) -> None:
            for k in group:
                pipe.send(one(options.seed, k, look)[0])

        for message in in_process(work):
            if isinstance(message, Found):
                todo.remove(message.k)
                began = time.perf_counter()
                yield message
            else:
                k = todo.pop(0)
                seconds = time.perf_counter() - began
                yield Found(k, "crash", str(message), str(draw(options.seed, k)), seconds=seconds)


def survey(
    options: Options, show: Callable[[Found], None] = lambda found: None, look: Callable[[Plan], str | None] = differs
) -> Report:
    """Compare all networks, in several processes."""
    cached_library()  # before the processes, so that it is compiled once
    report, context = Report(), get_context("fork")
    numbers = list(range(options.count))
    pipes = []
    for worker in range(options.workers):
        ours, theirs = context.Pipe(duplex=False)

        def work(pipe: Connection = theirs, own: list[int] = numbers[worker :: options.workers]) -> None:
            gc.freeze()
            for found in networks(options, own, look):
                pipe.send(found)
            pipe.close()

        process = context.Process(target=work)
        process.start()
        theirs.close()
        pipes.append(ours)
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                found = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            report.found.append(found)
            show(found)
    report.found.sort(key=lambda f: f.k)
    return report


# -- smaller networks --------------------------------------------------------------------------------------------------


def reduced(plan: Plan, status: Status, look: Callable[[Plan], str | None]) -> tuple[Plan, str]:
    """A smaller network with a finding of the same kind, and its words."""

    def finding(smaller: Plan) -> str | None:
        def work(pipe: Connection) -> None:
            try:
                pipe.send((("difference", look(smaller)),))
            except (NoRuleError, NotAHostError):
                pipe.send((("difference", None),))
            except Exception:
                pipe.send((("exception", traceback.format_exc(limit=-4)),))

        for message in in_process(work):
            kind, words = message[0] if isinstance(message, tuple) else ("crash", str(message))
            if kind == status and words is not None:
                return str(words)
        return None

    words, shrunk = finding(plan) or "", True
    while shrunk:
        shrunk = False
        count = len(plan.steps)
        smaller = [replace(plan, steps=plan.steps[:n]) for n in range(1, count)]
        smaller += [p for p in (_without(plan, gone) for gone in reversed(range(count))) if p is not None]
        for candidate in smaller:
            if candidate.steps and _sound(candidate) and (found := finding(candidate)) is not None:
                plan, words, shrunk = candidate, found, True
                break
    return plan, words


def explained(found: Found, options: Options, look: Callable[[Plan], str | None]) -> str:
    """A finding in words, with a smaller network."""
    lines = [f"network {found.k}: {found.status}: {found.words}", found.plan]
    if options.reduce:
        plan = _final_plan(options.seed, found.k) if found.status != "crash" else draw(options.seed, found.k)
        smaller, words = reduced(plan, found.status, look)
        lines += [f"reduced: {words}", str(smaller)]
    lines.append(f"again: python scripts/fuzz_native.py --seed {options.seed} --only {found.k}")
    return "\n".join(lines)


def _final_plan(seed: int, k: int) -> Plan:
    """The network without its refused steps."""
    return one(seed, k, lambda plan: None)[1]


# -- command -----------------------------------------------------------------------------------------------------------


def sanitized() -> int:
    """This command again with sanitizers in place; its exit code."""
    if shutil.which("g++") is None:
        print("--sanitize needs g++.", file=sys.stderr)
        return 2

    def runtime(name: str) -> str:
        command = ["g++", f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    compiled = {**os.environ, "CXX": "g++", "ESPER_CXXFLAGS": SANITIZED}
    # the compiler itself is slow under a sanitizer, so it runs first; the library cannot be loaded then
    for dtype in ("float32", "float64"):
        load = f"import torch; from {cached_library.__module__} import cached_library as load; load(torch.{dtype})"
        subprocess.run([sys.executable, "-c", load], env=compiled, capture_output=True, check=False)
    preloaded = f"{runtime('libasan.so')} {runtime('libstdc++.so')}"
    given = {**compiled, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([sys.executable, *sys.argv], env=given, check=False).returncode


def main(options: Options) -> int:
    """Compare and print; returns 1 if anything was found."""
    if options.sanitize and os.environ.get("ESPER_CXXFLAGS") != SANITIZED:
        return sanitized()
    torch.set_num_threads(1)
    look = both if options.steps else differs
    print(f"seed {options.seed}")
    if options.only is not None:
        print(draw(options.seed, options.only))
        found, plan = one(options.seed, options.only, look)
        print(f"{found.status}: {found.words}", *(f"refused: {reason}" for reason in found.refusals), plan, sep="\n")
        return int(found.status not in ("ran", "refused"))

    def show(found: Found) -> None:
        if found.status not in ("ran", "refused"):
            print(explained(found, options, look), end="\n\n", flush=True)

    report = survey(options, show, look)
    Console(width=140).print(report.table())
    return int(bool(report.findings))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(tyro.cli(Options)))
