# SPDX-License-Identifier: Apache-2.0
"""Recipes of mixtures of experts: separate tensors in the checkpoint, stacked ones in the model."""

from __future__ import annotations

from accel.checkpoint import Recipe


def expert_recipes(
    *, block: str = "mlp", stored_block: str = "", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Recipe, ...]:
    """Return the recipes of a mixture of experts of transformers 5, for `rename=` of loads and of `save_model`.

    The defaults fit Qwen, DeepSeek, OLMoE, GLM and others; for Mixtral pass `stored_block="block_sparse_moe"`,
    `gate="w1"`, `up="w3"` and `down="w2"`.

    Args:
        block: name of the module of the experts in the model.
        stored_block: its name in the checkpoint; "" for the same.
        gate, up, down: names of an expert's projections in the checkpoint.

    Returns:
        Recipes that stack the experts as `experts.gate_up_proj` and `experts.down_proj`.

    Reference: `MergeModulelist` and `Concatenate` of transformers.core_model_loading.
    """
    into = f"{{before...}}.{block}.experts"
    renamed = Recipe("rename", f"{{before...}}.{stored_block}.{{after...}}", f"{{before...}}.{block}.{{after...}}")
    return (
        *((renamed,) if stored_block else ()),
        Recipe("stack", f"{into}.{{expert}}.{gate}.weight", f"{into}.gate"),
        Recipe("stack", f"{into}.{{expert}}.{up}.weight", f"{into}.up"),
        Recipe("concat", (f"{into}.gate", f"{into}.up"), f"{into}.gate_up_proj", dim=1),
        Recipe("stack", f"{into}.{{expert}}.{down}.weight", f"{into}.down_proj"),
    )
