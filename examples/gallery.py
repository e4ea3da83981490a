# SPDX-License-Identifier: Apache-2.0
"""Run every recipe in full on two processes, check what each has learned, and write their pages.

    python examples/gallery.py
    python examples/gallery.py text_classification --nproc 1

A recipe whose package is not installed is skipped by name. The exit status is 1 if one failed or learned too little.
`--pages` writes docs/gallery.md and docs/recipes/ without a run.
"""

from __future__ import annotations

import argparse
import ast
import base64
import importlib.util
import json
import operator
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
COMPARE = {">=": operator.ge, "<=": operator.le}
# others are lower case
WORDS = {
    "dpo": "DPO",
    "gan": "GAN",
    "gpt": "GPT",
    "grpo": "GRPO",
    "lm": "LM",
    "lora": "LoRA",
    "sft": "SFT",
    "sgd": "SGD",
}
TINY = "--depth 4 --length 64 --vocabulary 1024"
WIDTH, HEIGHT, MARGIN = 320, 180, 30  # of a curve


class Recipe(msgspec.Struct, frozen=True):
    """An example of `examples/`, its result, and its flags in the tests.

    Attributes:
        name: the script's name, without `.py`.
        learned: a condition on the last row of the full run's metrics, such as `accuracy >= 0.95`.
        small: flags of a run of a second or two.
        full: flags of the full run, if the script's defaults are for accelerators.
        falls: the column of the metrics that falls in a small run; after a minus, one that rises.
        needs: modules of extras.
        metrics: path of the metrics in the run's folder.
    """

    name: str
    learned: str
    small: str
    full: str = ""
    falls: str = "loss"
    needs: tuple[str, ...] = ()
    metrics: str = "metrics.jsonl"

    @property
    def text(self) -> str:
        """The source of the script."""
        return (FOLDER / f"{self.name}.py").read_text()

    @property
    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]


RECIPES: tuple[Recipe, ...] = (
    Recipe("causal_lm", "loss <= 2.6", small="--steps 8 --size 16", needs=("transformers",)),
    Recipe("contrastive", "right >= 0.8", small="--steps 12 --size 8", needs=("sklearn",)),
    Recipe(
        "cross_validation",
        "accuracy >= 0.9",
        small="--steps 12 --size 16",
        needs=("sklearn",),
        metrics="fold-0/metrics.jsonl",
    ),
    Recipe("detection", "f1 >= 0.6", small="--steps 12 --size 8"),
    Recipe("diffusion", "right >= 0.9", small="--steps 12 --size 32", needs=("sklearn",)),
    Recipe("distillation", "accuracy >= 0.9", small="--steps 12 --size 4", needs=("sklearn",)),
    Recipe("dpo", "upwards >= 0.9", small="--steps 16 --size 16"),
    Recipe("early_stopping", "test_loss <= 0.6", small="--steps 12 --size 32", falls="valid_loss", needs=("sklearn",)),
    Recipe("gan", "modes >= 7", small="--steps 12 --size 16", falls="critic_loss"),
    Recipe("generation", "right >= 0.95", small="--steps 12 --size 16"),
    Recipe(
        "gpt",
        "loss <= 4",
        small=f"--steps 8 --size 16 --batch 8 {TINY}",
        full=f"--size 64 --lr 3e-3 --batch 32 {TINY}",
    ),
    Recipe(
        "grpo",
        "rollout/reward >= 0.9",
        small="--steps 16 --size 32",
        falls="-rollout/reward",
        needs=("transformers",),
    ),
    Recipe("images", "accuracy >= 0.95", small="--steps 12 --size 8", needs=("sklearn",)),
    Recipe("local_sgd", "accuracy >= 0.95", small="--steps 32 --size 16", needs=("sklearn",)),
    Recipe("lora", "gain >= 0.2", small="--steps 8 --size 16", needs=("transformers", "peft")),
    Recipe("profiling", "loss <= 1", small="--steps 16 --size 32", needs=("sklearn",)),
    Recipe("reinforcement", "return >= 150", small="--steps 16 --size 16", falls="-return"),
    Recipe("reward_model", "right >= 0.85", small="--steps 16 --size 16"),
    Recipe("schedule_free", "accuracy >= 0.95", small="--steps 12 --size 16", needs=("sklearn", "schedulefree")),
    Recipe("sft", "sft/right >= 0.9", small="--steps 12 --size 16", needs=("transformers", "tokenizers")),
    Recipe("streaming", "loss <= 2.5", small="--steps 12 --size 16"),
    Recipe(
        "sweep",
        "accuracy >= 0.9",
        small="--steps 12 --size 16",
        needs=("sklearn",),
        metrics="adamw-0.01/metrics.jsonl",
    ),
    Recipe("text_classification", "accuracy >= 0.9", small="--steps 12 --size 16"),
)


