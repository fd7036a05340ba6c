"""A slab: parameters, buffers and optimizer state of many modules of one kind, one row each, allocated once.

    rows      host 0 | weights ............ |        a row is cleared, drawn anew, kept or restored by its index;
              host 1 | weights ............ |        the shapes never change during a run

`Working` is a compact copy of the rows that a train pass updates: an optimizer step then costs what is trained, not
what could be. It is taken before the pass and written back after it.

Where the host does not know which rows are meant, the same things are done under a mask of rows (`..._where`): the cost
is that of all rows, and nothing is asked of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.parameters.optimizers import OptimizerSpec, OptimizerState, init_state
from esper.leyline.tensor_dataclass import lift, named_tensors, tree_map


def _take(state: OptimizerState, rows: Tensor, width: int) -> OptimizerState:
    return tree_map(lambda x: x[rows, :width] if x.dim() > 1 else x[rows], state)


def put_where(marked: Bool[Tensor, " R"], new: Float[Tensor, "R W"], into: Float[Tensor, "R W"]) -> None:
    """Write the marked rows of `new` over those of `into`; what lies in the others, NaN or not, does not matter."""
    torch.where(marked[:, None], new, into, out=into)


@final
@dataclass(frozen=True)
class Working:
    """Rows of a slab that are being trained; `leaves[i]` is what row i uses, as a leaf with its gradient in `grad`."""

    rows: Int[Tensor, " R"]
    params: Float[Tensor, "R W"]
    grad: Float[Tensor, "R W"]
    optimizer: OptimizerState
    leaves: tuple[Tensor, ...]


@final
class Slab:
    """R rows of P parameters and Q buffer values, with their optimizer state."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        spec: OptimizerSpec,
        device: torch.device,
        *,
        trained: bool = True,
    ) -> None:
        """All zero. `shape` is (R, P, Q); rows that are only kept, not `trained`, have no optimizer state."""
        num_rows, num_params, num_buffers = shape
        self.params = torch.zeros(num_rows, num_params, device=device)
        self.buffers = torch.zeros(num_rows, num_buffers, device=device)
        self.optimizer = init_state(spec, self.params if trained else self.params[:, :0])

    def write(self, rows: Int[Tensor, " R"], params: Float[Tensor, "R W"], buffers: Float[Tensor, "R V"]) -> None:
        """New modules in these rows: fresh optimizer state; what the module does not use is zero."""
        self.clear(rows)
        self.params[rows, : params.shape[1]] = params
        self.buffers[rows, : buffers.shape[1]] = buffers

    def clear(self, rows: Int[Tensor, " R"]) -> None:
        """Nothing remains of the modules in these rows."""
        self.params[rows] = 0.0
        self.buffers[rows] = 0.0
        self.forget_optimizer(rows)

    def forget_optimizer(self, rows: Int[Tensor, " R"]) -> None:
        """Optimizer state as before the first step."""
        for _, tensor in named_tensors(self.optimizer):
            tensor[rows] = 0

    def copy_rows(self, source: "Slab", rows: Int[Tensor, " R"]) -> None:
        """Take parameters and buffers of these rows from a slab of the same shape."""
        self.params[rows] = source.params[rows]
        self.buffers[rows] = source.buffers[rows]

    # -- under a mask of rows -----------------------------------------------------------------------------------------

    def clear_where(self, marked: Bool[Tensor, " R"]) -> None:
        """`clear` of the marked rows."""
        self.params.masked_fill_(marked[:, None], 0.0)
        self.buffers.masked_fill_(marked[:, None], 0.0)
        self.forget_optimizer_where(marked)

    def forget_optimizer_where(self, marked: Bool[Tensor, " R"]) -> None:
        """`forget_optimizer` of the marked rows."""
        for _, tensor in named_tensors(self.optimizer):
            tensor.masked_fill_(lift(marked, tensor), 0)

    def copy_where(self, source: "Slab", marked: Bool[Tensor, " R"]) -> None:
        """`copy_rows` of the marked rows."""
        put_where(marked, source.params, self.params)
        put_where(marked, source.buffers, self.buffers)

    def whole(self) -> Working:
        """All rows to be trained where they lie: nothing is copied, and `finish` has nothing to do."""
        rows = torch.arange(self.params.shape[0], device=self.params.device)
        return Working(
            rows=rows, params=self.params, grad=torch.zeros_like(self.params), optimizer=self.optimizer, leaves=()
        )

    # -- compact copies -----------------------------------------------------------------------------------------------

    def begin(self, rows: Int[Tensor, " R"], widths: Sequence[int]) -> Working:
        """Compact copy of these rows, ready for autograd; `widths` [R] is how many parameters each of them uses."""
        params = self.params[rows, : max(widths, default=0)].contiguous()
        grad = torch.zeros_like(params)
        leaves = []
        for row, slope, width in zip(params.unbind(0), grad.unbind(0), widths, strict=True):
            leaf = row[:width].detach().requires_grad_()
            leaf.grad = slope[:width]
            leaves.append(leaf)
        return Working(
            rows=rows,
            params=params,
            grad=grad,
            optimizer=_take(self.optimizer, rows, params.shape[1]),
            leaves=tuple(leaves),
        )

    def finish(self, working: Working) -> None:
        """Write what was trained back into the slab."""
        rows, width = working.rows, working.params.shape[1]
        self.params[rows, :width] = working.params
        ours, theirs = named_tensors(self.optimizer), named_tensors(working.optimizer)
        for (_, mine), (_, new) in zip(ours, theirs, strict=True):
            if mine.dim() > 1:
                mine[rows, :width] = new
            else:
                mine[rows] = new

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name."""
        return {"params": self.params, "buffers": self.buffers, **dict(named_tensors(self.optimizer))}
