# SPDX-License-Identifier: Apache-2.0
"""A small language model whose one loop runs on every mesh, and what it ends with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel
from accel.tensors import full_tensor

WIDTH = 16
WORDS = 24
LENGTH = 8

# Styles by pattern for `LanguageModel`, whose head gives each rank the logits of its own words.
STYLES: Any = {
    "embed.tokens": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise",
}
EXPERT_STYLES: Any = {path.replace("*.mlp", "0.mlp"): style for path, style in STYLES.items()}


class Embed(nn.Module):
    """Vectors of tokens and of their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(position_ids)


class Attention(nn.Module):
    """Causal attention over positions that ranks may share; as many heads as the projections give this rank."""

    def __init__(self, ctx: accel.DistContext, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.ctx = ctx
        self.head_dim = WIDTH // heads
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.v = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(accel.parallel.context_attention(self.ctx, q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers around a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Layers, stacked, of which each token takes some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, WIDTH, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _ = nn.init.normal_(self.weight, std=0.25)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        every = torch.einsum("eij,nj->nei", self.weight, tokens).tanh()
        chosen = torch.zeros(len(tokens), len(self.weight), dtype=weights.dtype)
        return (every * chosen.scatter_add(1, indices, weights)[..., None]).sum(1)


class Mixture(nn.Module):
    """Experts behind a router, two for each token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        routing = accel.parallel.route_tokens(self.router(tokens), 2)
        return self.experts(tokens, routing.indices, routing.weights).view_as(x)


class Block(nn.Module):
    """Attention and a multilayer perceptron or a mixture of experts, each behind a norm and beside a residual."""

    def __init__(self, ctx: accel.DistContext, kv_heads: int, experts: int = 0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(ctx, 4, kv_heads)
        self.mlp = Mixture(experts) if experts else Mlp()
        self.gain = nn.Parameter(torch.ones(()))
        self.spare: nn.Module | None = None
        self.uses_spare = False

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.attention(self.norms[0](x))
        if self.spare is not None and self.uses_spare:
            x = x + self.spare(x)
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Predicts each next token. Of two blocks the second may have experts, and the first a spare layer."""

    def __init__(
        self,
        ctx: accel.DistContext,
        *,
        depth: int = 2,
        kv_heads: int = 4,
        tied: bool = False,
        experts: int = 0,
        unused: bool = False,
    ) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block(ctx, kv_heads, experts * (at % 2)) for at in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight
        if unused:
            self.blocks[0].spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(ids, position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def plan_of(experts: int = 0, **fields: Any) -> accel.parallel.Plan:
    """The plan of a model with so many experts in its second block, or with none."""
    if experts:
        return accel.parallel.Plan(tensor=EXPERT_STYLES, experts={"blocks.1.mlp.experts": "dispatch"}, **fields)
    return accel.parallel.Plan(tensor=STYLES, **fields)


class Run(NamedTuple):
    """Parameters that this rank has a part of, whole and by name; norms of gradients and mean losses, by step."""

    parameters: dict[str, Tensor]
    norms: list[float]
    losses: list[float]


def rows(number: int = 10) -> Tensor:
    """Sequences of tokens."""
    return torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(0))


# Sensitive to the scale of gradients, and quick to dispatch on the many meshes of these tests.
STEEPEST: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.5)
# Moves a parameter by a gradient of zeros, and not without one.
HEAVY: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)


def make_objects(
    ctx: accel.DistContext,
    *,
    frozen: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = STEEPEST,
    of_model: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A model in float64, the same on all ranks of any number, and its optimizer, of its parameters or of it."""
    with accel.seeding.seeded(ctx, 0):
        model = LanguageModel(ctx, **options).double()
    if frozen:
        model.blocks[0].mlp.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, optimizer(trained) if of_model is None else of_model(model)


def forward_backward(
    ctx: accel.DistContext, model: nn.Module, state: accel.TrainState, *, ids: Tensor, labels: Tensor
) -> tuple[Tensor, accel.TrainState]:
    """Return the mean loss of a batch of sequences by tokens that count, and the next state."""
    part = accel.parallel.split_sequence(ctx, {"ids": ids, "labels": labels})
    wanted = part.pop("labels")
    return accel.forward_backward(
        ctx,
        model,
        state,
        part,
        targets=wanted,
        loss_fn=lambda logits, targets: accel.parallel.vocab_cross_entropy(
            ctx, logits.flatten(0, 1), targets.flatten()
        ),
        weight=(wanted != -100).sum(),
    )


def _use_spare(model: nn.Module, used: bool) -> None:
    for each in model.modules():
        if isinstance(each, Block):
            each.uses_spare = used


def train(
    ctx: accel.DistContext,
    mesh: str,
    *,
    strategy: Any = "ddp",
    accumulation: int = 1,
    epochs: int = 1,
    plan: accel.parallel.Plan | None = None,
    **options: Any,
) -> Run:
    """Train on batches of 4 sequences, the last of 2; some tokens do not count. Spare layers take part in step 0."""
    ctx = accel.replace(ctx, mesh=mesh, strategy=strategy)
    model, optimizer = make_objects(ctx, **options)
    loader = accel.prepare_loader(ctx, DataLoader(rows(), batch_size=4), global_batch=4)
    plan = plan or plan_of(options.get("experts", 0))
    if options.get("unused"):
        model = accel.prepare_model(ctx, model, plan=plan, find_unused_parameters=True)
        optimizer = accel.prepare(ctx, HEAVY([each for each in model.parameters() if each.requires_grad]))
    else:
        model, optimizer = accel.prepare(ctx, model, optimizer, plan=plan)
    state = accel.train_state(ctx, accumulation=accumulation)
    norms: list[float] = []
    losses: list[float] = []
    while state.epoch < epochs:
        for batch in accel.batches(ctx, loader, state):
            state = state.next(batch)
            _use_spare(model, state.updates == 0)
            labels = batch.data.masked_fill(batch.data == 3, -100)
            labels[int(batch.valid) :] = -100  # stand-ins
            loss, state = forward_backward(ctx, model, state, ids=batch.data, labels=labels)
            losses.append(loss.item())
            if state.sync:
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=0.5)
                norms.append(float(state.grad_norm))
    held = accel.unwrap_model(model).named_parameters(remove_duplicate=False)
    return Run({name: full_tensor(each) for name, each in held}, norms, losses)
