"""Networks that take or return several tensors, in the styles that are common."""

import dataclasses
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GENERATOR = torch.Generator().manual_seed(0)
COUNT, LENGTH, VOCABULARY = 60, 8, 17
TOKENS = torch.randint(1, VOCABULARY, (COUNT, LENGTH), generator=GENERATOR)
MASK = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (COUNT, 1), generator=GENERATOR)).long()
TEXT = {"input_ids": TOKENS * MASK, "attention_mask": MASK}
IMAGES, META = torch.randn(COUNT, 1, 6, 6, generator=GENERATOR), torch.randn(COUNT, 5, generator=GENERATOR)
CLASSES = torch.arange(COUNT) % 3
NUMBERS = torch.rand(COUNT, 12, generator=GENERATOR)
SHORT: dict[str, Any] = {"batch": 16, "episode_length": 4, "min_training_epochs": 1}


class NanoGPT(nn.Module):
    """tokens [B, T] -> (logits [B, T, V], loss or None)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)).expand_as(idx))
        logits = self.head(x + self.mlp(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        return logits, loss


class ModelOutput(OrderedDict):
    """A dataclass and a dictionary in one, as in Hugging Face's transformers."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class ClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: object = None


class Bert(nn.Module):
    """input_ids, attention_mask [B, T] -> .logits [B, 3]; it looks at the values of its inputs, as real ones do."""

    def __init__(self, cache: object = None) -> None:
        super().__init__()
        self.cache = cache
        self.embeddings = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> ClassifierOutput:
        h = self.layer(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask[..., None].to(h.dtype)
        pooled = (h * weight).sum(dim=1) / weight.sum(dim=1)
        return ClassifierOutput(logits=self.classifier(pooled), past_key_values=self.cache)


class Towers(nn.Module):
    """image [B, 1, 6, 6], meta [B, 5] -> logits [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.meta = nn.Linear(5, 8)
        self.head = nn.Linear(16, 3)

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        return self.head(torch.cat((self.image(image).mean(dim=(2, 3)), torch.relu(self.meta(meta))), dim=1))


class JoinedTowers(Towers):
    """The same of one tensor [B, 41]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :36].reshape(-1, 1, 6, 6).contiguous(), x[:, 36:].contiguous())


class JoinedBert(Bert):
    """The same of one tensor [B, 2 T], with one tensor as output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :LENGTH], x[:, LENGTH:]).logits


class VAE(nn.Module):
    """[B, 12] -> (reconstruction [B, 12], mean [B, 4], log variance [B, 4])."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.spread(h)
        return self.decoder(mean), mean, log_variance


def vae_loss(out: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    reconstruction, mean, log_variance = out
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(dim=1)
    return (reconstruction - x).square().sum(dim=1) + divergence


class Detector(nn.Module):
    """[B, 12] -> {"class": [B, 3], "box": [B, 2]}."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.kind, self.box = nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"class": self.kind(h), "box": self.box(h)}


BOXES = {"class": CLASSES, "box": NUMBERS[:, :2]}


def detector_loss(out: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    classes = F.cross_entropy(out["class"], targets["class"], reduction="none")
    return classes + (out["box"] - targets["box"]).square().mean(dim=1)


class WithAuxiliary(nn.Module):
    """[B, 12] -> logits in evaluation, (logits, auxiliary logits) in training, as GoogLeNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.head, self.auxiliary = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.body(x)
        return (self.head(h), self.auxiliary(h)) if self.training else self.head(h)
