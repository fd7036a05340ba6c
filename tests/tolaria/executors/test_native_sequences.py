"""Sequences as instructions beside PyTorch: embeddings, attention, products, running sums, masks, keyed dropout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import GateNetwork, Positions, SelfAttention
from esper.kasmina.blueprints.transformer import TRANSFORMER_BLUEPRINTS
from esper.kasmina.hosts.transformer import TransformerHost, TransformerHostSpec
from esper.kasmina.parameters.dropout import Draws, Dropout, Moment, with_keyed_dropout
from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import by_instructions, disagreement, gradient_like
from esper.tolaria.executors.native.lowering import KEYS, Constants, Lowering
from esper.tolaria.executors.native.machine import Examples, Machine, Spaces, Workload
from esper.tolaria.executors.native.program import NUM_WORKING, Operation, Place
from esper.tolaria.executors.native.sequences import dropout, pass_keys
from esper.tolaria.executors.native.trace import NoRuleError, trace

TOKENS, WIDTH = 7, 12
LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


class Function(nn.Module):
    """A function of weights w [12, 8], u [8, 12], v [12] and features [B, T, 12] that are computed from its inputs."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.w, self.u = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(8, WIDTH))
        self.v, self.factor = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.drop = Dropout(0.5, channels=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x * self.factor)


def features(examples: int, *shape: int) -> Tensor:
    return torch.zeros(examples, *(shape or (TOKENS, WIDTH)))


def tokens(examples: int, length: int = TOKENS, entries: int = 11) -> Tensor:
    return torch.randint(0, entries, (examples, length), generator=torch.Generator().manual_seed(1))


def heads(x: Tensor, count: int = 3) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def single(module: nn.Module, x: Tensor, **options: Any) -> str | None:
    return disagreement(module, x, dtype=torch.float32, tolerance=2e-4, **options)


# -- embeddings --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose table is also the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 5), Positions(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.positions(self.table(x)), self.table.weight)


