# SPDX-License-Identifier: Apache-2.0
"""A configuration on its way to being settled, and its keys that do not act here, contradict the loop, or are slips."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection
from typing import Any, NamedTuple, Self

from accel.engines.deepspeed._keys import KINDS, REMOVED, RENAMED, VERSION
from accel.engines.deepspeed._options import ZERO, DeepSpeed, DeepSpeedSetting, Key, RunFacts, field_of


class Draft:
    """Values by key, and problems. Only `resolve` holds one, while it runs."""

    def __init__(self, rows: dict[Key, DeepSpeedSetting], source: str) -> None:
        self.rows = rows
        self.problems: list[str] = []
        self._source = source

    @classmethod
    def of(cls, config: DeepSpeed) -> Self:
        """Return a configuration's values, each with its source."""
        by_field = {key for _, key, _ in config.said()}
        defaults = dict(zip(config.__struct_fields__, config.__struct_defaults__, strict=True))
        rows: dict[Key, DeepSpeedSetting] = {}
        for key, value in config.values().items():
            field = field_of(key) if key in by_field else "settings"
            is_default = field != "settings" and getattr(config, field) == defaults[field] and not config.source
            source = config.source or ("default" if is_default else f"DeepSpeed({field}=)")
            rows[key] = DeepSpeedSetting(value, source)
        return cls(rows, config.source)

    def said(self, key: Key) -> Any:
        """Return the value at a key; None if it is missing or "auto"."""
        row = self.rows.get(key)
        return None if row is None or row.value == "auto" else row.value

    def fill(self, key: Key, value: Any, source: str) -> None:
        """Set the value at a key."""
        self.rows[key] = DeepSpeedSetting(value, source)

    def agree(self, key: Key, fact: Any, place: str) -> Any:
        """Return the value at a key, from the fact if it is open; a different fact is a problem."""
        said = self.said(key)
        if fact is None:
            return said
        if said is None:
            self.fill(key, fact, place)
        elif said != fact:
            self.problem(f'{self.shown(key)}, but {place} has {fact}. Write "auto", or leave it out.')
        return fact

    def impose(self, key: Key, value: Any) -> None:
        """Set a value that the training loop needs; a different one in the configuration is a problem."""
        said = self.said(key)
        if said is not None and said != value:
            self.problem(f"{self.shown(key)}, but the training loop needs {json.dumps(value)}. Leave it out.")
        self.fill(key, value, "the training loop")

    def problem(self, text: str) -> None:
        """Note what does not fit, and the fix."""
        self.problems.append(text)

    def shown(self, key: Key) -> str:
        """Return a key with its value and its source, as errors begin with them."""
        row = self.rows[key]
        where = "" if row.source == self._source else f" of {row.source}"
        return f"{dotted(key)}: {json.dumps(row.value, default=str)}{where}"


def dotted(key: Key) -> str:
    """Return a key as one text."""
    return ".".join(key)


