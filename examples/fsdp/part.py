"""One module (a host, a seed or a gate), sharded over ranks, with its optimizer and its snapshot.

Each rank holds a slice of every parameter (`torch.distributed.fsdp.fully_shard`), of its gradient, of the moments of
the optimizer, and of the snapshot. Whole parameters exist while a layer runs, in births, and in `rows`.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from esper.kasmina.parameters.layout import FlatLayout
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import Kind
from esper.leyline.tensor_dataclass import StateTree

MOMENTS = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
}
"""Names of the moments in a state of esper, and those of `torch.optim`."""


class Part:
    """A module that every rank of `mesh` builds alike, and keeps its slice of.

    Args:
        kind: whose module is taken. row: its weights [P], in the order of the layout of the kind.
        mesh: the ranks, one axis.
        spec: how it is trained. lr: its learning rate. decays: whether it has weight decay, as hosts have.
    """

    def __init__(
        self, kind: Kind, row: Tensor, mesh: DeviceMesh, spec: OptimizerSpec, *, lr: float, decays: bool
    ) -> None:
        self.module, self.layout = kind.template.module, kind.template.parameters
        _fill(self.module, self.layout, row)
        _shard(self.module, self.layout, mesh)
        self.params: list[Tensor] = [self.module.get_parameter(tensor.name) for tensor in self.layout.tensors]
        self._lr, self._moments = lr, MOMENTS[spec.kind]
        self._optimizer = _optimizer(spec, self.params, lr, decays)
        self._snapshot: list[Tensor] | None = None

    # -- training -------------------------------------------------------------------------------------------------

    def set_lr(self, factor: float) -> None:
        """Learning rate of this pass, in that of the specification."""
        for group in self._optimizer.param_groups:
            group["lr"] = factor * self._lr

    def clear_gradients(self) -> None:
        """Before a batch."""
        self._optimizer.zero_grad()

    def squares(self) -> Tensor:
        """Sum of squares of this rank's slice of each gradient [M], float64."""
        return torch.stack([local(grad).double().square().sum() for grad in self._gradients()])

    @torch.no_grad()
    def step(self, clip: float) -> None:
        """One step of the optimizer with the gradients times `clip`."""
        for grad in self._gradients():
            local(grad).mul_(clip)
        self._optimizer.step()

    def _gradients(self) -> list[Tensor]:
        """Zeros of what was not used: moments fade and weights decay all the same."""
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.params if p.grad is not None]

    # -- snapshots ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Take a snapshot of the weights."""
        self._snapshot = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def restore(self) -> None:
        """Weights of the snapshot, with an optimizer as before its first step."""
        assert self._snapshot is not None, "what may be restored was saved"
        for p, saved in zip(self.params, self._snapshot, strict=True):
            p.copy_(saved)
        self._optimizer.state.clear()

    # -- persistence ----------------------------------------------------------------------------------------------

    def rows(self) -> StateTree:
        """Weights, moments and snapshot as whole rows [P], as they are named in esper's states; all ranks call it."""
        state = self._optimizer.state
        tree = {".params": self._packed(self.params)}
        for name, own in self._moments.items():
            tree[f".{name}"] = self._packed([state[p].get(own, torch.zeros_like(p)) for p in self.params])
        if "exp_avg" in self._moments:
            tree[".steps"] = torch.tensor(max(int(state[p].get("step", 0)) for p in self.params))
        if self._snapshot is not None:
            tree["_snapshot.params"] = self._packed(self._snapshot)
        return tree

    def load(self, tree: StateTree, snapshot: Tensor) -> None:
        """Moments and snapshot from rows; the weights came with the constructor."""
        moments = {own: self._unpacked(tree[name]) for name, own in self._moments.items()}
        for i, p in enumerate(self.params):
            self._optimizer.state[p] = {own: values[i] for own, values in moments.items()}
            if "steps" in tree:
                self._optimizer.state[p]["step"] = tree["steps"].float()
        self._snapshot = self._unpacked(snapshot)

    def _packed(self, tensors: list[Tensor]) -> Tensor:
        whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors)
        shaped = {spec.name: t.reshape(spec.shape) for spec, t in zip(self.layout.tensors, whole, strict=True)}
        return self.layout.pack(shaped)

    def _unpacked(self, row: Tensor) -> list[Tensor]:
        views = self.layout.unpack(row[: self.layout.total]).values()
        return [  # without a source rank every rank takes its slice of its own copy
            distribute_tensor(view.reshape(p.shape), p.device_mesh, p.placements, src_data_rank=None)
            for view, p in zip(views, self.params, strict=True)
            if isinstance(p, DTensor)
        ]

    def bytes_here(self) -> dict[str, int]:
        """Bytes that this rank keeps between two passes."""
        of_optimizer = [x for values in self._optimizer.state.values() for x in values.values() if x.dim()]
        kept = {"weights": self.params, "moments": of_optimizer, "snapshot": self._snapshot or []}
        return {name: sum(local(t).numel() * t.element_size() for t in some) for name, some in kept.items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's slice."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _fill(module: nn.Module, layout: FlatLayout, row: Tensor) -> None:
    """The weights of a row; numbers become vectors of one, which broadcast alike, because FSDP shards no numbers."""
    values = layout.unpack(row[: layout.total])
    for spec in layout.tensors:
        parameter = nn.Parameter(values[spec.name].reshape(spec.shape or (1,)).clone())
        for path in (spec.name, *spec.aliases):
            owner, _, leaf = path.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, parameter)


def _shard(module: nn.Module, layout: FlatLayout, mesh: DeviceMesh) -> None:
    """Each layer of a list gathers its weights when it runs, the rest of the module together.

    A layer with tied weights stays in the rest, because weights of two groups would no longer be tied.
    """
    tied = [path for spec in layout.tensors if spec.aliases for path in (spec.name, *spec.aliases)]
    layers = [
        layer
        for path, many in module.named_modules()
        if isinstance(many, nn.ModuleList)
        for number, layer in many.named_children()
        if any(True for _ in layer.parameters())
        and not any(of.startswith(f"{path}.{number}.".removeprefix(".")) for of in tied)
    ]
    for own in (*layers, module):
        sharded = fully_shard(own, mesh=mesh, reshard_after_forward=True)
        assert isinstance(sharded, FSDPModule)
        # The loss is divided by the weight of the whole batch, so gradients are summed. Gloo refuses the factor that
        # FSDP would ask for otherwise (PREMUL_SUM), and once gave a sum for a mean (pytorch/pytorch#162338).
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def _optimizer(spec: OptimizerSpec, params: list[Tensor], lr: float, decays: bool) -> torch.optim.Optimizer:
    """PyTorch's own, with the constants of `spec`."""
    sgd = spec.kind == "sgd"
    decay = (spec.sgd_weight_decay if sgd else spec.adamw_weight_decay) if decays else 0.0
    decayed = [sgd or spec.decay_vectors or p.dim() >= 2 for p in params]
    groups = [
        {"params": [p for p, of in zip(params, decayed, strict=True) if of is chosen], "weight_decay": rate}
        for chosen, rate in ((True, decay), (False, 0.0))
        if chosen in decayed
    ]
    if sgd:
        return torch.optim.SGD(groups, lr=lr, momentum=spec.momentum, foreach=True)
    kind = torch.optim.Adam if spec.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=lr, betas=spec.betas, eps=spec.eps, foreach=True)
