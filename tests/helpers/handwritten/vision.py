# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806
"""Models of images in the manner of their repositories."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ._entry import WIDTH, WORDS, Batch, Handwritten, cross_entropy, entry, images


class Attention(nn.Module):
    """timm's manner: one projection to three tensors of heads."""

    def __init__(self, dim: int, num_heads: int = 4, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        if bias is not None:
            attn = attn + bias
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class ViTBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.ls1 = nn.Parameter(torch.full((dim,), 0.5))
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1 * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A class token and positions as parameters, a convolution for patches."""

    def __init__(self, dim: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.ModuleList([ViTBlock(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, WORDS)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


def window_partition(x: Tensor, window: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // window, window, W // window, window, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window * window, C)


def window_reverse(windows: Tensor, window: int, H: int, W: int) -> Tensor:
    B = int(windows.shape[0] / (H * W / window / window))
    x = windows.view(B, H // window, W // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinBlock(nn.Module):
    """Attention within windows, with a table of relative positions; every other block shifts the windows."""

    def __init__(self, dim: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 24)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, 4))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("relative_position_index", relative[..., 0] * (2 * window - 1) + relative[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        shortcut, x = x, self.norm1(x)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        n = self.window * self.window
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        windows = self.attn(window_partition(x, self.window), bias.permute(2, 0, 1).contiguous().unsqueeze(0))
        x = window_reverse(windows, self.window, H, W)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        x = shortcut + x.view(B, H, W, C)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2, :] for j in range(2) for i in range(2)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Stages of blocks, nested in a ModuleList of Sequentials, with half the places in each."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=2, stride=2)
        self.layers = nn.ModuleList([
            nn.Sequential(SwinBlock(dim, 2, 0), SwinBlock(dim, 2, 1), PatchMerging(dim)),
            nn.Sequential(SwinBlock(2 * dim, 2, 0), SwinBlock(2 * dim, 2, 0)),
        ])  # fmt: skip
        self.norm, self.head = nn.LayerNorm(2 * dim), nn.Linear(2 * dim, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Shifts, scales and gates of a condition."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(dim, 24)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class DiT(nn.Module):
    """Images, times and labels: every block reads the condition."""

    def __init__(self, dim: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.t_embedder = nn.Sequential(nn.Linear(8, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(WORDS, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, 4, dim), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(dim) for _ in range(depth)])
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.final = nn.Linear(dim, 4 * 4 * 3)

    @staticmethod
    def timestep_embedding(t: Tensor, dim: int) -> Tensor:
        half = dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=t.dtype, device=t.device) / half)
        args = t[:, None] * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def unpatchify(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], 2, 2, 4, 4, 3)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 3, 8, 8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(self.timestep_embedding(t, 8)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_modulation(c).chunk(2, dim=1)
        return self.unpatchify(self.final(modulate(F.layer_norm(x, x.shape[-1:]), shift, scale)))


class DoubleConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, *, batch_norm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(out_channels) if batch_norm else nn.GroupNorm(2, out_channels)
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), norm, nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet(nn.Module):
    """Outputs of the way down are joined again on the way up."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4, batch_norm=batch_norm)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8, batch_norm=batch_norm))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 8, batch_norm=batch_norm))
        self.up1 = nn.ConvTranspose2d(8, 8, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(16, 4, batch_norm=batch_norm)
        self.up2 = nn.ConvTranspose2d(4, 4, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(8, 4, batch_norm=batch_norm)
        self.outc = nn.Conv2d(4, 2, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


class MixerBlock(nn.Module):
    """An MLP over places, then one over features."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(dim), Mlp(tokens, 8)
        self.norm2, self.mlp_channels = nn.LayerNorm(dim), Mlp(dim, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


def mlp_mixer(dim: int = WIDTH, depth: int = 4) -> nn.Module:
    """A model that is one Sequential."""
    return nn.Sequential(
        nn.Conv2d(3, dim, 4, stride=4),
        nn.Flatten(2),
        Transpose(),
        *[MixerBlock(4, dim) for _ in range(depth)],
        nn.LayerNorm(dim),
        Mean(),
        nn.Linear(dim, WORDS),
    )


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class VAE(nn.Module):
    """Draws the latents in training; returns the reconstruction and what the loss needs."""

    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(24, latent), nn.Linear(24, latent)
        self.decoder_input = nn.Linear(latent, 24)
        self.decoder = nn.Sequential(nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 192), nn.Sigmoid())

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.fc_mu(h), self.fc_var(h)
        z = self.reparameterize(mu, logvar)
        return self.decoder(self.decoder_input(z)).view_as(x), mu, logvar


class ResBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's manner: layer1 to layer3 are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(ResBlock(8, 8), ResBlock(8, 8))
        self.layer2 = nn.Sequential(ResBlock(8, 12, 2), ResBlock(12, 12))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(12, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _conditioned(generator: torch.Generator, rows: int, length: int) -> Batch:
    drawn = images(generator, rows, length)
    times = torch.rand(rows, generator=generator, dtype=torch.float64)
    return Batch({"x": drawn.inputs, "t": times, "y": drawn.targets}, drawn.targets)


VISION: tuple[Handwritten, ...] = (
    entry("vit", ViT, images, cross_entropy, "free"),
    entry("swin", Swin, images, cross_entropy),
    entry("dit", DiT, _conditioned, tags="free frozen"),
    entry("unet", UNet, images),
    entry("unet_batch_norm", lambda: UNet(batch_norm=True), images, tags="rows batch_norm buffers"),
    entry("mlp_mixer", mlp_mixer, images, cross_entropy),
    entry("vae", VAE, images, tags="random"),
    entry("resnet", ResNet, images, cross_entropy, "rows batch_norm buffers"),
)
