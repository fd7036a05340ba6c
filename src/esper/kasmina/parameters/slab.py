"""A slab: parameters, buffers and optimizer state of many modules, one row each, allocated once per run.

A train pass updates a compact copy of its rows (`Working`), so that an optimizer step costs no more than the trained
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from esper.kasmina.parameters.optimizers import OptimizerSpec, OptimizerState, init_state
from esper.leyline.tensor_dataclass import named_tensors, tree_map


def _take(state: OptimizerState, rows: Tensor, width: int) -> OptimizerState:
    return tree_map(lambda x: x[rows, :width] if x.dim() > 1 else x[rows], state)


@final
@dataclass(frozen=True)
class Working:
    """Rows of a slab in training; `leaves[i]` is the used part of row i as a leaf, whose gradient is in `grad`."""

    rows: Int[Tensor, " R"]
    params: Float[Tensor, "R W"]
    grad: Float[Tensor, "R W"]
    optimizer: OptimizerState
    leaves: tuple[Tensor, ...]


@final
class Slab:
    """R rows of P parameters and Q buffer values, with their optimizer state."""

    def __init__(
        self, shape: tuple[int, int, int], spec: OptimizerSpec, device: torch.device, *, trained: bool = True
    ) -> None:
        """All zero. `shape` is (R, P, Q); a slab of snapshots is not `trained` and has no optimizer state."""
        num_rows, num_params, num_buffers = shape
        self.params = torch.zeros(num_rows, num_params, device=device)
        self.buffers = torch.zeros(num_rows, num_buffers, device=device)
        self.optimizer = init_state(spec, self.params if trained else self.params[:, :0])

    def write(self, rows: Int[Tensor, " R"], params: Float[Tensor, "R W"], buffers: Float[Tensor, "R V"]) -> None:
        """New modules in these rows, with new optimizer state; unused elements are zero."""
        self.clear(rows)
        self.params[rows, : params.shape[1]] = params
        self.buffers[rows, : buffers.shape[1]] = buffers

    def clear(self, rows: Int[Tensor, " R"]) -> None:
        """Set everything in these rows to zero."""
        self.params[rows] = 0.0
        self.buffers[rows] = 0.0
        self.forget_optimizer(rows)

    def forget_optimizer(self, rows: Int[Tensor, " R"]) -> None:
        """Optimizer state as before the first step."""
        for _, tensor in named_tensors(self.optimizer):
            tensor[rows] = 0

    def copy_rows(self, source: "Slab", rows: Int[Tensor, " R"]) -> None:
        """Copy parameters and buffers of these rows from a slab of the same shape."""
        self.params[rows] = source.params[rows]
        self.buffers[rows] = source.buffers[rows]

    # -- compact copies -----------------------------------------------------------------------------------------------

    def begin(self, rows: Int[Tensor, " R"], widths: Sequence[int]) -> Working:
        """A compact copy of these rows for autograd; `widths` [R] is the number of used parameters of each."""
        params = self.params[rows, : max(widths, default=0)].contiguous()
        grad = torch.zeros_like(params)
        leaves = []
        for row, row_grad, width in zip(params.unbind(0), grad.unbind(0), widths, strict=True):
            leaf = row[:width].detach().requires_grad_()
            leaf.grad = row_grad[:width]
            leaves.append(leaf)
        optimizer = _take(self.optimizer, rows, params.shape[1])
        return Working(rows=rows, params=params, grad=grad, optimizer=optimizer, leaves=tuple(leaves))

    def finish(self, working: Working) -> None:
        """Write the trained rows back into the slab."""
        rows, width = working.rows, working.params.shape[1]
        self.params[rows, :width] = working.params
        for (_, old), (_, new) in zip(named_tensors(self.optimizer), named_tensors(working.optimizer), strict=True):
            if old.dim() > 1:
                old[rows, :width] = new
            else:
                old[rows] = new

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name."""
        return {"params": self.params, "buffers": self.buffers, **dict(named_tensors(self.optimizer))}
