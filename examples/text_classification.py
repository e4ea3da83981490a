# SPDX-License-Identifier: Apache-2.0
"""Tell praise from complaint in made-up reviews, where a "not" turns a word around and a "but" outweighs all before it.

    accel launch --nproc-per-node 2 examples/text_classification.py

Reviews differ in length, so a batch pads them, and the model's mask leaves the padding out. The same command resumes
from the last checkpoint.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import accel

GOOD = ["good", "great", "lovely", "clever", "moving", "bright", "funny", "superb"]
BAD = ["bad", "dull", "awful", "stupid", "boring", "weak", "clumsy", "poor"]
THINGS = ["plot", "cast", "music", "ending", "dialogue", "camera", "story", "hero"]
WORDS = ["<pad>", "<start>", *GOOD, *BAD, *THINGS, *["the", "was", "not", "very", "but", "and"]]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
LONGEST = 40
Review = tuple[str, int]  # its words, and 1 for praise


def make_reviews(count: int, seed: int) -> list[Review]:
    """Return reviews of one to four clauses; the clause after the last "but" decides, else the majority."""
    draw = random.Random(seed)
    reviews: list[Review] = []
    while len(reviews) < count:
        words, votes = ["<start>"], 0
        for clause in range(draw.randint(1, 4)):
            good, denied = draw.random() < 0.5, draw.random() < 0.4
            joint = [] if clause == 0 else [draw.choice(["and", "but"])]
            votes = (0 if joint == ["but"] else votes) + (1 if good != denied else -1)
            how = ["not"] * denied + ["very"] * draw.randint(0, 1)
            words += [*joint, "the", draw.choice(THINGS), "was", *how, draw.choice(GOOD if good else BAD)]
        if votes:  # a draw is neither
            reviews.append((" ".join(words), int(votes > 0)))
    return reviews


def collate(reviews: list[Review]) -> tuple[Tensor, Tensor]:
    """Return the words' numbers, padded to the longest review, and the labels."""
    rows = [torch.tensor([NUMBERS[word] for word in text.split()]) for text, _ in reviews]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([label for _, label in reviews])


class Classifier(nn.Module):
    """A transformer that reads a whole review; the answer is at its first position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(len(WORDS), width), nn.Embedding(LONGEST, width)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        return self.head(self.layers(hidden, src_key_padding_mask=words == 0)[:, 0])


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over reviews, which `train_step` divides by the number over all processes."""
    return cross_entropy(logits, labels, reduction="sum")


def main(ctx: accel.DistContext, *, steps: int, size: int, out: str) -> None:
    """Train for so many optimizer steps, testing and saving twenty times on the way."""
    with accel.seeding.seeded(ctx, 0):  # the first weights are the same on any number of processes
        model = Classifier(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = accel.schedules.Joined((accel.schedules.warmup(10), accel.schedules.Cosine(steps)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    train_set = DataLoader(make_reviews(8000, seed=0), 64, shuffle=True, collate_fn=collate)
    test_set = DataLoader(make_reviews(500, seed=1), 128, collate_fn=collate)
    loader = accel.prepare_loader(ctx, train_set, global_batch=64)
    test_loader = accel.prepare_loader(ctx, test_set)
    model, optimizer, scheduler = accel.prepare(ctx, model, optimizer, scheduler)

    to = [accel.trackers.jsonl(), accel.trackers.console(formats={"accuracy": ".1%"})]
    with accel.tracking(ctx, "text_classification", to=to, dir=out) as trackers:
        items = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trackers": trackers}
        state = accel.resume(ctx, out, items, accel.train_state(ctx, seed=0, accumulation=1))
        metrics, every = accel.metrics.running_metrics(loss="mean"), max(1, steps // 20)
        batches = accel.batches(ctx, loader, state, repeat=True)
        while state.updates < steps:
            batch = next(batches)
            state, loss = accel.train_step(
                ctx, state, batch, model, optimizer, sum_of_losses, scheduler=scheduler, max_norm=1.0
            )
            metrics = metrics.add(batch.weight, loss=loss)
            if state.updates % every == 0 or state.updates == steps:
                values, metrics = metrics.read(ctx)
                values["accuracy"] = accuracy(ctx, model, test_loader)
                accel.log(ctx, trackers, values, step=state.updates)
                accel.save_state(ctx, out, items | {"state": state}, step=state.updates, keep=2)


@torch.no_grad()
def accuracy(ctx: accel.DistContext, model: nn.Module, loader: accel.Loader) -> float:
    """Return the share of right answers, each review counted once on any number of processes."""
    metrics = accel.metrics.running_metrics(accuracy="mean")
    with accel.evaluating(model):
        for batch in accel.batches(ctx, loader):
            words, labels = batch.data
            metrics = metrics.add(batch.weights, accuracy=(model(words).argmax(1) == labels).double())
    return metrics.read(ctx)[0]["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--size", type=int, default=64, help="width of the model")
    parser.add_argument("--out", default="runs/text_classification", help="folder of checkpoints and metrics")
    flags = parser.parse_args()
    with accel.session() as context:
        main(context, **vars(flags))
