"""`esper train --profile`: a trace of some control steps by torch.profiler, and a table of where their time went.

    step      1      2      3      4      5      6
    profiler  -      warm   [ step 3 | step 4 | step 5 ]  -    one file for Perfetto, with the phases as ranges

It is a listener, which a run calls at the end of each step, and reads no tensor: the run has the same results.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from esper.leyline.errors import ConfigError, option, refusing
from esper.runs.evaluation.tables import plain_table
from esper.telemetry.progress import RunConsole
from esper.telemetry.sinks import listening

TRACE = "trace.json.gz"
FIRST = 3
"""The first step that can be profiled: step 1 warms up the run, step 2 the profiler."""
PHASES = ("train", "measure", "observe", "decide", "execute", "reward", "end_step", "apply_structure")
"""Names of the engine's spans, in the order of a step."""
OPERATIONS = 5
"""Operations of PyTorch in the table."""


def steps_of(text: str, episode_length: int) -> tuple[int, int]:
    """First and last step of "3-5" or "4"; raises ConfigError unless a round has them."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    name = option("profile_steps")
    if found is None:
        raise ConfigError(f"{name} is {text!r}; give the first and the last step, e.g. 3-5.")
    first, last = int(found[1]), int(found[2] or found[1])
    if not FIRST <= first <= last <= episode_length:
        raise ConfigError(
            f"{name} is {text}, expected steps from {FIRST} to {episode_length}, the last one of a round; before step "
            f"{FIRST} the run and the profiler warm up."
        )
    return first, last


@contextmanager
def profiled(folder: Path, first: int, last: int, device: torch.device, console: RunConsole) -> Iterator[None]:
    """Steps `first` to `last` of the first round that is trained inside are traced into `folder`.

    Raises:
        ConfigError: `folder` has a trace already, or cannot be written.
    """
    file = folder / TRACE
    if file.exists():
        raise ConfigError(f"{file} exists already; name another folder with {option('profile')}.")
    with refusing(ConfigError, f"the folder {folder} cannot be written", f"name another with {option('profile')}"):
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
        file.unlink()
    profiler = Profiler(file, first, last, device, console)
    try:
        with listening("--profile", profiler):
            yield
        if not file.exists():
            console.say(f"no trace was written: the run ended before step {last} of a round that it began")
    finally:
        profiler.end()
        if not any(folder.iterdir()):
            folder.rmdir()


@final
class Profiler:
    """A listener that traces steps `first` to `last` of the first round of which it sees the steps before them."""

    def __init__(self, file: Path, first: int, last: int, device: torch.device, console: RunConsole) -> None:
        self._file, self._first, self._last, self._console = file, first, last, console
        self._is_cuda = device.type == "cuda"
        self._profile: Any = None
        self._range = ExitStack()  # of the present step
        self._done = False

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take a record; those of kind "step" arrive when the step is over."""
        if kind != "step" or self._done:
            return
        if (t := fields["t"]) == self._first - 2:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its library prints lines of its own
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._is_cuda]
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.prepare_trace()
        if self._profile is None:
            return
        if t == self._first - 1:
            self._profile.start_trace()
        self._range.close()
        if self._first - 1 <= t < self._last:
            self._range.enter_context(record_function(f"step {t + 1}"))
        if t == self._last:
            self._finish()

    def _finish(self) -> None:
        self._done, found = True, self._profile
        self.end()
        draft = self._file.with_name(f".{self._file.name}")  # the suffix decides the format
        found.export_chrome_trace(str(draft))
        draft.replace(self._file)
        size = self._file.stat().st_size / 1e6
        self._console.say(
            f"profile: steps {self._first} to {self._last} are in {self._file} ({size:.1f} MB); open it in "
            "https://ui.perfetto.dev (the file stays on this machine) or in chrome://tracing"
        )
        self._show({event.key: event for event in found.key_averages()})

    def _show(self, events: Mapping[str, FunctionEventAvg]) -> None:
        """The table: wall time of each phase, what is left, and the operations that took most."""
        number = self._last - self._first + 1
        steps = [f"step {t}" for t in range(self._first, self._last + 1)]
        total = sum(events[name].cpu_time_total for name in steps)
        phases = [name for name in PHASES if name in events]
        page = plain_table("phase", "ms per step", "share", *["ms on GPU"] * self._is_cuda)

        def add(name: str, cpu: float, gpu: float) -> None:
            on_gpu = [f"{gpu / number / 1e3:.2f}"] * self._is_cuda
            page.add_row(name, f"{cpu / number / 1e3:.2f}", f"{100.0 * cpu / total:.1f} %", *on_gpu)

        for name in phases:
            add(name, events[name].cpu_time_total, events[name].device_time_total)
        rest = total - sum(events[name].cpu_time_total for name in phases)
        add("rest: records, waiting for the device", rest, 0.0)
        add("step", total, sum(events[name].device_time_total for name in steps))
        self._console.print(page)
        key = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        operations = [event for name, event in events.items() if name not in (*phases, *steps)]
        operations.sort(key=lambda event: -getattr(event, key))
        most = ", ".join(
            f"{event.key} {getattr(event, key) / number / 1e3:.2f} ms ({event.count / number:.0f} calls)"
            for event in operations[:OPERATIONS]
        )
        self._console.say(f"operations that took most of a step, without those inside them: {most or 'none'}")

    def end(self) -> None:
        """Stop what still runs."""
        self._range.close()
        if self._profile is not None:
            self._profile.stop_trace()
            self._profile = None
