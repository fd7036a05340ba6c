"""Autoencoders, flows, diffusion and contrastive networks, as people publish them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published.data import pictures, rows
from published.entry import Published


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(True),
            nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.ReLU(True),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Tanh()
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar) if self.training else mu
        return self.decode(z), mu, logvar


def elbo(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    recon, mu, logvar = outputs
    return (recon - x.flatten(1)).square().mean(1) - 0.02 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)


class VectorQuantizerEMA(nn.Module):
    def __init__(self, codes=8, dim=4, decay=0.99):
        super().__init__()
        self.decay = decay
        self.register_buffer("embedding", torch.randn(codes, dim))
        self.register_buffer("ema_count", torch.ones(codes))
        self.register_buffer("ema_weight", self.embedding.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat, self.embedding).argmin(dim=1)
        quantized = F.embedding(index, self.embedding.clone()).view_as(z)
        if self.training:
            one_hot = F.one_hot(index, len(self.embedding)).to(flat.dtype)
            self.ema_count.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
            self.ema_weight.mul_(self.decay).add_(one_hot.t() @ flat.detach(), alpha=1 - self.decay)
            self.embedding.copy_(self.ema_weight / self.ema_count.clamp(min=1e-3).unsqueeze(1))
        return z + (quantized - z).detach(), (quantized.detach() - z).square().mean(dim=-1)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 4, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.vq = VectorQuantizerEMA()
        self.dec = nn.Sequential(
            nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, stride=4)
        )

    def forward(self, x):
        z, commit = self.vq(self.enc(x).permute(0, 2, 3, 1))
        return self.dec(z.permute(0, 3, 1, 2)), commit


def vq_loss(outputs: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    recon, commit = outputs
    return (recon - x).square().flatten(1).mean(1) + 0.25 * commit.flatten(1).mean(1)


class Denoiser(nn.Module):
    """A small U-Net that is told the time."""

    def __init__(self, c=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, c))
        self.inc, self.down = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, stride=2, padding=1)
        self.norm, self.up = nn.GroupNorm(4, 2 * c), nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.out = nn.Conv2d(2 * c, 1, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(8, device=x.device) / 8)
        args = t[:, None].float() * freqs
        emb = self.time(torch.cat([args.cos(), args.sin()], dim=-1))
        h = F.silu(self.inc(x)) + emb[:, :, None, None]
        m = F.silu(self.norm(self.down(h)))
        return self.out(torch.cat([self.up(m), h], dim=1))


class Coupling(nn.Module):
    def __init__(self, d=4, flip=False):
        super().__init__()
        self.flip = flip
        self.s, self.t = (nn.Sequential(nn.Linear(d // 2, 16), nn.Tanh(), nn.Linear(16, d // 2)) for _ in range(2))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s = torch.tanh(self.s(a))
        b = b * s.exp() + self.t(a)
        return torch.cat([b, a] if self.flip else [a, b], dim=1), s.sum(dim=1)


class RealNVP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(flip=i % 2 == 1) for i in range(3)])

    def forward(self, x):
        log_det = torch.zeros(len(x), device=x.device)
        for layer in self.layers:
            x, s = layer(x)
            log_det = log_det + s
        return x, log_det


def negative_log_likelihood(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    z, log_det = outputs
    return 0.5 * z.square().sum(dim=1) + 2.0 * math.log(2 * math.pi) - log_det


class SimSiam(nn.Module):
    """Two views in, predictions and projections out."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x1, x2):
        z1, z2 = self.backbone(x1), self.backbone(x2)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


class SimSiamHead(SimSiam):
    """The same with the two views in one batch, so that each part is called once."""

    def forward(self, x1, x2):
        z = self.backbone(torch.cat([x1, x2]))
        p1, p2 = self.predictor(z).chunk(2)
        z1, z2 = z.detach().chunk(2)
        return p1, p2, z1, z2


def similarity(outputs: tuple[Tensor, Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
    p1, p2, z1, z2 = outputs
    return 1.0 - 0.5 * (F.cosine_similarity(p1, z2, dim=-1) + F.cosine_similarity(p2, z1, dim=-1))


def itself(size: int = 16) -> tuple[Tensor, Tensor]:
    x = pictures(1, size)[0].tanh()
    return x, x


def noisy() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x = pictures(1, 8)[0]
    generator = torch.Generator().manual_seed(1)
    noise, t = torch.randn(x.shape, generator=generator), torch.randint(100, (len(x),), generator=generator)
    keep = (1.0 - t / 100.0)[:, None, None, None]
    return (keep.sqrt() * x + (1 - keep).sqrt() * noise, t), noise


def vectors() -> tuple[Tensor, Tensor]:
    x = rows(4)[0]
    return torch.stack([x[:, 0], x[:, 0] ** 2 + 0.3 * x[:, 1], x[:, 2], x[:, 2] + 0.3 * x[:, 3]], dim=1), x[:, 0]


def views() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x = rows(8)[0]
    return (x, x + 0.1 * rows(8)[0].flip(0)), x[:, 0]


NETWORKS = [
    Published(name="autoencoder", style="PyTorch examples", model=Autoencoder, slots=["encoder", "decoder.0"],
              data=itself, shows="ConvTranspose2d, in-place ReLU behind a slot"),
    Published(name="VAE", style="PyTorch examples", model=VAE, slots=["fc1", "fc3"], data=lambda: itself(8),
              random=True, options={"loss": elbo}, shows="reparameterization, three outputs, own loss"),
    Published(name="VQ-VAE", style="VQ-VAE", model=VQVAE, slots=["enc.0", "dec.0"], data=itself,
              options={"loss": vq_loss}, shows="codebook buffers written in place beside BatchNorm"),
    Published(name="diffusion U-Net", style="DDPM", model=Denoiser, slots=["inc", "up"], data=noisy,
              shows="two inputs, skip"),
    Published(name="RealNVP", style="RealNVP", model=RealNVP, slots=["layers.0.s.0", "layers.1.t.0"], data=vectors,
              options={"loss": negative_log_likelihood, "blind_loss": 10.0}, shows="two outputs, own loss"),
    Published(name="SimSiam", style="lightly", model=SimSiam, slots=["predictor.0"], data=views,
              options={"loss": similarity}, shows="a slot that is called twice", refused="predictor.0"),
    Published(name="SimSiam, one batch", style="lightly", model=SimSiamHead, slots=["predictor.0"], data=views,
              options={"loss": similarity}, shows="twice as many rows inside as examples", refused="predictor.0"),
]  # fmt: skip
