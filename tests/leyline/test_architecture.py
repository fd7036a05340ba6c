"""Structures without weights: what they say, and that changed ones are refused."""

import numpy as np
import pytest

from esper.leyline.architecture import Architecture, PlacedSeed, architecture_arrays, architectures_of
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from esper.leyline.messages import EngineSpec

SPEC = EngineSpec(
    run_seed=0,
    num_envs=2,
    slot_ids=("r0c0", "r0c1"),
    episode_length=8,
    family=HostFamily.CNN,
    selectable=(1, 2),
    blueprint_names=("noop", "conv_light", "attention"),
)
GROWN = Architecture((PlacedSeed("r0c1", "attention", "GATE"),))


def test_permanent_seeds_alone_are_listed_and_planted_where_they_were() -> None:
    stage = np.array([[SeedStage.HOLDING, SeedStage.FOSSILIZED], [SeedStage.DORMANT, SeedStage.BLENDING]])
    found = architectures_of(
        stage, np.array([[1, 2], [-1, 1]]), np.array([[Algorithm.ADD, Algorithm.GATE], [0, 1]]), SPEC
    )
    assert found == (GROWN, Architecture())
    blueprint, algorithm = architecture_arrays(found, SPEC)
    assert blueprint.tolist() == [[-1, 2], [-1, -1]]
    assert algorithm.tolist() == [[0, int(Algorithm.GATE)], [0, 0]]


def test_a_structure_survives_being_written_and_has_the_digest_of_its_list() -> None:
    # printf '[{"algorithm":"GATE","blueprint":"attention","slot":"r0c1"}]' | sha256sum
    assert GROWN.sha256 == "35fd2fbc618e9795508a89a2f235cd5b2010b9e1d5b957b77839ec9522cfc75b"
    assert Architecture.of(GROWN.tree()) == GROWN


def test_a_structure_that_was_changed_is_refused() -> None:
    tree = GROWN.tree()
    tree["slots"][0]["blueprint"] = "conv_light"
    with pytest.raises(ConfigError, match="it was changed after it was written"):
        Architecture.of(tree)


@pytest.mark.parametrize("tree", [{}, {"slots": []}, {"slots": [{"slot": "r0c0"}], "sha256": ""}, {"slots": 3}])
def test_something_else_is_refused(tree: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not the architecture of a host"):
        Architecture.of(tree)


@pytest.mark.parametrize(
    ("seed", "complaint"),
    [
        (PlacedSeed("r9c9", "attention", "ADD"), "the slot 'r9c9', which this run does not have; .* names: r0c0, r0c1"),
        (PlacedSeed("r0c0", "noop", "ADD"), "the blueprint 'noop'"),
        (PlacedSeed("r0c0", "atention", "ADD"), "did you mean 'attention'"),
        (PlacedSeed("r0c0", "attention", "SUM"), "the algorithm 'SUM'"),
    ],
)
def test_what_a_run_does_not_know_is_refused_by_name(seed: PlacedSeed, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        architecture_arrays((Architecture((seed,)), Architecture()), SPEC)


def test_two_seeds_in_a_slot_and_too_few_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="names slot 'r0c1' twice"):
        architecture_arrays((Architecture(GROWN.slots * 2), Architecture()), SPEC)
    with pytest.raises(ConfigError, match="architectures of 1 hosts for 2"):
        architecture_arrays((GROWN,), SPEC)
