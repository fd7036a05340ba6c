"""Networks of tables, pairs, points and graphs, as people publish them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published.data import rows
from published.entry import Published


class MLP(nn.Module):
    def __init__(self, d_in=8, d=16, d_out=2):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d_in, d), nn.BatchNorm1d(d), nn.ReLU(inplace=True), nn.Dropout(0.1),
            nn.Linear(d, d), nn.BatchNorm1d(d), nn.ReLU(inplace=True), nn.Dropout(0.1),
        )  # fmt: skip
        self.out = nn.Linear(d, d_out)

    def forward(self, x):
        return self.out(self.net(x))


class FTTransformer(nn.Module):
    def __init__(self, features=8, d=16):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(features, d) / 4), nn.Parameter(torch.zeros(features, d))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 2))

    def forward(self, x):
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class DeepFM(nn.Module):
    def __init__(self, fields=(5, 7), dim=4, numbers=8):
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, fields[0]]))
        self.embedding, self.linear = nn.Embedding(sum(fields), dim), nn.Embedding(sum(fields), 1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim + numbers, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        nn.init.xavier_uniform_(self.embedding.weight.data)

    def forward(self, categories, numbers):
        index = categories + self.offsets
        e = self.embedding(index)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return self.linear(index).sum(1) + fm + self.mlp(torch.cat([e.flatten(1), numbers], dim=1))


class TwoTowers(nn.Module):
    """Two vectors out; the user's loss compares them."""

    def __init__(self, d=16):
        super().__init__()
        self.user, self.item = (nn.Sequential(nn.Linear(4, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(2))

    def forward(self, user, item):
        return F.normalize(self.user(user), dim=-1), F.normalize(self.item(item), dim=-1)


def cosine_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    a, b = outputs
    return (0.5 * ((a * b).sum(dim=-1) + 1.0) - target.float()).square()


class KANLinear(nn.Module):
    def __init__(self, n_in, n_out, grid=5):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, grid))
        self.base = nn.Parameter(torch.empty(n_out, n_in))
        self.spline = nn.Parameter(torch.randn(n_out, n_in, grid) * 0.1)
        nn.init.kaiming_uniform_(self.base, a=math.sqrt(5))

    def forward(self, x):
        basis = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return F.linear(F.silu(x), self.base) + torch.einsum("big,oig->bo", basis, self.spline)


class FourierRegressor(nn.Module):
    """Several numbers out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("B", torch.randn(2, 8))
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        p = 2 * math.pi * x @ self.B
        return self.out(self.body(torch.cat([p.sin(), p.cos()], dim=-1)))


class PointNet(nn.Module):
    """Points [B, N, 3]."""

    def __init__(self, classes=2):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 16, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
        self.fc, self.out = nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x.transpose(2, 1))))
        x = torch.max(self.bn2(self.conv2(x)), 2, keepdim=True)[0].view(-1, 16)
        return self.out(F.relu(self.fc(x)))


def mixed() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = rows()
    categories = torch.stack([(x[:, 0] * 3).long().abs() % 5, (x[:, 1] * 3).long().abs() % 7], dim=1)
    return (categories, x), y


def pairs() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, _ = rows()
    return (x[:, :4].contiguous(), x[:, 4:].contiguous()), (x[:, 0] * x[:, 4] > 0).float()


def surface() -> tuple[Tensor, Tensor]:
    x = rows(2)[0]
    return x, torch.stack([(x[:, 0] * (i + 1)).sin() + x[:, 1] for i in range(3)], dim=1)


def clouds() -> tuple[Tensor, Tensor]:
    x, y = rows(30)
    points = x.view(-1, 10, 3).clone()
    points[..., 0] *= 1.0 + 2.0 * y[:, None]
    return points, y


def binary() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = mixed()
    return x, y.float()[:, None]


def logistic(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").squeeze(1)


NETWORKS = [
    Published(name="tabular MLP", style="rtdl", model=MLP, slots=["net.0", "net"], data=rows,
              shows="BatchNorm1d, in-place ReLU"),
    Published(name="FT-Transformer", style="rtdl", model=FTTransformer, slots=["blocks.0", "blocks.1"], data=rows,
              shows="cls token"),
    Published(name="DeepFM", style="DeepCTR", model=DeepFM, slots=["mlp.0"], data=binary, options={"loss": logistic},
              shows="two inputs, own loss"),
    Published(name="two towers", style="recommenders", model=TwoTowers, slots=["user.0", "item.0"], data=pairs,
              options={"loss": cosine_loss}, shows="two inputs, two outputs, own loss"),
    Published(name="KAN", style="KAN", model=lambda: nn.Sequential(KANLinear(8, 8), nn.Identity(), KANLinear(8, 2)),
              slots=["0", "1"], data=rows, shows="nn.Sequential at the root"),
    Published(name="Fourier features", style="Fourier features", model=FourierRegressor, slots=["body"],
              data=surface, shows="a random buffer, three numbers out"),
    Published(name="PointNet", style="PointNet", model=PointNet, slots=["fc"], data=clouds,
              shows="torch.max(...)[0]"),
]  # fmt: skip
