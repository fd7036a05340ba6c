"""Counter-based random numbers: every draw is a pure function of its key and counter.

There is no generator and no global state. A draw is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC'11) with

    key      (low 32 bits, high 32 bits) of the run seed
    counter  (block, stream * 256 + slot, episode * 2**12 + t, host_id)

so the numbers of a host depend neither on the number of hosts nor on the process that runs it.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

MAX_EPISODE_LENGTH = 4095
MAX_SLOTS = 256
MAX_EPISODES = 2**20


class Stream(IntEnum):
    """Purpose of a draw; purposes never share numbers."""

    HOST_INIT = 0
    SEED_INIT = 1
    TRAIN_ORDER = 2
    AUGMENTATION = 3
    DROPOUT = 4
    POLICY_SAMPLING = 5
    RANDOM_BASELINE = 6
    SPLIT = 7
    SCRIPTED_NOISE = 8
    POLICY_INIT = 9
    MINIBATCH_ORDER = 10
    INSTANCE = 12
    SCHEDULE_SEARCH = 13
    HEURISTIC_SEARCH = 14
    FORWARD_PASS = 15
    RANDOM_STRUCTURES = 16


def philox(counter: Tensor, key: tuple[int | Tensor, int | Tensor]) -> Tensor:
    """Philox4x32-10. `counter` is int64 `[..., 4]` of 32-bit words; so is the result. Keys broadcast against it.

    Products of two 32-bit words overflow int64 on purpose: two's complement keeps both halves intact.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def words(
    run_seed: int,
    stream: int,
    host: Tensor,
    *,
    episode: int | Tensor = 0,
    t: int | Tensor = 0,
    slot: int | Tensor = 0,
    block: int | Tensor = 0,
) -> Tensor:
    """Four 32-bit words per draw, int64 `[..., 4]`; all arguments broadcast against `host` (int64)."""
    zero = torch.zeros_like(host)  # adding to a tensor avoids copies of plain numbers to the device
    parts = (zero + block, zero + (stream * 256 + slot), zero + (episode * 4096 + t), host)
    counter = torch.stack(torch.broadcast_tensors(*parts), dim=-1)  # `broadcast_shapes` would import sympy
    return philox(counter, (run_seed & _MASK, (run_seed >> 32) & _MASK))


def to_uniform(word: Tensor) -> Tensor:
    """A 32-bit word as a float32 in [0, 1) with 24 random bits."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def uniform(run_seed: int, stream: int, host: Tensor, **counter: int | Tensor) -> Tensor:
    """One uniform in [0, 1) per draw (word 0 of `words`), in the shape of the broadcast arguments."""
    return to_uniform(words(run_seed, stream, host, **counter)[..., 0])


def word_rows(
    run_seed: int,
    stream: int,
    host: Tensor,
    length: int,
    *,
    episode: int | Tensor = 0,
    t: int | Tensor = 0,
    slot: int | Tensor = 0,
    first_block: int = 0,
) -> Tensor:
    """`length` words per host, int64 `[N, length]`: word i is word i % 4 of block `first_block` + i // 4."""
    blocks = torch.arange(first_block, first_block + (length + 3) // 4, device=host.device)
    lifted = [x[:, None] if isinstance(x, Tensor) and x.dim() == 1 else x for x in (episode, t, slot)]
    drawn = words(
        run_seed, stream, host[:, None], episode=lifted[0], t=lifted[1], slot=lifted[2], block=blocks[None, :]
    )
    return drawn.reshape(host.shape[0], -1)[:, :length]


_GOLDEN, _MIX_1, _MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def short_rows(key: Tensor, length: int) -> Tensor:
    """`length` uniform 16-bit numbers per key (int64 `[N]`), int16 `[N, length]` in [-2**15, 2**15).

    SplitMix64 (Steele, Lea and Flood, OOPSLA'14) from each key on: for many numbers, at a tenth of the cost of Philox.
    Products overflow on purpose, and a mask makes a shift logical.
    """
    z = key[:, None] + torch.arange(1, (length + 3) // 4 + 1, device=key.device) * _GOLDEN
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            z *= factor
    return z.view(torch.int16)[:, :length]


def to_normal(word_a: Tensor, word_b: Tensor) -> Tensor:
    """Standard normal numbers from two words each, by Box-Muller in float64; float32."""
    radius = torch.sqrt(-2.0 * torch.log((word_a.to(torch.float64) + 1.0) * 2.0**-32))
    return (radius * torch.cos(2.0 * math.pi * word_b.to(torch.float64) * 2.0**-32)).to(torch.float32)


def permutation(
    run_seed: int, stream: int, host: Tensor, length: int, *, episode: int | Tensor = 0, t: int | Tensor = 0
) -> Tensor:
    """A permutation of 0..length-1 per host, int64 `[N, length]`: the stable argsort of `length` random words."""
    return word_rows(run_seed, stream, host, length, episode=episode, t=t).argsort(dim=-1, stable=True)


def generator_seeds(run_seed: int, stream: int, host: Tensor, **counter: int | Tensor) -> list[int]:
    """Seeds of 64 bits for PyTorch generators: words 0 and 1 of `words`. `host` [N] is on the CPU."""
    drawn = words(run_seed, stream, host, **counter)
    return [low | high << 32 for low, high in drawn[:, :2].tolist()]


def local_generator(run_seed: int, stream: int, host: int = 0, **counter: int | Tensor) -> torch.Generator:
    """A CPU generator, seeded with `generator_seeds`."""
    (seed,) = generator_seeds(run_seed, stream, torch.tensor([host]), **counter)
    return torch.Generator().manual_seed(seed)


_one_thread = threading.RLock()


@contextmanager
def seeded_generators(seed: int, device: torch.device | None = None) -> Iterator[Callable[[], bool]]:
    """Within the context the global generators start from a seed of 64 bits; afterwards they are as before.

    Those of PyTorch on the CPU (and on `device`, if it is a GPU), of Python and of numpy. Threads that come here wait
    for each other. Yields a function that says whether one of them has been used; it looks at the CPU alone.
    """
    gpus = [device] if device is not None and device.type == "cuda" else []
    with _one_thread, torch.random.fork_rng(devices=gpus):
        of_python, of_numpy = random.getstate(), np.random.get_state()
        try:
            # Not torch.manual_seed: that would also seed the generators of devices that are not forked here.
            torch.default_generator.manual_seed(seed)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & _MASK)
            start = generator_states()
            yield lambda: generator_states() != start
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def generator_states() -> tuple[object, ...]:
    """Where the global generators of PyTorch (on the CPU), Python and numpy stand; to be compared."""
    of_numpy = np.random.get_state(legacy=False)
    numbers = (of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"], of_numpy["has_gauss"])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers
