# SPDX-License-Identifier: Apache-2.0
"""Learn to count only from rewards (GRPO): groups of samples, a verifiable reward, and a server of samples if wanted.

    accel launch --nproc-per-node 2 examples/grpo.py

A prompt is a digit, and the reward of an answer is the share of its tokens that count on from there. Helper processes
compute rewards within a time limit. Training uses samples that the weights before the last update drew, so that a
server can draw the next ones meanwhile. Samples and curves are the same on any number of processes, and a resumed run
has the same bits. Needs transformers. A server of samples runs in another process:

    python examples/grpo.py --serve 8000    # then train with --server http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import accel
from accel import post_training
from accel.seeding import Key

GO, END, LENGTH = 10, 11, 4  # tokens behind the digits, and tokens of a right answer
PROMPTS, SAMPLES, WIDTH = 16, 8, 8  # prompts of a step, samples of a prompt, tokens of a row
LIMIT_S = 60.0  # for the rewards of a step
TOKEN = "grpo"  # of the server, which other machines do not reach
MEANS = {"loss": "mean", "rollout/kl": "mean", "rollout/clipped": "mean", "rollout/mismatch": "mean"}


def reward(prompt: list[int], answer: list[int]) -> float:
    """Return the share of right tokens: the digits that follow, and the end."""
    right = [*((prompt[0] + each) % 10 for each in range(1, LENGTH)), END]
    return sum(one == other for one, other in zip(right, answer, strict=False)) / max(len(right), len(answer))


def score(samples: post_training.Samples) -> Tensor:
    """Return the reward of each sample, 0 if its function fails or takes too long."""
    bounds = zip(samples.ids, samples.prompt_lengths, samples.lengths, strict=True)
    texts = [(ids[:start].tolist(), ids[start:end].tolist()) for ids, start, end in bounds]
    found, deadline = torch.zeros(len(texts), dtype=torch.float64), time.monotonic() + LIMIT_S
    with multiprocessing.get_context("fork").Pool(2) as pool:  # the end of the block kills helpers that hang
        jobs = [pool.apply_async(reward, text) for text in texts]
        for at, job in enumerate(jobs):
            try:
                found[at] = job.get(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # of the reward function, or TimeoutError
                print(f"no reward for {texts[at]}: {error!r}")
    return found


def make_model(ctx: accel.DistContext, size: int) -> nn.Module:
    """Return a Llama of two layers, in float64 so that any number of processes draws the same tokens."""
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2, "num_attention_heads": 4}
    with accel.seeding.seeded(ctx, 0):
        return LlamaForCausalLM(LlamaConfig(vocab_size=12, max_position_embeddings=32, **sizes)).double()


def group_loss(
    ctx: accel.DistContext, model: nn.Module, groups: Sequence[post_training.RolloutGroup]
) -> tuple[post_training.PolicyLoss, Tensor]:
    """Return the loss of groups, and the mean change of their log-probabilities since they were drawn."""
    samples = post_training.join_samples([each.samples for each in groups], width=WIDTH)
    rewards = torch.cat([each.rewards for each in groups])
    gains = post_training.group_advantages(ctx, rewards, SAMPLES)
    ids, mask, drawn, gains = (each.to(ctx.device) for each in (samples.ids, samples.mask, samples.logprobs, gains))
    new = post_training.token_logprobs(ctx, model(input_ids=ids[:, :-1]).logits, ids[:, 1:])
    loss = post_training.policy_loss(ctx, new, drawn[:, 1:], gains, mask[:, 1:])
    return loss, ((new.detach() - drawn[:, 1:]).abs() * mask[:, 1:]).sum() / loss.tokens


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str, server: str = "") -> None:
    """Train for so many optimizer steps; `rollout/reward` is 1 if every answer is right."""
    model = make_model(ctx, size)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0))
    remote = post_training.servers.http(server, token=TOKEN) if server else None
    drawing = remote or post_training.servers.local(model)  # the model in training needs no other weights
    version = post_training.Version(accel.gather_object(ctx, secrets.token_hex(4))[0], -1)  # a session for each start
    (place, places), every = ctx.data_parallel, max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every, names=("loss", "rollout/reward", "rollout/kl"))]
    with accel.tracking(ctx, "grpo", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.train_state(ctx, seed=0, accumulation=1)
        buffer = post_training.RolloutBuffer(PROMPTS, max_staleness=1)
        if accel.latest_checkpoint(out) is not None:
            loaded = accel.load_state(ctx, out, items | {"state": state, "buffer": buffer})
            state, buffer = loaded["state"], loaded["buffer"].resumed()
        while state.updates < steps:
            began = time.monotonic()
            if remote is not None and version.number < state.updates:
                version = post_training.Version(version.session, state.updates)
                post_training.publish(ctx, remote if ctx.is_main_process else None, model, version=version)
            buffer, numbers = buffer.start(state.updates)
            prompts = {number: [number % 10, GO] for number in numbers[place::places]}
            options = {"n": SAMPLES, "max_new_tokens": WIDTH - 2, "stop": END, "version": version if remote else None}
            later = post_training.sample_later(ctx, drawing, prompts, key=Key(0), **options)
            sampling_s = time.monotonic() - began
            buffer, batch = buffer.take(state.updates)
            began, values = time.monotonic(), dict[str, float | Tensor]()
            if batch:  # not yet in the first pass
                state = state.next()
                with accel.accumulate(ctx, state, model):
                    loss, change = group_loss(ctx, model, [each.group for each in batch[place::places]])
                    state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
                means = {"rollout/kl": loss.kl, "rollout/clipped": loss.clipped, "rollout/mismatch": change}
                metrics = accel.metrics.running_metrics(**MEANS).add(loss.tokens, loss=loss.mean.detach(), **means)
                values |= metrics.read(ctx)[0]
            training_s, began = time.monotonic() - began, time.monotonic()
            samples = later.result()
            mine = post_training.group_samples(samples, score(samples))
            groups = {prompt: group for part in accel.gather_object(ctx, mine) for prompt, group in part.items()}
            buffer = buffer.put(groups)
            if batch:
                new = sum(int(each.samples.mask.sum()) for each in groups.values())
                rates = {"sampled_per_s": new / (sampling_s + time.monotonic() - began)}
                drawn = post_training.join_samples([each.group.samples for each in batch])
                rates["trained_per_s"] = int(drawn.mask.sum()) / training_s
                rewards = torch.cat([each.group.rewards for each in batch])
                values |= {"rollout/reward": rewards.mean(), "rollout/length": drawn.mask.sum(1).double().mean()}
                accel.log(ctx, trackers, {**values, "time": rates}, step=state.updates)
                if state.updates % every == 0 or state.updates == steps:
                    rows = zip(map(str, drawn.ids[:SAMPLES].tolist()), rewards[:SAMPLES].tolist(), strict=True)
                    options = {"columns": ("tokens", "reward"), "step": state.updates}
                    accel.trackers.log_table(ctx, trackers, "rollout/samples", rows=rows, **options)
                    accel.save_state(ctx, out, items | {"state": state, "buffer": buffer}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--size", type=int, default=32, help="width of the model")
    parser.add_argument("--out", default="runs/grpo", help="folder of checkpoints and metrics")
    parser.add_argument("--server", default="", help="address of a server of samples")
    parser.add_argument("--serve", type=int, default=0, help="be that server, at this port")
    flags = vars(parser.parse_args())
    with accel.session() as context:
        if port := flags.pop("serve"):
            local = post_training.servers.local(make_model(context, flags["size"]))
            with post_training.servers.serve(context, local, token=TOKEN, port=port) as url:
                print(url, flush=True)
                signal.pause()
        main(context, **flags)
