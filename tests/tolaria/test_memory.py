"""Memory that is kept: repeated large allocations do not fault pages anew."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from esper.tolaria.runtime import keep_freed_memory

def faults():
    for _ in range(3):
        torch.ones(2**23)  # 32 MiB, which glibc would map anew each time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
plain = faults()
assert keep_freed_memory()
faults()  # the heap grows to its size first
print(plain, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
def test_large_blocks_are_used_again():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    plain, kept = (int(number) for number in done.stdout.split())
    assert kept < 200 < plain
