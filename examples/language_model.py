# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on Python's manual, spread over any mesh of processes by `--mesh` alone.

    python examples/language_model.py --model gpt2
    accel launch --nproc-per-node 4 --mesh dp=2,tp=2 examples/language_model.py --model llama
    accel launch --nproc-per-node 2 --mesh pp=2 examples/language_model.py --model transformer

The loss of each step is the same on every mesh. Models but `transformer` are those of Hugging Face's transformers.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel

BYTES = 256  # a token is a byte
LENGTH = 64


def train(ctx: accel.DistContext, name: str, *, steps: int, batch: int, lr: float) -> list[float]:
    """Train for so many steps; return the mean loss of each, in nats a byte."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of ranks
        model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = accel.prepare_loader(ctx, DataLoader(load_text(), batch, shuffle=True), global_batch=batch)
    model, optimizer = accel.prepare(ctx, model, optimizer)
    state = accel.train_state(ctx, seed=0, accumulation=1)
    losses: list[float] = []
    for each in accel.batches(ctx, loader, state):
        state = state.next(each)
        labels = each.data.clone()
        labels[int(each.valid) :] = -100  # stand-ins of a ragged last batch
        part = accel.parallel.split_sequence(ctx, {"input_ids": each.data, "labels": labels})
        targets = part.pop("labels")
        tokens = (targets != -100).sum()
        loss, state = accel.forward_backward(
            ctx, model, state, part, targets=targets, loss_fn=sum_of_losses, weight=tokens
        )
        state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
        both = accel.reduce(ctx, torch.stack([loss * tokens, tokens]))  # over all ranks, each token as often as others
        losses.append(float(both[0] / both[1]))
        accel.print(ctx, f"step {state.updates:4}  loss {losses[-1]:.4f}  norm {state.grad_norm:.3f}", flush=True)
        if state.updates == steps:
            break
    return losses


def sum_of_losses(output: Any, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the tokens that count."""
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def load_text() -> Tensor:
    """Return Python's manual as sequences of bytes, int64 of shape [sequences, LENGTH]."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


class Transformer(nn.Module):
    """A plain torch transformer, which sees no position after its own."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depth))
        self.head = nn.Linear(width, BYTES)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def make_llama() -> nn.Module:
    """Return a Llama with fewer key heads than heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, num_key_value_heads=2, use_cache=False, **sizes))


def make_gpt2() -> nn.Module:
    """Return a GPT-2, whose head has the weights of its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=BYTES, use_cache=False, **sizes, **dropout))


def make_mixtral() -> nn.Module:
    """Return a mixture of four experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=BYTES, use_cache=False, **sizes, **experts))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "llama": make_llama,
    "gpt2": make_gpt2,
    "mixtral": make_mixtral,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="transformer", help="the model to train")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=32, help="sequences of one step, all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    given = parser.parse_args()
    with accel.session() as ctx:
        train(ctx, given.model, steps=given.steps, batch=given.batch, lr=given.lr)
