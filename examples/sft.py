# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a small Llama on chats (SFT): a chat template with a mask of the assistant's tokens, and packed rows.

    accel launch --nproc-per-node 2 examples/sft.py

Chats of several turns go through a tokenizer's template, which marks the tokens of answers; others are not trained on.
Rows of one length hold several chats, and every answered token weighs the same on any number of processes. `--lora`
trains adapters of peft in place of all weights. A run resumes in the middle of the packed stream. Needs transformers,
and peft for `--lora`.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import accel
from accel import post_training

LENGTH = 128  # tokens of a packed row
ROLES = ["<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for turn in messages %}{{ '<|' + turn['role'] + '|>' }}{% if turn['role'] == 'assistant' %}"
    "{% generation %}{{ turn['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ turn['content'] }}{% endif %}"
    "{% endfor %}"
)


def make_chats(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return chats of two questions: to sort some letters, then to turn them around."""
    draw = random.Random(seed)
    chats: list[list[dict[str, str]]] = []
    for _ in range(count):
        letters = draw.sample("abcdefgh", draw.randint(2, 6))
        rising = sorted(letters)
        turns = [("sort " + "".join(letters), "".join(rising)), ("reverse", "".join(rising[::-1]))]
        chats.append(
            [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
        )
    return chats


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and roles; `AutoTokenizer.from_pretrained` loads a trained model's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _ = tokenizer.add_special_tokens(ROLES)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def make_rows(tokenizer: PreTrainedTokenizerFast, chats: list[list[dict[str, str]]]) -> list[post_training.TokenRow]:
    """Return the tokens of chats, with weight 1 for tokens of answers."""
    rows: list[post_training.TokenRow] = []
    for chat in chats:
        found: Any = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        rows.append(post_training.TokenRow(found["input_ids"], found["assistant_masks"]))
    return rows


def make_model(width: int, words: int, *, lora: bool) -> nn.Module:
    """Return a Llama of two layers, with adapters if wanted."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def token_loss(
    ctx: accel.DistContext, model: nn.Module, data: post_training.PackedTokens, real: Tensor
) -> tuple[post_training.LossSum, Tensor]:
    """Return the loss of answered tokens, and the share of them that the model finds most probable."""
    logits = model(input_ids=data.ids, position_ids=data.position_ids).logits
    logprobs = post_training.token_logprobs(ctx, logits, data.targets)
    weights = data.loss_weights * real[:, None]  # placeholder rows count for nothing
    right = (logits.argmax(-1) == data.targets).float()
    return post_training.weighted_sum(ctx, -logprobs, weights), post_training.weighted_sum(ctx, right, weights).mean


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str, lora: bool = False) -> None:
    """Train for so many optimizer steps; the loss is in nats a token."""
    tokenizer = make_tokenizer()
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = make_model(size, len(tokenizer), lora=lora)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=4e-3)
    schedule = accel.schedules.Joined((accel.schedules.warmup(10), accel.schedules.Cosine(steps)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    packed = post_training.pack(make_rows(tokenizer, make_chats(1500, seed=0)), LENGTH, lookahead=64, seed=0)
    loader = accel.prepare_loader(ctx, DataLoader(packed), stream="dispatch", global_batch=16)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)
    to = [accel.trackers.jsonl(), accel.trackers.console(formats={"sft/right": ".1%"})]
    with accel.tracking(ctx, "sft", to=to, dir=out) as trackers:
        items = {"model": accel.items.TrainableOnly(model) if lora else model, "optimizer": optimizer}
        items |= {"scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean", **{"sft/right": "mean"}), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state = state.next(batch)
            with accel.accumulate(ctx, state, model):
                with accel.autocast(ctx):
                    loss, right = token_loss(ctx, model, batch.data, batch.mask.to(ctx.device))
                state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
            state = accel.optimizer_step(ctx, optimizer, state, scheduler=scheduler, max_norm=1.0)
            metrics = metrics.add(loss.weight, loss=loss.mean, **{"sft/right": right})
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--lora", action="store_true", help="train only adapters")
    parser.add_argument("--out", default="runs/sft", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
