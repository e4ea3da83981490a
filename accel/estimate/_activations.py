# SPDX-License-Identifier: Apache-2.0
"""Bytes that a transformer's forward keeps for the backward, on one rank of a mesh; pure.

Norms compute in fp32, attention keeps no matrix of weights, and the head's loss is computed in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from accel.estimate._step import Engine, Step, divides_logits, stream_bytes
from accel.estimate._transformer import Transformer
from accel.topology import Axes, Plan

_FP32 = 4


class Kept(NamedTuple):
    """Bytes of a micro-batch.

    Attributes:
        block: of one block.
        entry: of one block that computes again in backward: its input.
        ends: of what stands behind the blocks, without the logits.
        logits: of the logits, until their backward is done.
        peak: further ones while the loss's backward computes.
        inside: further ones while a block's backward computes.
    """

    block: int
    entry: int
    ends: int
    logits: int
    peak: int
    inside: int


def kept_by_block(model: Transformer, axes: Axes, plan: Plan, step: Step, engine: Engine) -> Kept:
    """Return what one micro-batch keeps on a rank.

    Args:
        model: sizes of the model.
        axes: of the mesh.
        plan: options of the spreading.
        step: tokens and formats.
        engine: of data parallelism: `fully_shard` computes with parameters in the compute format, others by autocast.
    """
    tokens = step.rows * step.tokens // axes.cp
    own = tokens // axes.tp if plan.sequence else tokens  # of what lies between products
    size = step.compute_bytes
    stream = stream_bytes(step, engine)
    entry = own * model.width * stream
    norms = _norm(model, own, tokens, stream, size, 3) + _norm(model, own, tokens, stream, size, 2)
    attention = _attention(model, axes, plan, tokens, size)
    block = norms + attention + _mlp(model, axes, tokens, size)
    vocabulary = -(-model.vocabulary // (axes.tp if divides_logits(plan) else 1))
    return Kept(
        block=block,
        entry=entry,
        ends=_norm(model, own, tokens, stream, size, 1),
        logits=tokens * vocabulary * _FP32,
        peak=2 * tokens * vocabulary * _FP32,
        inside=3 * _mlp(model, axes, tokens, size) // 4,
    )


def _norm(model: Transformer, own: int, tokens: int, stream: int, size: int, products: int) -> int:
    """Bytes of a norm: its input and its result in between, and what the products behind it read."""
    between = stream if model.biases else _FP32 + stream  # an RMSNorm keeps both in fp32, and normalised
    casts = products if stream > size else 1  # autocast converts for each product
    return own * model.width * between + tokens * model.width * size * casts


def _attention(model: Transformer, axes: Axes, plan: Plan, tokens: int, size: int) -> int:
    """Bytes of queries, keys, values and outputs, and of the sums of the softmax."""
    heads = model.heads // axes.tp
    keys = max(1, model.kv_heads // axes.tp)
    values = 2 * heads + 2 * keys
    if axes.cp > 1 and plan.context == "heads":
        values = 4 * heads  # keys repeated for the heads that share them
    if axes.cp > 1 and plan.context == "gather":
        # each half of the queries keeps the keys up to its own end; together those of the sequence and half a part
        seen = heads * (2 * axes.cp + 1) if keys < heads else 2 * keys * axes.cp
        values = 2 * heads + seen
    return tokens * (values * model.head_width * size + heads * _FP32)


def _mlp(model: Transformer, axes: Axes, tokens: int, size: int) -> int:
    if not model.experts:
        return tokens * -(-model.inner // axes.tp) * size * (4 if model.gated else 5)
    # ranks along tp that hold all experts compute all tokens; those that send them to others send a part each
    rows = tokens * model.experts_per_token // (axes.tp if axes.ep > 1 else 1)
    return rows * (4 * model.inner + 2 * model.width) * size