# section: whether it asks for something, and what does it here
_NO_EFFECT = {
    "amp": "Pass precision= to accel.session.",
    "data_efficiency": "accel.batches gives the data; pass a sampler to the DataLoader.",
    "curriculum_learning": "Pass a sampler to the DataLoader.",
    "dataloader_drop_last": 'Pass tail="drop" to accel.prepare_loader.',
    "elasticity": "accel launch --nnodes 1:4 takes hosts that come and go.",
    "expert_parallel": 'Use the mesh axis "ep" with the strategy ddp or fsdp.',
    "pipeline": 'Use the mesh axis "pp" with the strategy ddp or fsdp.',
    "sequence_parallel_size": 'Use the mesh axis "cp" with the strategy ddp or fsdp.',
    "tensor_parallel": 'Use the mesh axis "tp" with the strategy ddp or fsdp.',
    "autotuning": "accel plan --config config.json lists the meshes that fit.",
}
_IDLE: dict[str, tuple[tuple[str, object], ...]] = {  # values by which a section asks for nothing
    "sequence_parallel_size": (("", 1),),
    "dataloader_drop_last": (("", False),),
    "tensor_parallel": (("autotp_size", 0), ("autotp_size", 1)),
}
_UNIVERSAL: Key = ("checkpoint", "load_universal")
_KNOWN = (
    "activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comms_logger", "communication_data_type",
    "compile", "csv_monitor", "comet", "data_types", "disable_allgather", "disable_python_gc", "dump_state",
    "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "log_level", "managed_gradient_accumulation", "memory_breakdown", "nebula",
    "optimizer", "prescale_gradients", "quantize_training", "scheduler", "seq_parallel_communication_data_type",
    "sparse_gradients", "steps_per_print", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "wall_clock_breakdown", "wandb",
    "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip


def check_names(draft: Draft) -> None:
    """Note keys at the top that are nearly one of DeepSpeed's, which it would pass over."""
    names = (*_KNOWN, *_NO_EFFECT)
    for name in dict.fromkeys(key[0] for key in draft.rows):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        if name not in names and near:
            draft.problem(f"{name}: no key of DeepSpeed. Did you mean `{near[0]}`?")


def check_foreign(draft: Draft) -> None:
    """Note sections that ask for what accel's loop, loader or mesh does."""
    for name, fix in _NO_EFFECT.items():
        keys = [key for key in draft.rows if key[0] == name]
        if keys and not _asks_nothing(draft, name, keys):
            draft.problem(f"{name}: has no effect here. {fix}")
        if name in REMOVED:  # DeepSpeed refuses the name itself
            for key in keys:
                del draft.rows[key]
    if draft.said(_UNIVERSAL):
        draft.problem(
            f"{dotted(_UNIVERSAL)}: has no effect here. accel.load_state loads a checkpoint at any stage and on any "
            "number of ranks."
        )


def _asks_nothing(draft: Draft, name: str, keys: list[Key]) -> bool:
    if draft.rows.get((name, "enabled"), (None,))[0] is False:
        return True
    if len(keys) == 1 and len(keys[0]) == 1 and draft.rows[keys[0]].value in ({}, None):
        return True
    for inner, value in _IDLE.get(name, ()):
        row = draft.rows.get((name, inner) if inner else (name,))
        if row is not None and row.value == value and type(row.value) is type(value):
            return True
    return False


_OFFLOADED_STEP: Key = (ZERO, "offload_optimizer")
_DEVICE: Key = (*_OFFLOADED_STEP, "device")
_PREDIVIDES: Key = ("gradient_predivide_factor",)
_ACCUMULATES: Key = ("data_types", "grad_accum_dtype")
_FP32 = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's names of it


class _Refused(NamedTuple):
    """A key, the values by which it asks for nothing, and why any other is refused."""

    key: Key
    idle: Collection[Any]
    why: str


_TABLE = (
    _Refused((ZERO, "zenflow"), ({},), "a second optimizer steps a part of the weights outside of the step"),
    _Refused((*_OFFLOADED_STEP, "ratio"), (1,), "a second optimizer has a part of the state, which is not saved"),
    _Refused((*_OFFLOADED_STEP, "super_offload"), (False,), "another process has the state, which is not saved"),
    _Refused((ZERO, "legacy_stage1"), (False,), "DeepSpeed has it no longer"),
    _Refused(
        (ZERO, "compute_grad_norm"),
        (True,),
        "the step needs the norm, to clip, and to check that gradients are finite",
    ),
    _Refused(
        ("gradient_allreduce_op",),
        ("mean",),
        "optimizer_step divides by the weight of all ranks, so a sum would make gradients longer by their number",
    ),
    _Refused(("compile", "deepcompile"), (False,), "it needs DeepSpeed's own windows. Pass compile= to session"),
)


def check_conflicts(draft: Draft, facts: RunFacts, stage: int) -> None:
    """Note the keys of the table that ask for something, and keys that a stage treats differently."""
    for key, idle, why in _TABLE:
        for own in [own for own in draft.rows if own[: len(key)] == key]:
            value = draft.said(own)
            if value is not None and (value.lower() if isinstance(value, str) else value) not in idle:
                draft.problem(f"{draft.shown(own)}, but {why}. Leave it out.")
                break
    if stage == 3 and draft.said(_PREDIVIDES) not in (None, 1) and not draft.said(("prescale_gradients",)):
        draft.problem(
            f"{draft.shown(_PREDIVIDES)}, but stage 3 divides by it and does not multiply again, so that gradients "
            "would be shorter. Leave it out."
        )
    narrow = facts.precision.compute == "bf16" and facts.precision.params is None
    if stage == 1 and narrow and draft.said(_DEVICE) in (None, "none") and draft.said(_ACCUMULATES) in _FP32:
        draft.problem(
            f"{draft.shown(_ACCUMULATES)}, for which stage 1 takes another optimizer of DeepSpeed's. Its gradients "
            "cannot be cleared between windows. Leave it out, or take stage 2."
        )


_BOOLS = ("true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0")  # texts that DeepSpeed converts


def check_known(draft: Draft) -> tuple[str, ...]:
    """Note keys and values that DeepSpeed would refuse; return those that it may have since the recorded version."""
    newer: list[str] = []
    for key in draft.rows:
        path = dotted(key)
        old = next((name for name in (*REMOVED, *RENAMED) if path == name or path.startswith(f"{name}.")), None)
        section = next((dotted(key[:at]) for at in range(len(key) - 1, 0, -1) if dotted(key[:at]) in KINDS), "")
        if old is not None and old in RENAMED:
            draft.problem(f"{draft.shown(key)}: an older name. Write {RENAMED[old]} instead.")
        elif old is not None:
            draft.problem(f"{draft.shown(key)}: DeepSpeed {VERSION} has removed it. Leave it out.")
        elif section:
            _check(draft, key, section, newer)
    return tuple(newer)


def _check(draft: Draft, key: tuple[str, ...], section: str, newer: list[str]) -> None:
    name = key[section.count(".") + 1]
    kinds = KINDS[section]
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.8)
        if near:
            draft.problem(f"{dotted(key)}: no key of DeepSpeed. Did you mean `{near[0]}`?")
        else:
            newer.append(dotted(key))
        return
    value = draft.said(key)
    if value is not None and not _fits(value, kinds[name]):
        wanted = kinds[name].replace("|", ", ")
        draft.problem(f"{draft.shown(key)}, but DeepSpeed takes {wanted} there.")


def _fits(value: Any, kind: str) -> bool:
    if kind == "any":
        return True
    if kind == "bool":
        return value in (True, False) or (isinstance(value, str) and value.lower() in _BOOLS)
    if kind not in ("int", "float"):
        return value in kind.split("|")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return kind == "float" or (math.isfinite(number) and number.is_integer())
