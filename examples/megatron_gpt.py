# SPDX-License-Identifier: Apache-2.0
"""Train Megatron-core's GPT on Python's manual: Megatron splits, schedules and steps, accel feeds, saves and resumes.

    accel launch --nproc-per-node 2 examples/megatron_gpt.py --tp 2
    accel launch --nproc-per-node 2 examples/megatron_gpt.py --pp 2 --out runs/gpt
    accel launch --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --distributed-optimizer --out runs/gpt

Run again with the same `--out`, it resumes from the newest checkpoint, with any parallel sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.data import DataLoader

import accel
from accel.engines.megatron import megatron_items, megatron_mesh

BYTES = 256  # a token is a byte
LENGTH = 64


def make(*, dropout: float, lr: float, sharded: bool) -> tuple[Any, Any]:
    """Return this rank's part of the model, in Megatron's DDP, and its optimizer."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,  # the same weights at any sizes
        attention_dropout=dropout,
        hidden_dropout=dropout,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=BYTES,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if torch.cuda.is_available():
        model = model.cuda()
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model)
    rates = OptimizerConfig(optimizer="adam", lr=lr, clip_grad=1.0, use_distributed_optimizer=sharded)
    config.finalize_model_grads_func = finalize_model_grads
    return ddp, get_megatron_optimizer(rates, [ddp])


def micro_batches(batch: Tensor, count: int) -> Iterator[Tensor]:
    """Yield a batch in equal parts."""
    yield from batch.chunk(count)


def forward(parts: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """Compute a micro-batch; Megatron's schedules call this."""
    tokens = next(parts)
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    unseen = torch.ones(1, 1, LENGTH, LENGTH, device=tokens.device).tril() < 0.5
    labels = tokens.roll(-1, 1)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses[:, :-1].float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

    return model(tokens, positions, unseen, labels=labels), mean


def train(ctx: accel.DistContext, given: argparse.Namespace) -> tuple[Any, Any]:
    """Train until so many steps of one epoch have been taken in all; return the model and its optimizer."""
    model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model, optimizer = make(dropout=given.dropout, lr=given.lr, sharded=given.distributed_optimizer)
    text = DataLoader(load_text(), given.batch, shuffle=True, drop_last=True)
    loader = accel.prepare_loader(ctx, text, global_batch=given.batch)
    items = megatron_items(ctx, model, optimizer)
    state = accel.train_state(ctx, seed=0)
    if given.out:
        state = accel.resume(ctx, given.out, items, state)
    schedule = get_forward_backward_func()
    for step, batch in enumerate(accel.batches(ctx, loader, state), state.cursor.consumed // given.batch + 1):
        if step > given.steps:
            break
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward,
            data_iterator=micro_batches(batch.data, given.micro_batches),
            model=[model],
            num_microbatches=given.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=len(batch.data) // given.micro_batches,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        mine = torch.tensor([sum(float(each["loss"]) for each in losses), float(len(losses))], device=ctx.device)
        total = accel.reduce(ctx, mine)  # only the last stage has losses
        accel.print(ctx, f"step {step:4}  loss {float(total[0] / total[1]):.4f}  norm {float(norm):.3f}", flush=True)
        if given.out and step % given.save_every == 0:
            state = state.at(batch.next)
            accel.save_state(ctx, given.out, {**items, "state": state}, step=step, keep=2)
    return model, optimizer


def load_text() -> Tensor:
    """Return Python's manual as sequences of bytes, int64 of shape [sequences, LENGTH]."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages of layers")
    parser.add_argument("--distributed-optimizer", action="store_true", help="divide the optimizer's state")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps, of earlier runs too")
    parser.add_argument("--batch", type=int, default=32, help="sequences of one step, all processes together")
    parser.add_argument("--micro-batches", type=int, default=2, help="parts of a rank's batch")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention and hidden layers")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--out", help="folder of the checkpoints; none for no checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    return parser.parse_args(words)


def main(ctx: accel.DistContext, given: argparse.Namespace) -> tuple[accel.DistContext, Any, Any]:
    """Initialize Megatron's parallel state on the context's ranks, and train."""
    if not dist.is_initialized():  # one process has no group, and Megatron asks for one
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(given.tp, given.pp)
    ctx = accel.replace(ctx, mesh=megatron_mesh(ctx.device.type))
    return ctx, *train(ctx, given)


if __name__ == "__main__":
    with accel.session() as ctx:
        main(ctx, arguments())
        parallel_state.destroy_model_parallel()
