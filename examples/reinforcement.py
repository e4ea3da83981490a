# SPDX-License-Identifier: Apache-2.0
"""Learn to balance a pole on a cart by policy gradients (REINFORCE), on rollouts that all ranks share.

    python examples/reinforcement.py
    accel launch --nproc-per-node 2 examples/reinforcement.py

An episode is a sample: the dataset is the list of episode numbers, and each number seeds all random draws of its
episode. So the loader divides the episodes among ranks, a resume continues with the next ones, and any number of
processes plays the same episodes. Episodes end when the pole falls. The loss is a mean over moves, and `weight=` is the
number of moves on this rank.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import accel

MOVES = 200  # an episode ends with the fall of the pole, or after so many moves


def push(cart: Tensor, right: Tensor) -> Tensor:
    """Return the next state [n, 4] of carts: place, speed, angle of the pole, its speed. Euler's method, 0.02 s."""
    place, speed, angle, turn = cart.unbind(1)
    force = torch.where(right, 10.0, -10.0)
    pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
    bend = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    drive = pull - 0.05 * bend * angle.cos() / 1.1
    return torch.stack([place + 0.02 * speed, speed + 0.02 * drive, angle + 0.02 * turn, turn + 0.02 * bend], dim=1)


def stands(cart: Tensor) -> Tensor:
    """Return which carts are on the track, with the pole within 12 degrees of upright."""
    return (cart[:, 0].abs() < 2.4) & (cart[:, 2].abs() < 0.21)


@torch.no_grad()
def play(policy: nn.Module, episodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Play episodes side by side; return states [n, moves, 4], choices [n, moves], and which moves were made."""
    sources = [accel.seeding.Key(0).fold_in("episode", each).generator() for each in episodes.tolist()]
    draws = torch.stack([torch.rand(4 + MOVES, generator=source) for source in sources]).to(episodes.device)
    cart, alive = 0.1 * draws[:, :4] - 0.05, torch.ones_like(episodes, dtype=torch.bool)
    carts, choices, made = [], [], []
    for move in range(MOVES):
        right = draws[:, 4 + move] < policy(cart)[:, 0].sigmoid()
        carts, choices, made = [*carts, cart], [*choices, right], [*made, alive]
        cart = torch.where(alive[:, None], push(cart, right), cart)
        alive = alive & stands(cart)
    return torch.stack(carts, 1), torch.stack(choices, 1), torch.stack(made, 1)


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train a policy of `size` hidden units for so many steps, of 32 episodes each."""
    accel.seeding.set_seed(ctx, 0)
    net = nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    loader = accel.prepare_loader(ctx, DataLoader(range(32 * steps), batch_size=32), global_batch=32)
    policy, optimizer = accel.prepare(ctx, net, optimizer)

    every = max(1, steps // 20)
    to = [accel.trackers.jsonl(), accel.trackers.console(every=every)]
    with accel.tracking(ctx, "reinforcement", to=to, config={"size": size}, dir=out) as trackers:
        items = {"policy": policy, "optimizer": optimizer, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        while state.epoch < 1:
            for batch in accel.batches(ctx, loader, state):
                carts, choices, made = play(accel.unwrap_model(policy), batch.data)
                made &= batch.mask.to(made.device)[:, None]  # placeholders make no move that counts
                ahead = remaining(made)
                metrics = accel.metrics.running_metrics(moves="mean", ahead="mean", square="mean")
                metrics = metrics.add(batch.weights, moves=made.sum(1))
                metrics = metrics.add(made.flatten(), ahead=ahead.flatten(), square=ahead.flatten() ** 2)
                values, _ = metrics.read(ctx)  # of all ranks: the baseline is the mean over all moves
                spread = max(values["square"] - values["ahead"] ** 2, 1.0) ** 0.5

                state = state.next(batch)
                with accel.accumulate(ctx, state, policy):
                    logits = policy(carts[made])[:, 0]
                    chosen = nn.functional.logsigmoid(torch.where(choices[made], logits, -logits))
                    loss = -(chosen * (ahead[made] - values["ahead"]) / spread).sum() / max(len(chosen), 1)
                    state = accel.backward(ctx, loss, state, weight=len(chosen))
                state = accel.optimizer_step(ctx, optimizer, state)
                accel.log(ctx, trackers, {"return": values["moves"]}, step=state.updates)
                if state.updates % every == 0 or state.updates == steps:
                    accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


def remaining(made: Tensor, discount: float = 0.98) -> Tensor:
    """Return for each move the discounted number of moves from it to the end of its episode."""
    ahead, result = torch.zeros(len(made), device=made.device), torch.zeros_like(made, dtype=torch.float32)
    for move in reversed(range(made.shape[1])):
        ahead = made[:, move] * (1 + discount * ahead)
        result[:, move] = ahead
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--size", type=int, default=32, help="hidden units of the policy")
    parser.add_argument("--out", default="runs/reinforcement", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