# Of each recipe: other words that readers search for, and what to change.
CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "causal_lm": (
        "language model, pretraining, packing, token loss",
        (
            "`make_documents`: return your texts as bytes. With a tokenizer, return its ids and set the vocabulary.",
            "`make_model`: return any causal model of transformers. `--mesh` and `--strategy fsdp` at launch shard it.",
            "`pack` fills rows of one length with several documents. Keep it if your documents differ in length.",
        ),
    ),
    "contrastive": (
        "self-supervised, SimCLR, embeddings, metric learning",
        (
            "`Views`: return two augmented views of your image.",
            "`make_encoder`: return your backbone.",
            "`pair_loss`: change the temperature, or use another loss over all pairs.",
        ),
    ),
    "cross_validation": (
        "k-fold, folds",
        (
            "`StratifiedKFold(5)`: change the number of folds.",
            "`train`: put your model and your loss here. It trains one fold and returns its score.",
        ),
    ),
    "detection": (
        "object detection, bounding boxes, variable targets",
        (
            "`Shapes` and `collate`: return your images and one tensor of objects an image.",
            "`loss_sum`: return the sum of the loss over objects. `weight=` is the number of objects.",
        ),
    ),
    "diffusion": (
        "ddpm, ema, exponential moving average, image generation",
        (
            "`Noised`: return your images with a time and the noise.",
            "`Denoiser`: use your network, such as a U-Net.",
            "`accel.training.Ema`: set the decay of the averaged weights.",
        ),
    ),
    "distillation": (
        "teacher, student, knowledge distillation",
        (
            "`make_teacher`: load your trained model.",
            "`make_student`: return the smaller one.",
            "`answer_losses`: change the temperature, or add a loss on labels.",
        ),
    ),
    "dpo": (
        "preference, DPO, IPO, RLHF, TRL, alignment",
        (
            "`make_pairs`: return your prompts with a preferred and a rejected answer.",
            "`BETA`: set the strength of the reference.",
            "`post_training.reference` takes a model with adapters of peft in place of the frozen copy.",
        ),
    ),
    "early_stopping": (
        "early stop, patience, best checkpoint, best model, load best model at end",
        (
            "`patience`: number of evaluations without a better loss before the run stops.",
            '`Keep(newest=1, best=1, by="valid_loss")`: choose another metric of the log.',
        ),
    ),
    "gan": (
        "adversarial, two optimizers, two models",
        (
            "`make_model`: use your generator and critic.",
            "`Ring`: return your samples and the noise.",
            "Both losses stay: each backward reaches one model.",
        ),
    ),
    "generation": (
        "generate, decoding, inference, sampling, text generation",
        (
            "`Decoder`: use any model that returns logits of shape [batch, length, vocabulary].",
            "`accel.training.generate` takes the prompts of each rank and `max_new_tokens`.",
        ),
    ),
    "gpt": (
        "nanogpt, pretrain, tensor parallel, mesh, MFU",
        (
            "`--size`, `--depth`, `--length`, `--vocabulary`, `--batch`: the defaults are nanoGPT's.",
            "`Gpt`: build your model. One of transformers returns `output.logits`, which `sum_of_losses` then takes.",
            "`load_words`: return your tokens.",
            "`AdamW`: take `accel.optim.Muon(model, lr=0.02, adamw_lr=lr)`.",
            "Add `--mesh dp=2,tp=2` or `--strategy fsdp` to `accel launch`. `--precision fp32` replaces bf16.",
        ),
    ),
    "grpo": (
        "GRPO, RLHF, RLVR, policy gradient, verifiable reward, rollouts, TRL",
        (
            "`reward`: score an answer. It runs in a helper process, and a failure or a late end counts as 0.",
            "`make_model`: load your model. In fp32 and bf16 samples depend on the number of processes.",
            "`prompts`: return the tokens of your prompts by their numbers.",
            "`--server`: address of a second process that draws the samples; `servers.vllm` takes its place.",
            "`MEANS`: the metrics of the group `rollout` in the report.",
        ),
    ),
    "images": (
        "vision, image classification, augmentation, timm, torchvision",
        (
            "`Augmented`: draw your augmentations from torch's random numbers; `seed_samples=True` seeds each sample.",
            "`make_model`: use a network of torchvision or timm.",
        ),
    ),
    "local_sgd": (
        "LocalSGD, federated, slow network, post local sgd",
        ("`LocalSgd(every=8)`: set the number of steps between two averages.",),
    ),
    "lora": (
        "LoRA, PEFT, adapters, fine-tune, finetune, freeze layers, frozen layers, qlora",
        (
            "`make_model`: load your base model.",
            "`peft.LoraConfig`: set the rank and the layers that get adapters.",
            "`accel.items.TrainableOnly` keeps the frozen base out of the checkpoints.",
        ),
    ),
    "profiling": (
        "slow data loading, bottleneck, num_workers",
        (
            "`SlowImages`: put your dataset here.",
            "`schedule`: choose the profiled steps.",
        ),
    ),
    "reinforcement": (
        "RL, policy gradient, REINFORCE, PPO, rollouts",
        (
            "`play`: run your environment. It returns the observations, actions and a mask of the moves that count.",
            "`remaining`: set the discount.",
        ),
    ),
    "reward_model": (
        "reward modeling, RLHF, TRL, Bradley-Terry",
        (
            "`make_pairs`: return your prompts with a preferred and a rejected answer.",
            "`Scorer`: use a model of transformers for sequence classification with one label.",
        ),
    ),
    "schedule_free": (
        "schedulefree, no learning rate schedule",
        ("`AdamWScheduleFree`: set its learning rate and warmup. There is no scheduler.",),
    ),
    "sft": (
        "supervised fine-tuning, instruction tuning, chat, packing, assistant mask, TRL",
        (
            "`make_chats`: return your chats as lists of turns.",
            "`make_tokenizer`: load your tokenizer. Its template needs `{% generation %}` around answers.",
            "`make_model`: load your model. `--lora` trains only adapters.",
            "`LENGTH`: set the tokens of a packed row.",
        ),
    ),
    "streaming": (
        "IterableDataset, webdataset, shards",
        (
            "`Lines`: read your shards. Keep `state_dict` and `load_state_dict`, so that a resume finds the line.",
            '`stream="dispatch"`: use `"shards"` if each rank can read separate shards.',
        ),
    ),
    "sweep": (
        "hyperparameter search, grid search, optuna, tune, wandb sweep",
        (
            "`OPTIMIZERS` and `RATES`: list your settings.",
            "`train`: put your model here. It runs one trial and returns its score.",
        ),
    ),
    "text_classification": (
        "BERT, sentiment, NLP, padding, collate_fn",
        (
            "`make_reviews`: return your texts with their labels.",
            "`collate`: call your tokenizer here, with padding.",
            "`Classifier`: use a model of transformers and pass its attention mask.",
        ),
    ),
}


