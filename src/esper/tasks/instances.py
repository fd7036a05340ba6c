"""Tasks whose hosts differ: the data and the learning rate that each host is given in an episode.

An instance distribution draws them for each host and episode. Their properties are recorded, and the policy does not
see them: it observes only how a host learns.

Shape legend: N = hosts, n = most examples of a host, C = classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, final

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.random import Stream, to_uniform, word_rows, words
from esper.leyline.settings import AtLeast1, AtLeast2, Decay, check_fields
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import PADDING

_TRAIN_ORDER, _NOISE = 1, 2
"""Slots of the stream INSTANCE: which examples a host is given, and which of their labels are wrong."""


@final
@dataclass(frozen=True, eq=False)
class HostExamples:
    """The examples of one split that each host is given: row numbers of the split, their targets, and how many.

    Rows beyond `count` have the number -1 and the target `PADDING`.
    """

    index: Int[Tensor, "N n"]
    target: Int[Tensor, "N n"]
    count: Int[Tensor, " N"]

    def part(self, share: float) -> "HostExamples":
        """A share of each host's examples, rounded up, evenly spaced among them."""
        count_N = (self.count.double() * share).ceil().long()
        rank_n = torch.arange(int(count_N.max()), device=count_N.device)
        there_Nn = rank_n < count_N[:, None]
        place_Nn = (rank_n * self.count[:, None] // count_N[:, None].clamp(min=1)).masked_fill(~there_Nn, 0)
        index_Nn, target_Nn = self.index.gather(1, place_Nn), self.target.gather(1, place_Nn)
        return HostExamples(index_Nn.where(there_Nn, -1), target_Nn.where(there_Nn, PADDING), count_N)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Instances:
    """What N hosts are given in one episode; `lr_factor` multiplies the learning rates of a host and its seeds."""

    train: HostExamples
    val: HostExamples
    test: HostExamples
    lr_factor: Float[Tensor, " N"]


@final
@dataclass(frozen=True, kw_only=True)
class MixedImages:
    """Classification tasks of different difficulty from one data set.

    Every property is drawn uniformly from its choices, independently of the others. A host gets the same instance
    whatever the other hosts are.

    Attributes:
        num_classes: C of the data set.
        classes: how many classes a host must tell apart. Which ones is drawn too; labels keep their numbers.
        fractions: share of its training examples that a host is given.
        noises: share of the training labels that are replaced by another class of the host.
        lr_factors: factors of the learning rate.
        views: how many variants of each image the data set holds, one after another (`datasets.images.with_views`); a
            host sees one of them.
        run_seed: of the draws; None for that of the hosts. With another one a host is trained again on its own data,
            with other weights and another order of its examples.
    """

    num_classes: int
    classes: Annotated[tuple[AtLeast2, ...], Field(min_length=1)]
    fractions: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = (1.0,)
    noises: Annotated[tuple[Decay, ...], Field(min_length=1)] = (0.0,)
    lr_factors: Annotated[tuple[Annotated[float, Field(gt=0, le=1e6)], ...], Field(min_length=1)] = (1.0,)
    views: AtLeast1 = 1
    run_seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "instances")
        if max(self.classes) > self.num_classes:
            raise ConfigError(
                f"instances.classes is {self.classes}; each must be at most {self.num_classes}, the number of classes."
            )

    def properties(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int) -> dict[str, Tensor]:
        """`classes`, `fraction`, `noise`, `lr_factor` and `view` (from 0 on) of each host (global numbers)."""
        run_seed = run_seed if self.run_seed is None else self.run_seed
        choices = {
            "classes": torch.tensor(self.classes),
            "fraction": torch.tensor(self.fractions, dtype=torch.float64),
            "noise": torch.tensor(self.noises, dtype=torch.float64),
            "lr_factor": torch.tensor(self.lr_factors, dtype=torch.float64),
            "view": torch.arange(self.views),
        }
        u_NK = to_uniform(word_rows(run_seed, Stream.INSTANCE, hosts, len(choices), episode=episode))
        return {
            name: values.to(hosts.device)[(u_NK[:, i] * len(values)).long()]
            for i, (name, values) in enumerate(choices.items())
        }

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, dataset: Dataset) -> Instances:
        """The instances, on the device of the data set.

        Raises:
            ConfigError: a host would be left without examples in a split.
        """
        run_seed = run_seed if self.run_seed is None else self.run_seed
        drawn = self.properties(run_seed, hosts, episode)
        key = words(
            run_seed, Stream.INSTANCE, hosts[:, None], episode=episode, slot=_NOISE + 1,
            block=torch.arange(self.num_classes, device=hosts.device),
        )[..., 0]  # fmt: skip
        rank_NC = key.argsort(dim=1, stable=True).argsort(dim=1)  # the classes of a host have the lowest ranks
        own_NC = rank_NC < drawn["classes"][:, None]
        view_N = drawn["view"]
        train = self._training(run_seed, hosts, episode, dataset.train, rank_NC, drawn)
        return Instances(
            train=train,
            val=self._of_classes(dataset.val, own_NC, view_N),
            test=self._of_classes(dataset.test, own_NC, view_N),
            lr_factor=drawn["lr_factor"].float(),
        )

    def _training(
        self,
        run_seed: int,
        hosts: Int[Tensor, " N"],
        episode: int,
        split: Split,
        rank_NC: Int[Tensor, "N C"],
        drawn: Mapping[str, Tensor],
    ) -> HostExamples:
        """A random share of the examples of each host's classes, some with another of these classes as label."""
        size, classes_N1 = len(split) // self.views, drawn["classes"][:, None]
        label_n = split.y[:size].long()
        own_Nn = (rank_NC < classes_N1)[:, label_n]
        count_N = (own_Nn.sum(dim=1) * drawn["fraction"]).ceil().long()
        key = word_rows(run_seed, Stream.INSTANCE, hosts, size, episode=episode, slot=_TRAIN_ORDER)
        order_Nn = key.masked_fill(~own_Nn, 2**32).argsort(dim=1, stable=True)
        index = order_Nn[:, : _largest(count_N, "train")]
        target = label_n[index]
        u_NnK = word_rows(run_seed, Stream.INSTANCE, hosts, 2 * index.shape[1], episode=episode, slot=_NOISE)
        wrong, other = (to_uniform(of) for of in u_NnK.view(*index.shape, 2).unbind(dim=-1))
        shift = 1 + (other * (classes_N1 - 1)).long()
        replaced = rank_NC.argsort(dim=1).gather(1, (rank_NC.gather(1, target) + shift) % classes_N1)
        target = torch.where(wrong < drawn["noise"][:, None], replaced, target)
        return _padded(index + drawn["view"][:, None] * size, target, count_N)

    def _of_classes(self, split: Split, own_NC: Bool[Tensor, "N C"], view_N: Int[Tensor, " N"]) -> HostExamples:
        """All examples of each host's classes, in their order."""
        size = len(split) // self.views
        label_n = split.y[:size].long()
        own_Nn = own_NC[:, label_n]
        count_N = own_Nn.sum(dim=1)
        index = (~own_Nn).to(torch.int8).argsort(dim=1, stable=True)[:, : _largest(count_N, "validation or test")]
        return _padded(index + view_N[:, None] * size, label_n[index], count_N)


InstanceDistribution = MixedImages
"""What makes hosts differ, of which there is one kind."""


def _largest(count_N: Int[Tensor, " N"], split: str) -> int:
    """The most examples of a host; read once per episode. Raises ConfigError where a host has none."""
    least, most = (int(x) for x in count_N.aminmax())
    if least < 1:
        raise ConfigError(
            f"a host has no example of its classes in the {split} split; use more examples or more classes per host."
        )
    return most


def _padded(index: Int[Tensor, "N n"], target: Int[Tensor, "N n"], count_N: Int[Tensor, " N"]) -> HostExamples:
    there = torch.arange(index.shape[1], device=index.device) < count_N[:, None]
    return HostExamples(index.where(there, -1), target.where(there, PADDING), count_N)