class Placed(nn.Module):
    """An embedding of tokens and one of their places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.kinds = nn.Embedding(11, 5), nn.Embedding(9, 5), nn.Embedding(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x) + self.places(torch.arange(1, x.shape[1] + 1)) * self.kinds(torch.arange(x.shape[1]) % 2)


EMBEDDINGS = {
    "plain": nn.Embedding(11, 5), "padded": nn.Embedding(11, 5, padding_idx=3), "tied": Tied(), "placed": Placed()
}  # fmt: skip


@pytest.mark.parametrize("examples", [16, 37])
@pytest.mark.parametrize("module", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embeddings_agree_with_pytorch(module, examples):
    assert disagreement(module, tokens(examples), chunk=16) is None
    assert single(module, tokens(examples)) is None


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 1.0}])
def test_embeddings_with_rare_options_have_no_rule(options):
    with pytest.raises(NoRuleError):
        disagreement(nn.Embedding(11, 5, **options), tokens(7))


def test_a_token_that_the_table_lacks_becomes_nan_and_has_no_gradient():
    template = Template(nn.Embedding(3, 1))
    graph, weights = trace(template, tokens(7, 1, 3), training=True), torch.tensor([5.0, 6.0, 7.0] + [0.0] * 13)
    x = torch.tensor([0.0, 2.0, 3.0, -1.0, 1e30, math.nan, 1.0])[:, None]
    found = by_instructions(graph, weights, torch.zeros(0), x, training=True)
    assert torch.equal(found.outputs.flatten().isnan(), torch.tensor([0, 0, 1, 1, 1, 1, 0]).bool())
    assert torch.equal(found.outputs.flatten()[[0, 1, 6]], torch.tensor([5.0, 7.0, 6.0]))
    assert torch.equal(found.weight_grads[:3], gradient_like(found.outputs).flatten()[[0, 6, 1]])


# -- attention ---------------------------------------------------------------------------------------------------------


def attend(**options: Any) -> Function:
    return Function(lambda s, x: F.scaled_dot_product_attention(heads(x), heads(x * s.v), heads(x + s.v), **options))


@pytest.mark.parametrize("length", [1, 7, 33])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.7}])
def test_attention_agrees_with_pytorch(length, options):
    assert disagreement(attend(**options), features(9, length, WIDTH)) is None
    assert single(attend(**options), features(37, length, WIDTH), chunk=16) is None


FIRST_KEYS_HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu()
EACH_HEAD = torch.linspace(-1, 1, 3 * TOKENS * TOKENS).view(3, TOKENS, TOKENS)
INFINITIES = torch.zeros(1, 1).masked_fill(LATER, -math.inf)


@pytest.mark.parametrize(
    "mask",
    [~LATER, FIRST_KEYS_HIDDEN, EACH_HEAD[0], EACH_HEAD, 300.0 + EACH_HEAD, EACH_HEAD[None, :, :1], INFINITIES],
    ids=["causal", "anticausal", "numbers", "each_head", "large", "each_key", "infinities"],
)
def test_constant_masks_of_attention_agree_with_pytorch(mask):
    assert disagreement(attend(attn_mask=mask), features(9)) is None
    assert single(attend(attn_mask=mask), features(9)) is None


def test_an_example_does_not_depend_on_others():
    module = attend(is_causal=True)
    template = Template(module)
    graph, row = trace(template, features(5), training=True), template.parameters.pack(dict(module.named_parameters()))
    x = torch.randn(37, TOKENS, WIDTH)
    whole, part = (by_instructions(graph, row, torch.zeros(0), given, training=True) for given in (x, x[[5, 30]]))
    assert torch.equal(whole.outputs[[5, 30]], part.outputs)


# -- functions: attention of unlike tensors, products, sums of the past, masks -----------------------------------------


UNLIKE = {
    "no_heads": lambda s, x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True),
    "fewer_queries": lambda s, x: F.scaled_dot_product_attention(x[:, :3], x, x * s.v),
    "fewer_keys": lambda s, x: F.scaled_dot_product_attention(x, x[:, :3], x[:, 2:5], is_causal=True),
    "learned_queries": lambda s, x: F.scaled_dot_product_attention(s.u[None, :3], x, x),
    "short_values": lambda s, x: F.scaled_dot_product_attention(x, x, x[..., :5], is_causal=True),
    "shared_keys": lambda s, x: F.scaled_dot_product_attention(heads(x), heads(x)[:, :1], heads(x)[:, :1]),
    "learned_bias": lambda s, x: F.scaled_dot_product_attention(*(heads(x),) * 3, attn_mask=s.w[:TOKENS, :TOKENS]),
    "hidden_first_keys": lambda s, x: F.scaled_dot_product_attention(
        x,
        *(torch.cat([x] * 6, 1),) * 2,
        attn_mask=torch.zeros(TOKENS, 42).masked_fill(torch.arange(42) < 35, -math.inf),
    ),
}
"""Attention of tensors of other shapes; of 42 keys those of the first blocks do not count."""


def in_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, -1))


PRODUCTS = {
    "weight": lambda s, x: x @ s.w,
    "transposed": lambda s, x: x @ s.u.t(),
    "T": lambda s, x: x @ s.u.T,
    "mT": lambda s, x: x @ s.u.mT,
    "permuted": lambda s, x: x @ s.u.permute(-1, 0),
    "linear_of_transposed": lambda s, x: F.linear(x, s.w.t()),
    "linear_of_computed": lambda s, x: F.linear(x, s.u * 2, s.w[0]),
    "twice": lambda s, x: (x @ s.w) @ s.w.t() + x,
    "vector": lambda s, x: x @ s.v,
    "column": lambda s, x: x @ s.w[:, 1],
    "computed": lambda s, x: x @ (s.w * 2),
    "from_left": lambda s, x: s.w.mT @ x.mT,
    "over_tokens": lambda s, x: s.w[:TOKENS, :TOKENS] @ x,
    "constant": lambda s, x: torch.linspace(-1, 1, 4 * TOKENS).view(4, TOKENS).to(x.dtype) @ x,
    "merged": lambda s, x: (x.reshape(-1, WIDTH) @ s.w).view(-1, TOKENS, 8),
    "bmm": lambda s, x: torch.bmm(x, x.mT),
    "gram": lambda s, x: x.mT @ x,
    "heads": lambda s, x: heads(x) @ heads(x * s.v).mT @ heads(x),
    "shared_factor": lambda s, x: heads(x) @ heads(x)[:, :1].mT,
    "of_each_head": lambda s, x: heads(x) @ s.w.reshape(3, 4, 8),
    "mm": lambda s, x: torch.mm(x[:, 0], s.w),
    "mm_transposed": lambda s, x: torch.mm(x[:, 0], s.u.t()),
    "addmm": lambda s, x: torch.addmm(s.v[:8], x[:, 0], s.w, beta=2, alpha=0.5),
    "addmm_transposed": lambda s, x: torch.addmm(s.v[:8], x[:, 0], s.u.t()),
    "baddbmm": lambda s, x: torch.baddbmm(x[..., :TOKENS], x, x.mT, beta=0.5, alpha=0.3),
    "baddbmm_alone": lambda s, x: torch.baddbmm(x[..., :TOKENS], x, x.mT, beta=0),
    "einsum_weight": lambda s, x: torch.einsum("btd,de->bte", x, s.w),
    "einsum_weight_of_rows": lambda s, x: torch.einsum("btd,ed->bte", x, s.u),
    "einsum_heads": lambda s, x: torch.einsum("bthd,bshd->bhts", in_heads(x), in_heads(x)),
    "einsum_mix": lambda s, x: torch.einsum("bts,bshd->bthd", x @ x.mT, in_heads(x)),
    "einsum_to_heads": lambda s, x: torch.einsum("btd,dhe->bhte", x, s.w.view(WIDTH, 2, 4)),
    "einsum_from_heads": lambda s, x: torch.einsum("bthd,hdo->bto", in_heads(x), s.w.view(3, 4, 8)),
    "einsum_of_one": lambda s, x: torch.einsum("btd->dbt", x).transpose(0, 1),
    "einsum_sum": lambda s, x: torch.einsum("btd,bsd->bt", x, x),
    "einsum_of_weights": lambda s, x: torch.einsum("td,de->te", s.u, s.w) + x[..., :8].sum((1, 2), keepdim=True),
    "einsum_weight_first": lambda s, x: torch.einsum("de,btd->bte", s.w, x),
    "einsum_outer": lambda s, x: torch.einsum("bt,bd->btd", x[:, :, 0], x[:, 0]),
}


ELEMENTWISE = {
    "cumsum": lambda s, x: x.cumsum(1),
    "cumsum_of_features": lambda s, x: x.cumsum(-1) * x,
    "cumsum_of_one": lambda s, x: x[:, :1].cumsum(1),
    "tril": lambda s, x: x.tril(),
    "triu": lambda s, x: x.triu(2) + x,
    "masked_fill": lambda s, x: x[..., :TOKENS].masked_fill(LATER, 2.0),
    "masked_fill_in_place": lambda s, x: (x[..., :TOKENS] * 1).masked_fill_(LATER, -3),
    "masked_scores": lambda s, x: (x @ x.mT).masked_fill(LATER, -math.inf).softmax(-1) @ x,
    "masked_fill_of_row": lambda s, x: x.masked_fill(torch.arange(WIDTH) % 3 == 0, 0.5),
    "where": lambda s, x: torch.where(torch.arange(WIDTH) % 3 == 0, x, 2 * x),
    "where_number": lambda s, x: torch.where(torch.arange(TOKENS)[:, None] > 2, x, -1.0),
    "where_number_first": lambda s, x: torch.where(torch.arange(TOKENS)[:, None] > 2, 0.5, x),
    "where_weight": lambda s, x: torch.where(torch.arange(TOKENS)[:, None] > 2, x, s.v),
    "where_broadcast": lambda s, x: torch.where(LATER[None, :, :4, None], x[:, :, None], x[:, :, None] * 2),
    "dropout_that_does_nothing": lambda s, x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
    "full_like": lambda s, x: torch.full_like(x, 0.5) * x + torch.zeros_like(x) - torch.ones_like(x) / x.shape[1],
    "compared": lambda s, x: torch.where(x > 0, x, 0.1 * x),
    "masked_by_weights": lambda s, x: x.masked_fill(s.v == s.v[0], 2.0),
    "not": lambda s, x: torch.where(~(x >= s.v), x * x, 1.0),
}
FUNCTIONS = {**UNLIKE, **PRODUCTS, **ELEMENTWISE}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_features_and_weights_agrees_with_pytorch(function):
    assert disagreement(Function(function), features(20), chunk=16) is None


WITHOUT_RULE = [
    (lambda s, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "global generator"),
    (lambda s, x: F.scaled_dot_product_attention(*(heads(x),) * 3, enable_gqa=True), "share keys"),
    (lambda s, x: F.scaled_dot_product_attention(x, x, x, scale=-0.5), "scale of -0.5"),
    (lambda s, x: F.scaled_dot_product_attention(x, x, x, attn_mask=LATER), "leaves a query no key"),
    (lambda s, x: F.scaled_dot_product_attention(*(x.transpose(0, 1),) * 3), "between examples"),
    (lambda s, x: s.drop(x.transpose(0, 1)).transpose(0, 1), "first axis is not that of the examples"),
    (lambda s, x: x.transpose(0, 1) @ x.transpose(0, 1).mT, "lie along other axes"),
    (lambda s, x: torch.einsum("btd,bsd->ts", x, x), "lie along other axes"),
    (lambda s, x: torch.einsum("btd,csd->btcs", x, x), "lie along other axes"),
    (lambda s, x: torch.einsum("btt->bt", x[..., :TOKENS]), "the sum"),
    (lambda s, x: torch.einsum("b...,b...->b", x, x), "the sum"),
    (lambda s, x: torch.einsum("btd,dh,he->bte", x, s.w, s.w.t()), "the sum"),
    (lambda s, x: x.cumsum(0), "over the examples of a batch"),
    (lambda s, x: x.cumsum(1, dtype=torch.float64).to(x.dtype), "conversion to torch.float64"),
    (lambda s, x: x.sum(1, dtype=torch.float64).to(x.dtype), "conversion to torch.float64"),
    (lambda s, x: ((x > 0) + (x > 1)) * x, "sum of truth values"),
    (lambda s, x: x.masked_fill(torch.arange(len(x))[:, None, None] > 1, 0.0), "entry for each example"),
    (lambda s, x: F.dropout(x, 0.5), "global generator"),
]


@pytest.mark.parametrize(("function", "why"), WITHOUT_RULE)
def test_what_mixes_examples_or_draws_and_rare_options_have_no_rule(function, why):
    with pytest.raises(NoRuleError, match=why):
        disagreement(Function(function), features(9))


@pytest.mark.parametrize("name", ["transposed", "T", "mT", "permuted", "mm_transposed", "addmm_transposed"])
def test_products_with_transposed_weights_are_linear_layers(name):
    graph = trace(Template(Function(PRODUCTS[name])), features(5), training=True)
    targets = [node.target for node in graph.nodes]
    assert targets.count(torch.ops.aten.linear.default) == 1
    assert not {"aten.matmul.default", "aten.mm.default", "aten.addmm.default"} & set(map(str, targets))


@pytest.mark.parametrize("name", ["weight", "gram", "heads"])
def test_products_of_chunks_agree_with_pytorch(name):
    assert single(Function(PRODUCTS[name]), features(37), chunk=16) is None


# -- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (7, 3), (3, 5, 4), (8, 3, 3)])
@pytest.mark.parametrize("p", [0.1, 1.0])
def test_dropout_agrees_with_pytorch(shape, p):
    module = nn.Sequential(Dropout(p, channels=False), Dropout(0.2, channels=False))
    assert disagreement(module, features(37, *shape), chunk=16, tolerance=1e-12) is None
    assert single(module, features(70, *shape)) is None
    if len(shape) == 3:
        assert disagreement(Dropout(0.3, channels=True), features(37, *shape), chunk=16, tolerance=1e-12) is None


def test_masks_go_on_from_batch_to_batch_and_each_slot_counts_its_own():
    hosts, moment, slots = torch.tensor([5, 9]), Moment(run_seed=2**40 + 3, episode=4, t=6), (3, 1, 3)
    x, p, sums = torch.randn(50, 6, dtype=torch.float64), 0.4, torch.zeros(2, 3, 6, dtype=torch.float64)
    low = Lowering(trainable=False, constants=Constants(0))
    value = low.make(6)
    low.emit(Operation.LOAD, Place(NUM_WORKING, 0, 6), value.rows, sizes=(6,))
    for k, low.slot in enumerate(slots):
        dropped = dropout(low, value, p, False)
        low.emit(Operation.SPREAD_BACKWARD, dropped.rows, Place(KEYS + 1, 6 * k, 6), sizes=(6,))
    work, spaces = Workload.of_each([low.program()] * 2), Spaces(2, KEYS + 2)
    work.chunk[:] = 16
    keys = pass_keys(moment, hosts, low.masks, 3, each=5)
    spaces.rows(KEYS, keys)
    spaces.rows(KEYS + 1, sums)
    labels = torch.zeros(50, dtype=torch.int64)
    Machine(dtype=torch.float64).run_batches(work, spaces, Examples(x, labels, None, batch=20, keys_each=5))
    for h, host in enumerate(hosts):
        layers = {slot: Dropout(p, channels=False) for slot in slots}
        for slot, layer in layers.items():
            layer.draws = Draws(moment, host[None], slot)
        wanted = sum(torch.stack([layers[slot](batch).sum(0) for slot in slots]) for batch in x.split(20))
        torch.testing.assert_close(sums[h], wanted, rtol=0.0, atol=1e-12)


def test_a_pass_with_too_few_keys_does_not_run():
    low = Lowering(trainable=False, constants=Constants(0))
    value = low.make(6)
    low.emit(Operation.LOAD, Place(NUM_WORKING, 0, 6), value.rows, sizes=(6,))
    dropout(low, value, 0.5, False)
    work, spaces, keys = Workload.of_each([low.program()]), Spaces(1, KEYS + 1), torch.zeros(1, 2, dtype=torch.int64)
    spaces.rows(KEYS, keys)
    examples = Examples(torch.zeros(50, 6), torch.zeros(50, dtype=torch.int64), None, batch=20, keys_each=1)
    with pytest.raises(IndexError, match="DROP"):
        Machine().run_batches(work, spaces, examples)


# -- whole networks ----------------------------------------------------------------------------------------------------


class MultiheadSelfAttention(nn.Module):
    """`nn.MultiheadAttention` of features to themselves; what it returns goes through `after`."""

    def __init__(
        self, after: Any = lambda found: found[0], first: bool = True, given: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=first, **(given or {}))
        self.after, self.first, self.options = after, first, options

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        y = self.after(self.attention(x, x, x, **self.options))
        return y if self.first else y.transpose(0, 1)


class Padded(nn.Module):
    """Attention to the tokens that are not padding, of learned queries or of the tokens themselves."""

    def __init__(self, queries: int, need_weights: bool) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(11, WIDTH), nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.queries = nn.Parameter(torch.ones(1, queries, WIDTH)) if queries else None
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        q = h if self.queries is None else self.queries.expand(len(x), -1, -1)
        return self.attention(q, h, h, key_padding_mask=x == 0, need_weights=self.need_weights)[0]


class Explicit(nn.Module):
    """Attention whose causal mask is a buffer of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(9, 9).tril().view(1, 1, 9, 9))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).split(WIDTH, dim=2))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(self.mask[:, :, :TOKENS, :TOKENS] == 0, -math.inf)
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(x.shape))