def main(names: Sequence[str], *, nproc: int, out: Path) -> int:
    """Run recipes in full; return the exit status."""
    failed: list[str] = []
    for recipe in (each for each in RECIPES if not names or each.name in names):
        if recipe.missing:
            print(f"{recipe.name}: skipped, needs {', '.join(recipe.missing)}")
            continue
        began, folder = time.monotonic(), out / recipe.name
        shutil.rmtree(folder, ignore_errors=True)
        launch = [sys.executable, "-m", "accel.cli", "launch", "--nproc-per-node", str(nproc)]
        done = subprocess.run(
            [*launch, FOLDER / f"{recipe.name}.py", *recipe.full.split(), "--out", folder], check=False
        )
        result, learned = f"failed with status {done.returncode}", False
        if done.returncode == 0:
            result, learned = check(recipe, folder)
        failed += [] if learned else [recipe.name]
        print(f"{recipe.name}: {result}, {time.monotonic() - began:.0f} s", flush=True)
    write_pages()
    return int(bool(failed))


def check(recipe: Recipe, folder: Path, pictures: Path = DOCS / "gallery") -> tuple[str, bool]:
    """Draw a full run's picture; return the last value of what the recipe learns, and whether it learned enough."""
    rows = read_metrics(folder / recipe.metrics)
    column, sign, bound = recipe.learned.split()
    value = next(row[column] for row in reversed(rows) if column in row)
    pictures.mkdir(exist_ok=True)
    (pictures / f"{recipe.name}.svg").write_text(draw(recipe, rows, folder / "pictures.safetensors"))
    return f"{column} {value:.4g}, expected {sign} {bound}", COMPARE[sign](value, float(bound))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows that a run logged, without clock readings."""
    rows = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def draw(recipe: Recipe, rows: list[dict[str, Any]], pictures: Path) -> str:
    """Return an SVG of the curves that `falls` and `learned` name, and of the images that the run has saved."""
    names = dict.fromkeys((recipe.falls.lstrip("-"), recipe.learned.split()[0]))
    curves = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
    parts = [curve(name, points, WIDTH * at) for at, (name, points) in enumerate(curves.items())]
    width = WIDTH * len(parts)
    if pictures.exists():
        image = base64.b64encode(png(load_file(pictures)["pictures"])).decode()
        parts.append(
            f'<image x="{width}" width="{HEIGHT}" height="{HEIGHT}" style="image-rendering: pixelated"'
            f' href="data:image/png;base64,{image}"/>'
        )
        width += HEIGHT
    style = "text { font: 12px sans-serif; fill: gray } path { fill: none; stroke: #4070d0; stroke-width: 2 }"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}"><style>{style}</style>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def curve(name: str, points: list[tuple[int, float]], left: int) -> str:
    """Return a curve with its name and its last value."""
    steps, values = zip(*points, strict=True)
    low, high, last = min(values), max(values), steps[-1]
    across, up = (WIDTH - 2 * MARGIN) / last, (HEIGHT - 2 * MARGIN) / ((high - low) or 1)
    line = " L ".join(
        f"{left + MARGIN + step * across:.1f} {HEIGHT - MARGIN - (value - low) * up:.1f}" for step, value in points
    )
    return (
        f'<path d="M {line}"/><text x="{left + MARGIN}" y="18">{name}: {values[0]:.3g} to {values[-1]:.3g}</text>'
        f'<text x="{left + WIDTH - MARGIN}" y="{HEIGHT - 10}" text-anchor="end">step {last}</text>'
    )


def png(images: Tensor) -> bytes:
    """Return images of shape [n, height, width] or [n, 3, height, width], from 0 to 1, as a square sheet."""
    images = (images if images.dim() == 4 else images.unsqueeze(1).expand(-1, 3, -1, -1)).clamp(0, 1)
    side = int(len(images) ** 0.5)
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in images[: side * side].split(side)], dim=1)
    rows = (sheet * 255).round().byte().permute(1, 2, 0).flatten(1)
    body = b"".join(b"\0" + row.numpy().tobytes() for row in rows)  # each row is stored as it is: filter 0

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", sheet.shape[2], sheet.shape[1], 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def title(name: str) -> str:
    """Return the heading of a recipe: `Causal LM` for `causal_lm`."""
    words = " ".join(WORDS.get(word, word) for word in name.split("_"))
    return words[0].upper() + words[1:]


def pages() -> dict[str, str]:
    """Return the text of each page of the recipes, by its path in docs/."""
    return {"gallery.md": listing()} | {f"recipes/{recipe.name}.md": recipe_page(recipe) for recipe in RECIPES}


def write_pages() -> None:
    """Write the pages of the recipes."""
    (DOCS / "recipes").mkdir(exist_ok=True)
    for name, text in pages().items():
        (DOCS / name).write_text(text)


def listing() -> str:
    """Return the page that lists the recipes."""
    rows = [f"| [{title(each.name)}](recipes/{each.name}.md) | {about(each)[0]} |" for each in RECIPES]
    return "\n".join([
        "# Recipes\n",
        "Complete scripts, one page each. Every script has at most 150 lines, runs on any number of processes, and",
        "resumes if you run the same command again.\n",
        "```bash",
        "accel examples                  # list them",
        "accel examples lora --to .      # copy one",
        "accel launch --nproc-per-node 2 lora.py",
        "```\n",
        *("| Recipe | |", "|---|---|", *rows, ""),
        "The curves are from full runs on two processes, drawn by `python examples/gallery.py`.\n",
    ])  # fmt: skip


def about(recipe: Recipe) -> tuple[str, str]:
    """Return the first sentence of a script's docstring, and its paragraphs behind the commands."""
    first, _, rest = (ast.get_docstring(ast.parse(recipe.text)) or "").partition("\n\n")
    return first, "\n\n".join(part for part in rest.split("\n\n") if not part.startswith("    "))


