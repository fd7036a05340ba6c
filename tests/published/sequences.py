"""Language models, encoders, recurrent and convolutional networks of sequences, as people publish them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from published.data import tokens, waves
from published.entry import Published

# -- decoders ---------------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 16
    vocab_size: int = 17
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.1
    bias: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        drop = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=drop, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
            "c_proj": nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
        })  # fmt: skip

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
            "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        device = idx.device
        _, t = idx.size()
        assert t <= self.config.block_size
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm, self.heads = RMSNorm(dim), RMSNorm(dim), heads

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        h = self.attention_norm(x)
        q, k, v = (w(h).view(B, T, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (self.rotate(t, cos[:T], sin[:T]) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.wo(y)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    @staticmethod
    def rotate(x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class Llama(nn.Module):
    def __init__(self, vocab=17, dim=16, heads=2, layers=2, context=32):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads) for _ in range(layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        freqs = 1.0 / (10000.0 ** (torch.arange(0, dim // heads, 2).float() / (dim // heads)))
        angles = torch.outer(torch.arange(context).float(), freqs)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        return self.output(self.norm(h)).float()


class CharLSTM(nn.Module):
    def __init__(self, vocab=17, hidden=16):
        super().__init__()
        self.encoder = nn.Embedding(vocab, hidden)
        self.rnn = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, x):
        out, _ = self.rnn(self.drop(self.encoder(x)))
        return self.decoder(self.drop(out))


def language() -> tuple[Tensor, Tensor]:
    both = tokens(13)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


# -- encoders ---------------------------------------------------------------------------------------------------------


class BertConfig:
    def __init__(self, **kwargs):
        self.hidden_size, self.num_labels, self.hidden_dropout_prob = 16, 2, 0.1
        self.vocab_size, self.max_position_embeddings, self.num_attention_heads = 17, 32, 2
        self.__dict__.update(kwargs)


@dataclass
class SequenceClassifierOutput:
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.dense, self.heads, self.p = nn.Linear(size, size), config.num_attention_heads, config.hidden_dropout_prob
        self.intermediate, self.output = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.ln1, self.ln2 = nn.LayerNorm(size, eps=1e-12), nn.LayerNorm(size, eps=1e-12)

    def forward(self, hidden_states, attention_mask):
        b, t, c = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(c / self.heads) + attention_mask
        probs = F.dropout(scores.softmax(dim=-1), p=self.p, training=self.training)
        context = self.dense((probs @ v).transpose(1, 2).reshape(b, t, c))
        h = self.ln1(hidden_states + F.dropout(context, p=self.p, training=self.training))
        return self.ln2(h + F.dropout(self.output(F.gelu(self.intermediate(h))), p=self.p, training=self.training))


class BertForSequenceClassification(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.register_buffer(
            "position_ids", torch.arange(config.max_position_embeddings).expand((1, -1)), persistent=False
        )
        self.layer = nn.ModuleList([BertLayer(config) for _ in range(2)])
        self.pooler = nn.Sequential(nn.Linear(config.hidden_size, config.hidden_size), nn.Tanh())
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        h = self.word_embeddings(input_ids) + self.position_embeddings(self.position_ids[:, : input_ids.size(1)])
        extended = (1.0 - attention_mask[:, None, None, :].to(h.dtype)) * torch.finfo(h.dtype).min
        for layer in self.layer:
            h = layer(h, extended)
        logits = self.classifier(self.pooler(h[:, 0]))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=(h,))


class PaddedEncoder(nn.Module):
    """nn.TransformerEncoder with a mask made of the tokens themselves."""

    def __init__(self, vocab=17, d_model=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        layer = nn.TransformerEncoderLayer(d_model, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(d_model, 2)

    def forward(self, src):
        mask = src == 0
        mask = mask & ~mask.all(dim=1, keepdim=True)
        out = self.encoder(self.embedding(src) * math.sqrt(16), src_key_padding_mask=mask)
        return self.fc(out.mean(dim=1))


def parity() -> tuple[Tensor, Tensor]:
    x = tokens()
    return x, (x[:, 0] >= 8).long()


def masked_parity() -> tuple[dict[str, Tensor], Tensor]:
    x, y = parity()
    mask = (torch.arange(x.shape[1]) < 6 + torch.arange(len(x))[:, None] % 7).long()
    return {"input_ids": x * mask, "attention_mask": mask}, y


# -- recurrent and convolutional --------------------------------------------------------------------------------------


class PackedGRU(nn.Module):
    """Two inputs: sequences and their lengths."""

    def __init__(self, vocab=17, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.out(F.relu(self.mid(h[-1])))


class SpectrogramCNN(nn.Module):
    """The short-time Fourier transform is a part of the network."""

    def __init__(self, classes=4):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.head = nn.Linear(8, classes)

    def forward(self, wav):
        spec = torch.stft(wav, n_fft=32, hop_length=16, window=self.window, return_complex=True)
        x = torch.log1p(spec.abs().pow(2)).unsqueeze(1)
        return self.head(self.features(x).mean(dim=(-2, -1)))


class ConformerBlock(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.SiLU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
            for _ in range(2)
        )
        self.norm_attn, self.attn = nn.LayerNorm(d), nn.MultiheadAttention(d, 2, dropout=0.1, batch_first=True)
        self.norm_conv, self.pw = nn.LayerNorm(d), nn.Conv1d(d, 2 * d, 1)
        self.dw, self.bn, self.norm = nn.Conv1d(d, d, 5, padding=2, groups=d), nn.BatchNorm1d(d), nn.LayerNorm(d)

    def forward(self, x):
        x = x + 0.5 * self.ff1(x)
        h = self.norm_attn(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = F.glu(self.pw(self.norm_conv(x).transpose(1, 2)), dim=1)
        x = x + F.silu(self.bn(self.dw(h))).transpose(1, 2)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    def __init__(self, d=16, classes=4):
        super().__init__()
        self.subsample = nn.Conv1d(1, d, 16, stride=16)
        self.block = ConformerBlock(d)
        self.out = nn.Linear(d, classes)

    def forward(self, x):
        return self.out(self.block(self.subsample(x.unsqueeze(1)).transpose(1, 2)).mean(1))


class MoE(nn.Module):
    """Every expert runs, a router weighs the best two."""

    def __init__(self, vocab=17, d=16, experts=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)) for _ in range(experts))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, x):
        h = self.embed(x)
        weights, chosen = self.router(h).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(*h.shape[:2], len(self.experts), device=h.device).scatter(-1, chosen, weights)
        out = sum(gates[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        return self.head(self.norm(h + out))


class StateSpace(nn.Module):
    """A diagonal state-space layer as a convolution by FFT."""

    def __init__(self, vocab=17, d=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.log_decay, self.b, self.skip = (
            nn.Parameter(torch.rand(d)),
            nn.Parameter(torch.randn(d)),
            nn.Parameter(torch.ones(d)),
        )
        self.mix, self.head = nn.Linear(d, d), nn.Linear(d, vocab)

    def forward(self, x):
        u = self.embed(x)
        t = u.shape[1]
        kernel = self.b * torch.exp(-self.log_decay.exp() * torch.arange(t, device=u.device)[:, None])
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * t, dim=1) * torch.fft.rfft(kernel, 2 * t, dim=0), 2 * t, dim=1)[:, :t]
        return self.head(F.gelu(self.mix(y + self.skip * u)))


def with_lengths() -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = parity()
    return (x, 4 + torch.arange(len(x)) % 9), y


NETWORKS = [
    Published(name="nanoGPT", style="nanoGPT", model=lambda: NanoGPT(GPTConfig()),
              slots=["transformer.h.0", "transformer.h.1"], data=language, options={"outputs": lambda out: out[0]},
              random=True, shows="(logits, loss), torch.arange, tied weights, dropout in attention"),
    Published(name="Llama", style="LLaMA", model=Llama, slots=["layers.0", "layers.1"], data=language,
              shows="RMSNorm, rotary buffers, SwiGLU"),
    Published(name="char-LSTM", style="PyTorch examples", model=CharLSTM, slots=["drop", "encoder"], data=language,
              random=True, shows="nn.LSTM(dropout=), a slot that is called twice", refused="drop"),
    Published(name="char-LSTM, encoder", style="PyTorch examples", model=CharLSTM, slots=["encoder"], data=language,
              random=True, shows="nn.LSTM(dropout=)"),
    Published(name="BERT classifier", style="Hugging Face", model=lambda: BertForSequenceClassification(BertConfig()),
              slots=["layer.0", "layer.1"], data=masked_parity, options={"outputs": lambda out: out.logits},
              random=True, shows="dictionary in, dataclass out, configuration object, F.dropout"),
    Published(name="TransformerEncoder", style="PyTorch tutorial", model=PaddedEncoder, slots=["encoder"],
              data=parity, shows="src_key_padding_mask"),
    Published(name="packed GRU", style="PyTorch tutorial", model=PackedGRU, slots=["mid"], data=with_lengths,
              shows="two inputs, pack_padded_sequence"),
    Published(name="spectrogram CNN", style="torchaudio", model=SpectrogramCNN, slots=["features.3", "features"],
              data=waves, shows="torch.stft, in-place ReLU"),
    Published(name="Conformer", style="torchaudio", model=Conformer, slots=["block"], data=waves,
              shows="attention with dropout"),
    Published(name="mixture of experts", style="Switch", model=MoE, slots=["norm"], data=language,
              shows="topk, scatter"),
    Published(name="state space", style="S4", model=StateSpace, slots=["mix"], data=language,
              shows="FFT, raw parameters"),
]  # fmt: skip
