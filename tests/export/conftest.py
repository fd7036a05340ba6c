"""Hosts that every test of this folder may read."""

from collections.abc import Callable
from dataclasses import replace

import pytest

import tiny
from esper.export import checking, network
from esper.export.network import GrownNetwork
from hosts_to_export import ARCHITECTURES, GrownHosts, grown


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are tried in a process of their own by slow tests and by `saved_once`; that of others saves its start."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(network, "_without_esper", lambda file, job: (None, checking.run(**job)))


@pytest.fixture(scope="session")
def trained() -> GrownHosts:
    """Three hosts with every blueprint, and every algorithm in every slot."""
    return grown(*ARCHITECTURES)


@pytest.fixture(scope="session")
def unshuffled() -> GrownNetwork:
    """A grown host that unshuffles its images."""
    task = tiny.task(host=replace(tiny.HOST, unshuffle=2))
    hosts = grown(ARCHITECTURES[0], of=task)
    return GrownNetwork.of(hosts.engine, task, tiny.dataset(), hosts.stats, host=0)


@pytest.fixture
def network_of(trained: GrownHosts) -> Callable[..., GrownNetwork]:
    """`GrownNetwork.of` for a host of `trained`."""

    def of(host: int, **more: object) -> GrownNetwork:
        given = {"stats": trained.stats} | more
        stats = given.pop("stats")
        return GrownNetwork.of(trained.engine, tiny.task(), tiny.dataset(), stats, host=host, **given)

    return of
