# SPDX-License-Identifier: Apache-2.0
"""Learn to count from rewards alone (GRPO): groups of samples, a verifiable reward, and a server of samples if wanted.

    accel launch --nproc-per-node 2 examples/grpo.py

A prompt is a digit. The reward of an answer is the share of its tokens that count on from there, and it is computed in
helper processes with a time limit. Training takes samples of the weights before (`--lag 1`), so that a server draws
the next ones meanwhile. Samples, curves and a resumed run are the same on any number of processes. Needs transformers.

    python examples/grpo.py --serve 8000    # in a second terminal; then train with --server http://127.0.0.1:8000
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
MEANS = {"rollout/kl": "mean", "rollout/clipped": "mean", "rollout/mismatch": "mean"}  # a group of the report


def make_prompt(number: int) -> list[int]:
    """Return the prompt of a number."""
    return [Key(7).fold_in("prompt", number).integers(1, bits=16)[0] % 10, GO]


def reward(prompt: list[int], answer: list[int]) -> float:
    """Return the share of right tokens: the digits that follow, and the end."""
    right = [*((prompt[0] + each) % 10 for each in range(1, LENGTH)), END]
    return sum(one == other for one, other in zip(right, answer, strict=False)) / max(len(right), len(answer))


def score(samples: post_training.Samples) -> Tensor:
    """Return the reward of each sample, 0 for one that fails or takes too long."""
    texts: list[tuple[list[int], list[int]]] = []
    for ids, start, end in zip(samples.ids, samples.prompt_lengths, samples.lengths, strict=True):
        texts.append((ids[:start].tolist(), ids[start:end].tolist()))
    found, deadline = torch.zeros(len(texts), dtype=torch.float64), time.monotonic() + LIMIT_S
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its end stops those that hang
        jobs = [pool.apply_async(reward, text) for text in texts]
        for at, job in enumerate(jobs):
            try:
                found[at] = job.get(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # of the reward function, or TimeoutError
                print(f"no reward for {texts[at]}: {error!r}")
    return found


def make_model(ctx: accel.DistContext, size: int) -> nn.Module:
    """Return a Llama of two layers in float64, so that any number of processes draws the same tokens."""
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": 2, "num_attention_heads": 4}
    with accel.seeding.seeded(ctx, 0):
        return LlamaForCausalLM(LlamaConfig(vocab_size=12, max_position_embeddings=32, **sizes)).double()


def collect(ctx: accel.DistContext, later: post_training.PendingSamples) -> dict[int, post_training.RolloutGroup]:
    """Return the groups of all processes' prompts, on every process."""
    samples = later.result()
    rewards = score(samples)
    groups = {
        samples.prompts[at]: post_training.RolloutGroup(
            samples.rows(range(at, at + SAMPLES)), rewards[at : at + SAMPLES]
        )
        for at in range(0, len(samples.prompts), SAMPLES)
    }
    return dict(sorted(pair for part in accel.gather_object(ctx, groups) for pair in part.items()))


def group_loss(
    ctx: accel.DistContext, model: nn.Module, groups: Sequence[post_training.RolloutGroup]
) -> tuple[post_training.PolicyLoss, dict[str, Tensor]]:
    """Return the loss of this process's groups, and means over its tokens."""
    samples = post_training.join_samples([each.samples for each in groups], width=WIDTH)
    rewards = torch.cat([each.rewards for each in groups if each.rewards is not None])
    gains = post_training.group_advantages(ctx, rewards, SAMPLES)
    assert samples.logprobs is not None
    ids, mask, drawn, gains = (each.to(ctx.device) for each in (samples.ids, samples.mask, samples.logprobs, gains))
    new = post_training.token_logprobs(ctx, model(input_ids=ids[:, :-1]).logits, ids[:, 1:])
    mask, drawn = mask[:, 1:], drawn[:, 1:]  # the ratio is to the weights that drew, which are older by the lag
    loss = post_training.policy_loss(ctx, new, drawn, gains, mask, reference=drawn)
    mismatch = ((new.detach() - drawn).abs() * mask).sum() / loss.tokens
    return loss, {"rollout/kl": loss.kl, "rollout/clipped": loss.clipped, "rollout/mismatch": mismatch}


