# SPDX-License-Identifier: Apache-2.0
"""Text from a Llama of 1 GB under a limit of 300 MB, equal to the unlimited run's. Needs no GPU.

    python examples/big_model.py --folder /tmp/llama
    python examples/big_model.py --folder /tmp/llama --limit 400MB --tokens 20

The weights are random. The table that is printed shows where computation waits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

import accel


def generate(model: transformers.LlamaForCausalLM, tokens: int) -> torch.Tensor:
    """Return the ids of a prompt and of the tokens after it."""
    prompt = torch.tensor([[1, 5, 9, 3]])
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)


def main(arguments: list[str] | None = None) -> accel.bigmodel.RunStats:
    """Generate twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--limit", default="300MB", help="memory for weights, such as 300MB")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=5)
    chosen = parser.parse_args(arguments)
    config = transformers.LlamaConfig(
        vocab_size=16_000,
        hidden_size=chosen.hidden,
        intermediate_size=4 * chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=8,
        pad_token_id=0,
    )
    with accel.session() as ctx:
        accel.seeding.set_seed(ctx, 0)
        whole = transformers.LlamaForCausalLM(config).eval()
        expected = generate(whole, chosen.tokens)
        accel.save_model(ctx, whole, chosen.folder)
        del whole

        model = accel.init_empty_weights(lambda: transformers.LlamaForCausalLM(config)).eval()
        skeleton = accel.bigmodel.describe(model)
        device_map = accel.infer_device_map(skeleton, {"cpu": chosen.limit, "disk": None})
        print(f"{skeleton.nbytes / 1e6:.0f} MB of weights, {device_map.used('cpu') / 1e6:.0f} MB of memory for them")
        with accel.load_checkpoint_and_dispatch(ctx, model, chosen.folder, device_map) as run:
            found = generate(run.model, chosen.tokens)
            print(run.stats())
        assert torch.equal(found, expected)
        print(f"tokens {found[0].tolist()}, as of the whole model")
        return run.stats()


if __name__ == "__main__":
    _ = main()