def recipe_page(recipe: Recipe) -> str:
    """Return the page of a recipe: its command, its curve, what to change, and the script."""
    first, rest = about(recipe)
    needs = (
        f"It needs {' and '.join(f'`{module}`' for module in recipe.needs)}. "
        if recipe.needs and "Needs " not in rest
        else ""
    )
    words, changes = CHANGES[recipe.name]
    picture = f"![Curves of {recipe.name}](../gallery/{recipe.name}.svg)\n"
    has_picture = (DOCS / "gallery" / f"{recipe.name}.svg").exists()
    return "\n".join([
        f"# {title(recipe.name)}\n",
        f"{first}\n",
        f'<p hidden markdown="0">{words}</p>\n',
        "```bash",
        f"accel examples {recipe.name} --to .",
        f"accel launch --nproc-per-node 2 {recipe.name}.py {recipe.full}".rstrip(),
        "```\n",
        *([picture] if has_picture else []),
        f"{rest}\n",
        f"{needs}A full run ends with `{recipe.learned}`. `--help` lists the flags.\n",
        "## What to change\n",
        *(f"- {change}" for change in changes),
        "\n## The script { data-search-exclude }\n",
        f"```py\n{recipe.text.rstrip()}\n```\n",
    ])  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes to run (default: all)")
    parser.add_argument("--nproc", type=int, default=2, help="processes of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/gallery"), help="folder of the runs, made anew")
    parser.add_argument("--pages", action="store_true", help="write the pages only")
    flags = parser.parse_args()
    if flags.pages:
        write_pages()
        sys.exit()
    sys.exit(main(flags.names, nproc=flags.nproc, out=flags.out))