def main(
    ctx: accel.DistContext, *, steps: int, size: int, out: str, lag: int = 1, server: str = "", token: str = "grpo"
) -> None:
    """Train for so many optimizer steps; `rollout/reward` is 1 if every answer is right."""
    model = make_model(ctx, size)
    model, optimizer = accel.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0))
    with accel.tracking(ctx, "grpo", to=[accel.trackers.jsonl(), accel.trackers.console()], dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "trackers": trackers}
        state = accel.train_state(ctx, seed=0, accumulation=1)
        buffer = post_training.RolloutBuffer(PROMPTS, max_staleness=lag)
        if accel.latest_checkpoint(out) is not None:
            loaded = accel.load_state(ctx, out, items | {"state": state, "buffer": buffer})
            state, buffer = loaded["state"], loaded["buffer"].resumed()
        remote = post_training.servers.http(server, token=token) if server else None
        drawing = remote or post_training.servers.local(model)  # the live model needs no weights
        session = accel.gather_object(ctx, secrets.token_hex(4))[0]  # of this start: samples of another are stale
        version = post_training.Version(session, -1)
        metrics, (place, places) = accel.metrics.running_metrics(loss="mean", **MEANS), ctx.data_parallel
        tokens, sampling_s, training_s = 0, 0.0, 0.0
        while state.updates < steps:
            if remote is not None and version.number < state.updates:
                version = post_training.Version(session, state.updates)
                _ = post_training.publish(ctx, remote if ctx.is_main_process else None, model, version=version)
            buffer, numbers = buffer.start(state.updates)
            prompts = {number: make_prompt(number) for number in numbers[place::places]}
            began, wanted = time.monotonic(), version if remote else None
            options = {"n": SAMPLES, "key": Key(0), "max_new_tokens": WIDTH - 2, "stop": END, "version": wanted}
            later = post_training.sample_later(ctx, drawing, prompts, **options)
            sampling_s += time.monotonic() - began
            buffer, batch = buffer.take(state.updates)
            if batch:
                began, state = time.monotonic(), state.next()
                with accel.accumulate(ctx, state, model):
                    loss, means = group_loss(ctx, model, [each.group for each in batch[place::places]])
                    state = accel.backward(ctx, loss.mean, state, weight=loss.weight)
                state = accel.optimizer_step(ctx, optimizer, state, max_norm=1.0)
                metrics = metrics.add(loss.tokens, loss=loss.mean.detach(), **means)
                training_s += time.monotonic() - began
            began = time.monotonic()
            groups = collect(ctx, later)
            sampling_s += time.monotonic() - began
            tokens += sum(int(each.samples.mask.sum()) for each in groups.values())
            buffer = buffer.put(groups)
            if batch and (state.updates % max(1, steps // 20) == 0 or state.updates == steps):
                values, metrics = metrics.read(ctx)
                values |= {"rollout/sampled_per_s": tokens / sampling_s, "rollout/trained_per_s": tokens / training_s}
                shown = [each.group for each in batch]
                values["rollout/reward"] = float(torch.cat([each.rewards for each in shown]).mean())
                values["rollout/length"] = sum(int(each.samples.mask.sum()) for each in shown) / PROMPTS / SAMPLES
                rows = zip(map(str, shown[0].samples.ids.tolist()), shown[0].rewards.tolist(), strict=True)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.trackers.log_table(
                    ctx, trackers, "rollout/samples", columns=("tokens", "reward"), rows=rows, step=state.updates
                )
                tokens, sampling_s, training_s = 0, 0.0, 0.0
                accel.save_state(ctx, out, items | {"state": state, "buffer": buffer}, step=state.updates, keep=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--size", type=int, default=32, help="width of the model")
    parser.add_argument("--lag", type=int, default=1, help="updates between the weights that sample and that train")
    parser.add_argument("--server", default="", help="address of a server of samples")
    parser.add_argument("--serve", type=int, default=0, help="be that server, at this port")
    parser.add_argument("--token", default="grpo", help="secret of server and clients")
    parser.add_argument("--out", default="runs/grpo", help="folder of checkpoints and metrics")
    flags = vars(parser.parse_args())
    with accel.session() as context:
        if port := flags.pop("serve"):
            server = post_training.servers.local(make_model(context, flags["size"]))
            with post_training.servers.serve(context, server, token=flags["token"], port=port) as url:
                print(url, flush=True)
                signal.pause()
        main(context, **flags)
