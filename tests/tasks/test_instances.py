"""Instances of MixedImages: which examples, labels and rates a host is given."""

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.tasks.datasets import Dataset, Split
from esper.tasks.instances import HostExamples, MixedImages
from esper.tasks.losses import PADDING

CLASSES, PER_CLASS = 5, 12
HOSTS = torch.arange(40)


def dataset(views: int = 1) -> Dataset:
    """Sixty examples per view, class by class; the picture of example i of view v is the number 60 v + i."""

    def split() -> Split:
        size = CLASSES * PER_CLASS * views
        return Split(torch.arange(float(size)), (torch.arange(size) // PER_CLASS) % CLASSES)

    return Dataset(identity={"name": "numbers"}, train=split(), val=split(), test=split(), num_classes=CLASSES)


def mixed(**changes) -> MixedImages:
    return MixedImages(**{"num_classes": CLASSES, "classes": (2, 5), **changes})


def of_host(examples, n):
    count = int(examples.count[n])
    return examples.index[n, :count], examples.target[n, :count]


def test_each_host_gets_the_examples_of_its_classes_with_their_labels():
    instances, data = mixed().draw(1, HOSTS, 0, dataset()), dataset()
    classes = mixed().properties(1, HOSTS, 0)["classes"].tolist()
    assert set(classes) == {2, 5}
    for n, number in enumerate(classes):
        own = set()
        for name in ("train", "val", "test"):
            index, target = of_host(getattr(instances, name), n)
            assert torch.equal(target, data.train.y[index])
            assert len(set(index.tolist())) == len(index) == number * PER_CLASS
            own.add(tuple(sorted(set(target.tolist()))))
        assert [len(found) for found in own] == [number]


def test_hosts_differ_in_which_classes_they_get():
    train = mixed(classes=(2,)).draw(1, HOSTS, 0, dataset()).train
    assert len({tuple(sorted(set(of_host(train, n)[1].tolist()))) for n in range(len(HOSTS))}) == 10  # 5 choose 2


def test_rows_beyond_the_examples_of_a_host_do_not_count():
    train = mixed().draw(1, HOSTS, 0, dataset()).train
    beyond = torch.arange(train.index.shape[1]) >= train.count[:, None]
    assert beyond.any()
    assert (train.index[beyond] == -1).all()
    assert (train.target[beyond] == PADDING).all()
    assert (train.index[~beyond] >= 0).all()


def test_a_fraction_keeps_that_share_of_the_training_examples_and_all_others():
    instances = mixed(classes=(5,), fractions=(0.26,)).draw(1, HOSTS, 0, dataset())
    assert set(instances.train.count.tolist()) == {16}  # ceil(0.26 * 60) = ceil(15.6)
    assert set(instances.val.count.tolist()) == {60}


def test_noise_replaces_that_share_of_the_training_labels_by_other_classes_of_the_host():
    instances = mixed(classes=(3,), noises=(0.4,)).draw(1, torch.arange(400), 0, dataset())
    data, wrong, total = dataset(), 0, 0
    for n in range(400):
        index, target = of_host(instances.train, n)
        true = data.train.y[index]
        assert set(target.tolist()) <= set(true.tolist())
        wrong, total = wrong + int((target != true).sum()), total + len(index)
    assert wrong / total == pytest.approx(0.4, abs=0.02)  # 14,400 labels: one standard deviation is 0.004
    assert all(torch.equal(of_host(instances.val, n)[1], data.val.y[of_host(instances.val, n)[0]]) for n in range(400))


def test_a_host_sees_one_view_in_all_its_splits():
    distribution = mixed(views=3)
    instances, view = distribution.draw(1, HOSTS, 0, dataset(3)), distribution.properties(1, HOSTS, 0)["view"]
    assert set(view.tolist()) == {0, 1, 2}
    for n in range(len(HOSTS)):
        for name in ("train", "val", "test"):
            index, _ = of_host(getattr(instances, name), n)
            assert set((index // 60).tolist()) == {int(view[n])}


def test_an_instance_depends_on_seed_host_and_episode_alone():
    distribution = mixed(fractions=(1.0, 0.5), noises=(0.0, 0.3), lr_factors=(1.0, 0.5))

    def drawn(hosts, *, seed=1, episode=0):
        found = distribution.draw(seed, torch.tensor(hosts), episode, dataset())
        return [tuple(map(tuple, (x.tolist() for x in of_host(found.train, n)))) for n in range(len(hosts))]

    several = drawn([4, 7, 9])
    assert drawn([7]) == several[1:2]
    assert drawn([9, 4]) == [several[2], several[0]]
    assert drawn([7], seed=2) != several[1:2]
    assert drawn([7], episode=1) != several[1:2]


def test_properties_name_what_was_drawn():
    distribution = mixed(fractions=(1.0, 0.5), noises=(0.0, 0.3), lr_factors=(1.0, 0.25), views=2)
    found = distribution.properties(1, torch.arange(200), 0)
    assert {name: sorted(set(values.tolist())) for name, values in found.items()} == {
        "classes": [2, 5], "fraction": [0.5, 1.0], "noise": [0.0, 0.3], "lr_factor": [0.25, 1.0], "view": [0, 1],
    }  # fmt: skip
    lr_factor = distribution.draw(1, torch.arange(200), 0, dataset(2)).lr_factor
    assert torch.equal(lr_factor.double(), found["lr_factor"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ()}, r"instances.classes is \[\]; it must be a list of at least 1 item"),
        ({"classes": (2, 6)}, "each must be at most 5"),
        ({"fractions": (0.0,)}, "instances.fractions"),
        ({"noises": (1.0,)}, "instances.noises"),
        ({"views": 0}, "instances.views is 0"),
    ],
)
def test_choices_out_of_range_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        mixed(**changes)


def test_a_host_without_examples_is_refused():
    empty = Split(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    data = Dataset(identity={"name": "one"}, train=empty, val=empty, test=empty, num_classes=CLASSES)
    with pytest.raises(ConfigError, match="no example of its classes in the train split"):
        mixed(classes=(2,)).draw(1, HOSTS, 0, data)


def test_a_part_of_the_examples_is_spread_over_those_of_each_host():
    # of 5 examples 3, at the places 0, 5/3 and 10/3; of 2 one
    index = torch.tensor([[10, 11, 12, 13, 14], [20, 21, -1, -1, -1]])
    part = HostExamples(index, index % 10, torch.tensor([5, 2])).part(0.5)
    assert part.index.tolist() == [[10, 11, 13], [20, -1, -1]]
    assert part.target.tolist() == [[0, 1, 3], [0, PADDING, PADDING]]
    assert part.count.tolist() == [3, 1]
    whole = dataset().val
    assert whole.part(0.05).x.tolist() == [0.0, 20.0, 40.0]
    assert whole.part(1.0).y.tolist() == whole.y.tolist()
