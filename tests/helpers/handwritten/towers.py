# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806
"""Models of several inputs: two towers, latents, tables of clicks and graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import LENGTH, WIDTH, WORDS, Batch, Handwritten, cross_entropy, entry, ids, images, noise
from .encoders import BertLayer


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(WORDS, WIDTH)
        self.positional_embedding = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.resblocks = nn.ModuleList([BertLayer() for _ in range(depth)])
        self.ln_final = nn.LayerNorm(WIDTH)
        self.text_projection = nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH, 8))

    def forward(self, text: Tensor) -> Tensor:
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        mask = torch.zeros((), device=x.device, dtype=x.dtype)
        for block in self.resblocks:
            x = block(x, mask)
        return self.ln_final(x)[:, -1] @ self.text_projection


class ImageTower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4, bias=False)
        self.class_embedding = nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(WIDTH**-0.5 * torch.randn(5, WIDTH))
        self.resblocks = nn.ModuleList([BertLayer() for _ in range(depth)])
        self.ln_post, self.proj = nn.LayerNorm(WIDTH), nn.Parameter(WIDTH**-0.5 * torch.randn(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).permute(0, 2, 1)
        cls = self.class_embedding + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([cls, x], dim=1) + self.positional_embedding
        for block in self.resblocks:
            x = block(x, torch.zeros((), device=x.device, dtype=x.dtype))
        return self.ln_post(x[:, 0]) @ self.proj


class CLIP(nn.Module):
    """Two towers, and a contrastive loss of the batch that the model computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = ImageTower(2), Tower(2)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        labels = torch.arange(len(image), device=image.device)
        loss = (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.t(), labels)) / 2
        return {"loss": loss, "image_features": image_features}


class Towers(nn.Module):
    """Two towers of one input each; the second one depends on nothing of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = Tower(2), Tower(2)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return (self.query(query) * self.document(document)).sum(-1)


class PerceiverLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_context = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        context = self.norm_context(context)
        latents = latents + self.cross(self.norm(latents), context, context, need_weights=False)[0]
        return latents + self.ff(latents)


class Perceiver(nn.Module):
    """Latents are a parameter; every layer reads the inputs again."""

    def __init__(self) -> None:
        super().__init__()
        self.input_proj = nn.Linear(5, WIDTH)
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.layers = nn.ModuleList([PerceiverLayer() for _ in range(4)])
        self.to_logits = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, data: Tensor) -> Tensor:
        context = self.input_proj(data)
        x = self.latents.unsqueeze(0).repeat(len(data), 1, 1)
        for layer in self.layers:
            x = layer(x, context)
        return self.to_logits(x.mean(dim=1))


class DLRM(nn.Module):
    """Tables of embedding bags, an MLP of dense features, and products of all pairs."""

    def __init__(self, tables: int = 3) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(WORDS, 8, mode="sum") for _ in range(tables)])
        self.bot_l = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top_l = nn.Sequential(nn.Linear(8 + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        li, lj = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.li, self.lj = li.tolist(), lj.tolist()

    def forward(self, dense_x: Tensor, sparse_x: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [table(sparse_x[:, i]) for i, table in enumerate(self.emb_l)]
        T = torch.stack([x, *ly], dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        R = torch.cat([x, Z[:, self.li, self.lj]], dim=1)
        return self.top_l(R).squeeze(1)


class GNNLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = F.relu(self.message(torch.cat([h[source], h[target]], dim=-1)))
        collected = torch.zeros_like(h).index_add(0, target, messages)
        return self.update(collected, h)


class GNN(nn.Module):
    """Graphs of a batch are one graph with shifted nodes; messages are added at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, WIDTH)
        self.convs = nn.ModuleList([GNNLayer() for _ in range(4)])
        self.readout = nn.Linear(WIDTH, WORDS)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        b, n, _ = nodes.shape
        shifted = edges + n * torch.arange(b, device=edges.device)[:, None, None]
        source, target = shifted.flatten(0, 1).unbind(-1)
        h = self.encode(nodes.flatten(0, 1))
        for conv in self.convs:
            h = conv(h, source, target)
        graph = torch.arange(b, device=nodes.device).repeat_interleave(n)
        pooled = torch.zeros(b, h.shape[1], dtype=h.dtype, device=h.device).index_add(0, graph, h)
        return self.readout(pooled / n)


def _image_and_text(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = ids(generator, rows, length)
    return Batch((images(generator, rows, length).inputs, drawn.inputs), drawn.targets)


def _two_texts(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = ids(generator, rows, length)
    return Batch({"query": drawn.inputs, "document": ids(generator, rows, length).inputs}, drawn.targets)


def _features(generator: torch.Generator, rows: int, length: int) -> Batch:
    return Batch(noise(generator, rows, length, 5), torch.randint(WORDS, (rows,), generator=generator))


def _clicks(generator: torch.Generator, rows: int, _length: int) -> Batch:
    sparse = torch.randint(WORDS, (rows, 3, 2), generator=generator)
    return Batch((noise(generator, rows, 5), sparse), torch.randint(2, (rows,), generator=generator))


def _graphs(generator: torch.Generator, rows: int, length: int) -> Batch:
    edges = torch.randint(length, (rows, 2 * length, 2), generator=generator)
    return Batch((noise(generator, rows, length, 5), edges), torch.randint(WORDS, (rows,), generator=generator))


TOWERS: tuple[Handwritten, ...] = (
    entry("clip", CLIP, _image_and_text, tags="free rows"),
    entry("towers", Towers, _two_texts, tags="free"),
    entry("perceiver", Perceiver, _features, cross_entropy, "free"),
    entry("dlrm", DLRM, _clicks),
    entry("gnn", GNN, _graphs, cross_entropy),
)
