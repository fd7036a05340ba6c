"""One optimizer step of all hosts, seeds and gates that a train pass trains."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.parameters.optimizers import OptimizerSpec, clip_factor, step_rows
from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.tolaria.amp import LossScaler
from esper.tolaria.executors.running_seeds import TrainedRows


class StackedOptimizer:
    """Unscales, clips and steps everything that a train pass trains; made once per pass.

    Each host is clipped by its own norm, each seed by its own norm including its gate.

    Args:
        population: whose rows are trained. hosts: all of its hosts. rows: seeds and gates.
        scaler: precision of training. decay_mask: elements of a host that are decayed.
        lr_factor: factors of the learning rates of each host and its seeds, None for 1.
        trainable: which seeds and which gates in `rows` are trained, None for all. The others must have gradient 0, and
            keep every bit.
    """

    def __init__(
        self,
        population: Population,
        hosts: TrainingCopy,
        rows: TrainedRows,
        scaler: LossScaler,
        decay_mask: Bool[Tensor, " P"],
        lr_factor: Float[Tensor, " N"] | None = None,
        trainable: tuple[Bool[Tensor, " R"], Bool[Tensor, " G"]] | None = None,
    ) -> None:
        self._spec: OptimizerSpec = population.optimizer_spec
        self._hosts, self._seeds, self._gates = hosts, rows.seeds, rows.gates
        self._scaler, self._decay_mask, self._lr_factor = scaler, decay_mask, lr_factor
        self._seed_host: Int[Tensor, " R"] = population.index(rows.seed_host)
        self._gate_of: Int[Tensor, " G"] = population.index(rows.gate_of)
        self._trainable_seeds = trainable and trainable[0]
        self._trainable_gates = trainable and trainable[1]

    @torch.no_grad()
    def unscale(self) -> None:
        """Undo the loss scale of fp16; nothing otherwise."""
        if self._scaler.enabled:
            inverse_N = 1.0 / self._scaler.scale
            self._hosts.grad.mul_(inverse_N[:, None])
            self._seeds.grad.mul_(inverse_N[self._seed_host][:, None])
            self._gates.grad.mul_(inverse_N[self._seed_host[self._gate_of]][:, None])

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step. Under fp16, hosts with gradients that are not finite are skipped."""
        host_norm = torch.linalg.vector_norm(self._hosts.grad, dim=1)
        seed_square, gate_square = (
            torch.linalg.vector_norm(own.grad, dim=1).square() for own in (self._seeds, self._gates)
        )
        seed_norm = seed_square.index_add_(0, self._gate_of, gate_square).sqrt()
        finite = self._finite(host_norm, seed_norm)
        spec = self._spec
        host_clip, seed_clip = (clip_factor(norm, spec.grad_clip) for norm in (host_norm, seed_norm))
        gate_clip = seed_clip[self._gate_of]
        factor = self._lr_factor
        self._step(self._hosts, host_clip, _rates(spec.host_lr, factor), self._decay_mask, finite)
        if len(self._seed_host):
            finite_R = None if finite is None else finite[self._seed_host]
            factor = None if factor is None else factor[self._seed_host]
            self._step(
                self._seeds, seed_clip, _rates(spec.seed_lr, factor), None, _both(finite_R, self._trainable_seeds)
            )
            if len(self._gate_of):
                finite_G = None if finite_R is None else finite_R[self._gate_of]
                factor = None if factor is None else factor[self._gate_of]
                self._step(
                    self._gates, gate_clip, _rates(spec.seed_lr, factor), None, _both(finite_G, self._trainable_gates)
                )

    def _finite(self, host_norm_N: Tensor, seed_norm_R: Tensor) -> Tensor | None:
        if not self._scaler.enabled:
            return None
        bad_seed = torch.zeros_like(host_norm_N).index_add_(0, self._seed_host, (~torch.isfinite(seed_norm_R)).float())
        finite = torch.isfinite(host_norm_N) & (bad_seed == 0)
        self._scaler.update(finite)
        return finite

    def _step(
        self, working: TrainingCopy, factor_R: Tensor, lr: float | Tensor, decay: Tensor | None, active: Tensor | None
    ) -> None:
        working.grad.mul_(factor_R[:, None])
        step_rows(self._spec, working.params, working.grad, working.optimizer, lr, decay, active)


def _rates(lr: float, factor: Tensor | None) -> float | Tensor:
    """The learning rate of all rows, or that of each [R, 1]."""
    return lr if factor is None else lr * factor[:, None]


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Rows in both masks; None is the mask of all rows."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