def host_of(p: float) -> nn.Module:
    spec = TransformerHostSpec(vocabulary=11, width=12, heads=3, layers=2, segments=2, context=9, dropout=p)
    return spec.build(["r0c0", "r0c1"], tokens(1))


PADDED = tokens(20).where(torch.arange(TOKENS) > 0, 3)
MODULES = [
    *((blueprint.build(WIDTH), features(20)) for blueprint in TRANSFORMER_BLUEPRINTS),
    *((SelfAttention(8, 2, dropout=0.2), features(20, length, 8)) for length in (7, 32, 37, 70)),
    *((host_of(p), tokens(20)) for p in (0.0, 0.1)),
    *((Padded(queries, weights), PADDED) for queries in (0, 4) for weights in (True, False)),
    *(
        (nn.TransformerEncoderLayer(WIDTH, 3, 16, dropout=p, batch_first=True, norm_first=first), features(20))
        for p in (0.0, 0.2)
        for first in (True, False)
    ),
    *((module, features(20)) for module in (
        GateNetwork(WIDTH), Explicit(),
        MultiheadSelfAttention(need_weights=False),
        MultiheadSelfAttention(),
        MultiheadSelfAttention(lambda found: found[1]),
        MultiheadSelfAttention(lambda found: found[1], average_attn_weights=False),
        MultiheadSelfAttention(need_weights=False, attn_mask=LATER, is_causal=True),
        MultiheadSelfAttention(attn_mask=LATER),
        MultiheadSelfAttention(first=False, need_weights=False),
        MultiheadSelfAttention(given={"add_bias_kv": True}),
        MultiheadSelfAttention(given={"dropout": 0.2}),
        MultiheadSelfAttention(given={"dropout": 0.2}, first=False),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("module", "x"), MODULES)
def test_a_module_agrees_with_pytorch(module, x):
    module = with_keyed_dropout(module)
    assert disagreement(module, x, chunk=16) is None
    if isinstance(module, SelfAttention | TransformerHost):
        assert single(module, x, chunk=16) is None


class Narrow(nn.Module):
    """Batch normalization of what hardly differs, which makes the rounding of float32 large."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.norm, self.convert = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), convert

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.one(self.convert(x) / 1000))


def test_a_module_that_converts_to_float32_is_compared_in_double_precision():
    assert disagreement(GateNetwork(64, causal=True), torch.randn(1, 64, 64)) is None
    assert disagreement(Narrow(lambda x: x.float()), torch.randn(9, WIDTH)) is None
    assert disagreement(Narrow(lambda x: x.float()), torch.arange(9 * WIDTH).view(9, WIDTH)) is None
    with pytest.raises(NoRuleError, match=r"a conversion to torch\.float16"):
        disagreement(Narrow(lambda x: x.half().float()), torch.randn(9, WIDTH))
