"""Predicted memory: close to what a process takes, and too many hosts are refused; freed memory is kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from esper.leyline.errors import ConfigError
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.memory import MemoryPrediction, available_bytes, predict, resident_bytes

MIB = 2**20
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import json, sys, torch
from grown_hosts import CPU, IMAGES, TEXT, SharedHosts, shortened, task_of
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.memory import predict

kind, hosts = sys.argv[1], int(sys.argv[2])
shape = {"images": IMAGES, "text": TEXT}[kind]
executor = {"images": "native", "text": "streamed"}[kind]
torch.set_num_threads(1)
task = task_of(shape)
train = shape.batch
data = shortened(task.load(None, 0), train, 64)
config = EngineConfig(num_envs=hosts, slots=task.enabled, episode_length=8, executor=executor)
predicted = predict(config, task, data, CPU)
grown = SharedHosts.build(shape, hosts, train, 64, executor=executor)
grown.step()
# not ru_maxrss, which starts at the peak of the process that started this one
peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"predicted": predicted.total(hosts), "peak": peak, "process": predicted.process}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("kind", "hosts"), [("images", 24), ("text", 4)])
def test_the_prediction_is_within_a_fifth_of_the_peak(kind, hosts):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(hosts)], capture_output=True, text=True, check=True, cwd=BENCHMARKS
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["predicted"] / found["peak"] - 1.0) < 0.2, found
    assert found["predicted"] > 1.1 * found["process"], "the hosts must weigh something here"


OF_POLICY = """
import json, sys
from esper.cli import main
from esper.tolaria.memory import MemoryPrediction

predicted = []
MemoryPrediction.require = lambda self, hosts, *_: predicted.append(self.total(hosts))
assert main(["train", *sys.argv[1:]]) == 0
peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"predicted": predicted[0], "peak": peak}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_predicted_memory_of_a_wide_policy_is_within_a_fifth_of_its_peak(tmp_path):
    sizes = "--task null --num-envs 4 --episode-length 8 --rounds 1 --set ppo.feature_width=1024 ppo.hidden_width=1024"
    command = [sys.executable, "-c", OF_POLICY, *sizes.split(), "--out", str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["predicted"] / found["peak"] - 1.0) < 0.2, found


TOY = MemoryPrediction(process=100 * MIB, host=10 * MIB, at_once=30 * MIB, together=False, threads=2)


def test_the_parts_grow_with_hosts_and_hosts_at_once():
    assert TOY.total(8) == (100 + 8 * 10 + 2 * 30) * MIB
    assert TOY.total(1) == (100 + 10 + 30) * MIB  # one at once
    fused = MemoryPrediction(process=100 * MIB, host=10 * MIB, at_once=30 * MIB, together=True, threads=1)
    assert fused.total(8) == (100 + 8 * 40) * MIB


def test_too_many_hosts_are_refused_with_the_most_that_fit():
    # 8 hosts take 140 MiB besides this process, 9 take 150
    assert TOY.most_hosts(149 * MIB) == 8
    TOY.require(8, 149 * MIB)
    with pytest.raises(
        ConfigError, match=r"num_envs is 9, which needs about 0\.24 GiB.*at most 8 fit: set num_envs to 8"
    ):
        TOY.require(9, 149 * MIB)
    with pytest.raises(ConfigError, match="not even one fits: use a smaller batch"):
        TOY.require(1, 20 * MIB)


def test_more_hosts_and_a_rollout_need_more():
    def predicted(others: int = 0) -> MemoryPrediction:
        config = EngineConfig(num_envs=2, slots=tiny.SLOTS, episode_length=8)
        return predict(config, tiny.task(), tiny.dataset(), tiny.CPU, others=others)

    assert predicted(MIB).host - predicted().host == MIB
    population = tiny.population(1)
    state = sum(x.nbytes for x in population.state_dict().values())
    assert state < predicted().host < 20 * state


def test_this_machine_has_memory():
    assert 2**20 < resident_bytes() < available_bytes(torch.device("cpu")) * 100


OF_FAULTS = """
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


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
def test_large_blocks_are_used_again():
    done = subprocess.run([sys.executable, "-c", OF_FAULTS], capture_output=True, text=True, check=True)
    plain, kept = (int(number) for number in done.stdout.split())
    assert kept < 200 < plain
