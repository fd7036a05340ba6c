"""The machine and versions of a measurement, and memory in use."""

import platform
import re
import resource
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import torch


def environment(device: torch.device) -> dict[str, str | int]:
    """Device, processor, versions (that of the driver of a GPU too), threads, date and commit, by name."""
    on_gpu = device.type == "cuda"
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cuda": str(torch.version.cuda) if on_gpu else "none",
        "driver": driver_version() if on_gpu else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """Name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def version() -> str:
    """The version of esper."""
    found: str = import_module("esper").__version__  # the root package names all others, so it is not imported above
    return found


def cpu_name() -> str:
    """Model and number of processors, e.g. "Intel(R) Xeon(R) Processor, 2 cores"."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(names) or '?'} cores"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of NVIDIA's kernel module, e.g. "550.54.14"; "unknown" where the file is missing or names none."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else "unknown"


def commit() -> str:
    """Short hash of the checked-out commit, with `+` after local changes; "unknown" outside a git checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def memory_bytes(device: torch.device) -> dict[str, int | None]:
    """Allocated, reserved and peak memory of the device in bytes; on a CPU only the peak of the process."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    unit = 1 if sys.platform == "darwin" else 1024  # KiB on Linux, bytes on macOS
    return {"allocated": None, "reserved": None, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
