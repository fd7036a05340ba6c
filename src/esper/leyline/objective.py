"""What a host is trained for and judged by.

    loss      what training lowers, in nats or squared units
    points    the figure of merit: accuracy in percent, or another number on that scale; contributions, gates, rewards
              and the governor use it

Both are sums over what counts (examples, or tokens that are not padding), divided by how many count. So they can be
added up over batches, and a padded token changes nothing.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor


class Scores(NamedTuple):
    """Of each row of a batch, float32: summed loss, summed score, and how many examples or tokens count."""

    loss: Float[Tensor, " R"]
    score: Float[Tensor, " R"]
    weight: Float[Tensor, " R"]


@runtime_checkable
class Objective(Protocol):
    """A loss and a figure of merit. Instances are plain data, equal if they compute the same."""

    @property
    def unit(self) -> str:
        """Name of the figure of merit, e.g. "accuracy"."""

    @property
    def blind_loss(self) -> float:
        """Mean loss of the best constant answer; a host that stays above it has learned nothing."""

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Scores of outputs [R, ...] for targets [R, ...], differentiable in `outputs`.

        A row never affects another, and the weight follows from the targets alone.
        """

    def score(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, " R"]:
        """The score of each row as in `scores`, without the loss: enough for most coalitions, and cheaper."""

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """The figure of merit of summed scores and weights, element by element."""
