"""Every sixth published network trains, agrees with plain PyTorch, is saved, and loads without esper.

`scripts/write_networks.py` checks all of them.
"""

import warnings

import pytest

import write_networks
from esper.leyline.errors import ConfigError
from published import every
from published.entry import Published

FAST = "no_grad"
"""Its checks take some seconds; those of the others are slow."""
NETWORKS = every()
TRIED = [of for i, of in enumerate(NETWORKS) if i % 6 == 0 or of.name in (FAST, "in-place behind slots")]


@pytest.mark.parametrize(
    "of", [pytest.param(of, id=of.name, marks=() if of.name == FAST else pytest.mark.slow) for of in TRIED]
)
def test_a_published_network_trains_agrees_saves_and_loads(of: Published):
    row: write_networks.Row = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_networks.check(of, row.update)
    assert not write_networks.failed(row), row
    assert (row["trains"] == "refused") == (of.refused is not None)


WITHOUT_PLACES = {"SimSiam", "SimSiam, one batch", "no_grad"}
"""Every place in them is refused, also where it is named."""


@pytest.mark.slow
@pytest.mark.parametrize("of", NETWORKS, ids=lambda of: of.name)
def test_slots_are_proposed_for_a_published_network(of: Published):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if of.name in WITHOUT_PLACES:
            with pytest.raises(ConfigError, match="no place where a seed may grow was found"):
                of.task(slots=None)
            return
        task = of.task(slots=None)
    assert task.spec.proposed
    assert 1 <= len(task.spec.enabled) <= 6


def test_names_of_published_networks_differ():
    names = [of.name for of in NETWORKS]
    assert len(names) == len(set(names))
    assert FAST in names


def test_a_network_that_crashes_is_a_row_and_not_the_end(monkeypatch):
    crash = "import os; os.kill(os.getpid(), 11)"
    monkeypatch.setattr(write_networks, "command_of", lambda number: [write_networks.sys.executable, "-c", crash])
    row = write_networks.checked(write_networks.Named(0, "a", "b", "c", None), limit=60)
    assert row["sentence"] == "trains: the process ended with -11"
    assert write_networks.failed(row)
