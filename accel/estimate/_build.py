# SPDX-License-Identifier: Apache-2.0
"""A model's shapes and activations from code, built and run on fake tensors, which have no memory."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from accel.errors import AccelError, ConfigError, MissingExtraError
from accel.errors._checks import check_kind, import_extra
from accel.estimate._configs import KINDS, read_fields, transformer_from
from accel.estimate._model import Activations, Model, Parameter
from accel.storage import DTYPE_NAMES, FLOATS, dtype_name

if TYPE_CHECKING:
    import torch
    from torch import nn


_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # models with inputs as labels
_BY_SIZE = {1: "U8", 2: "U16", 4: "U32", 8: "C64", 16: "C128"}  # of dtypes that no file holds


class Input(NamedTuple):
    """An input of the model.

    Attributes:
        shape: with the batch first.
        dtype: name in torch.
    """

    shape: tuple[int, ...]
    dtype: str


def function_of(name: str) -> Callable[[], nn.Module]:
    """Return the function that `module:function` names, or raise `ConfigError`."""
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "there is no such function", expected="module:function", got=repr(name), fix=f"Python's error: {error}."
        ) from error


def from_config(path: Path, inputs: Sequence[Input] = ()) -> Model:
    """Return the model of a `config.json` of Hugging Face's transformers, in fp32 whatever its weights are stored in.

    Models with known blocks, and token ids or no input, are described by their sizes; others need transformers.
    """
    fields = read_fields(path)
    try:
        sizes = transformer_from(fields, where=str(path))
    except ConfigError:
        sizes = None  # transformers may know the model, or what a size is by default
    if sizes is None or len(inputs) > 1 or any(len(each.shape) != 2 for each in inputs):
        found = read_config(path)
        model = measure(found.make, found.source, inputs, labelled=found.labelled)
    else:
        source = f"{path}, {fields['model_type']}"
        model = Model(source=source, parameters=sizes.parameters, buffers=sizes.buffers, sizes=sizes)
    file_dtype = DTYPE_NAMES.get(_dtype_in(fields) or "")
    if file_dtype is None:
        return model
    parameters, buffers = (
        tuple(msgspec.structs.replace(each, file_dtype=file_dtype if each.dtype in FLOATS else None) for each in some)
        for some in (model.parameters, model.buffers)
    )
    return msgspec.structs.replace(model, parameters=parameters, buffers=buffers)


def _dtype_in(fields: Mapping[str, Any]) -> str | None:
    """Return torch's name of the dtype in which a model's weights are stored."""
    found = fields.get("dtype", fields.get("torch_dtype"))
    return found if isinstance(found, str) else None


class DescribedModel(NamedTuple):
    """A model of a `config.json`, not yet built."""

    make: Callable[[], nn.Module]  # builds it
    source: str  # origin, in words
    labelled: bool  # whether it computes its loss from `labels`
    dtype: str | None  # torch's name of the dtype in which its weights are stored, if the file has it


def read_config(path: Path) -> DescribedModel:
    """Return the model that a `config.json` of Hugging Face's transformers describes."""
    fields = read_fields(path)
    if find_spec("transformers") is None:
        raise MissingExtraError(
            "a model of transformers needs transformers, which is not installed",
            where=str(path),
            fix="Run `pip install accel-torch[transformers]`, or name the safetensors file instead.",
        )
    transformers: Any = import_module("transformers")
    dtype = _dtype_in(fields)
    names: list[str] = fields.get("architectures") or []
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(
            "the file is not a configuration of a model", expected="`model_type`", got="none", where=str(path)
        )
    try:
        plain = {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}
        config = transformers.AutoConfig.for_model(**plain)
        found = getattr(transformers, names[0], None) if names else None
    except Exception as error:  # whatever a library's own checks raise
        raise ConfigError("transformers refuses the file", got=str(error), where=str(path)) from error

    def make() -> Any:
        if found is not None:
            return found._from_config(config)
        return (transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModel).from_config(config)

    # a file that names no class is of the model that its sizes describe
    is_decoder = not names and fields["model_type"] in KINDS
    labelled = is_decoder or (found is not None and names[0].endswith(_LABELLED))
    source = f"{path}, {names[0] if names else fields['model_type']}"
    return DescribedModel(make, source, labelled, dtype)


def measure(
    make: Callable[[], nn.Module], source: str, inputs: Sequence[Input] = (), *, labelled: bool = False
) -> Model:
    """Return a model's shapes and, with inputs, its activations in each compute dtype; on fake tensors.

    Args:
        make: makes the model; its code runs unchanged.
        source: origin, in words, for errors.
        inputs: inputs of one rank, to count activations.
        labelled: whether the first input is passed as `labels` too, for models that compute their loss.

    Raises:
        ConfigError: not a model, or one that cannot be built and called without values.
    """
    with built(make, source) as model:
        parameters = tuple(_parameter(name, each) for name, each in model.named_parameters())
        stored = model.state_dict(keep_vars=True)
        buffers = tuple(
            msgspec.structs.replace(_parameter(name, each), stored=name in stored)
            for name, each in model.named_buffers()
        )
        with as_on_gpus():
            kept = _activations(model, inputs, labelled) if inputs else {}
    return Model(source=source, parameters=parameters, buffers=buffers, activations=kept)


def _parameter(name: str, tensor: torch.Tensor) -> Parameter:
    dtype = DTYPE_NAMES.get(dtype_name(tensor.dtype)) or _BY_SIZE[tensor.element_size()]
    return Parameter(name=name, shape=tuple(tensor.shape), dtype=dtype, trained=bool(tensor.requires_grad))


@contextmanager
def built(make: Callable[[], nn.Module], source: str) -> Generator[nn.Module]:
    """Build a model on fake tensors, which have no memory, for the length of a block; `make` runs unchanged."""
    fakes = import_module("accel.fakes")
    problem = "the model cannot be built and run without values"
    fix = "Check --input; code that looks at a tensor's values cannot run."
    with (
        fakes.emptied_caches(),
        fakes.fake_mode(),
        users_code(problem, lambda: source, fix),
        quiet_fakes(),
    ):
        model = make()
        nn: Any = import_module("torch.nn")
        check_kind(model, nn.Module, "the object is not a model", expected="an nn.Module", where=source)
        yield model


def _activations(model: nn.Module, inputs: Sequence[Input], labelled: bool) -> dict[str, Activations]:
    import torch

    def kept(compute: torch.dtype | None, stored: torch.dtype | None = None) -> Activations:
        with nullcontext() if compute is None else torch.autocast("cpu", compute):
            return kept_by_forward(model, [_tensor(each) for each in inputs], labelled, stored)

    fp32 = kept(None)
    bf16 = kept(torch.bfloat16)
    pure = kept(torch.bfloat16, torch.bfloat16)
    return {"fp32": fp32, "tf32": fp32, "bf16": bf16, "fp16": bf16, "pure-bf16": pure}


def kept_by_forward(
    model: nn.Module, inputs: Sequence[torch.Tensor], labelled: bool = False, stored: torch.dtype | None = None
) -> Activations:
    """Run a forward and return the bytes that it keeps for a backward, each storage once.

    `stored` is the assumed dtype of trained parameters, which stay unchanged; None for their own.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    parameters = {
        name: each.detach().to(stored if each.requires_grad else None).requires_grad_(each.requires_grad)
        for name, each in model.named_parameters()
    }
    own = {storage_of(each)[0] for each in (*parameters.values(), *model.buffers())}
    storages: dict[int, Any] = {}  # kept alive, so that addresses stay unique
    copies: dict[int, Any] = {}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and storage_of(args[0])[0] in own:
                key, storage = storage_of(result)
                copies[key] = storage
            return result

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        key, storage = storage_of(tensor)
        if key not in own:
            storages[key] = storage
        return tensor

    options = {"labels": inputs[0]} if labelled else {}
    with Copies(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = torch.func.functional_call(model, parameters, tuple(inputs), options)
    sizes = {key: storage.nbytes() for key, storage in storages.items()}
    copied = sum(size for key, size in sizes.items() if key in copies)
    del result
    return Activations(saved=sum(sizes.values()) - copied, copies=copied)


def as_on_gpus() -> AbstractContextManager[object]:
    """Count as on GPUs during the block: dropout keeps a mask of bytes, and attention no matrix, unlike on the CPU.

    Grouped matmuls may have any dtype, as torch computes them with values; without values torch only accepts bf16.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    class AsOnGpus(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named: dict[str, Any] = kwargs or {}
            if func is functional.dropout:
                return dropout(*args, **named)
            if func is functional.scaled_dot_product_attention:
                args, named = args[:4], {**named, "dropout_p": 0.0}
            if func is functional.multi_head_attention_forward:
                args = (*args[:10], 0.0, *args[11:])  # its dropout_p
            if getattr(func, "__name__", "").strip("_") == "grouped_mm":
                return grouped(func, *args, **named)
            return func(*args, **named)

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, training)[0] if training and p else input

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, weights: Any, offs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.save_for_backward(rows, weights, offs)
            return rows.new_empty(rows.shape[0], weights.shape[-1])

    def grouped(product: Any, *args: Any, **named: Any) -> torch.Tensor:
        rows: Any = args[0] if args else named.get("mat_a", named.get("input"))
        weights: Any = args[1] if len(args) > 1 else named.get("mat_b", named.get("mat2"))
        offs = args[2] if len(args) > 2 else named.get("offs")
        if rows.dtype is torch.bfloat16 or rows.dim() != 2 or weights.dim() != 3 or offs is None:
            return product(*args, **named)
        return cast(Any, Grouped).apply(rows, weights, offs)

    return AsOnGpus()


def storage_of(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage]:
    """Return a tensor's storage, with a number that identifies it while it lives."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage  # pyright: ignore[reportPrivateUsage] - tensors without memory have no address


def _tensor(each: Input) -> torch.Tensor:
    import torch

    return torch.zeros(each.shape, dtype=getattr(torch, each.dtype))


@contextmanager
def quiet_fakes() -> Generator[None]:
    """Silence this thread's work on fake tensors: torch warns about copies, and torch 2.14 logs failing operations."""
    here = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(other_thread)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(other_thread)


@contextmanager
def users_code(problem: str, where: Callable[[], str], fix: str) -> Generator[None]:
    """Raise `ConfigError` in the place of whatever the user's code raises in the block."""
    try:
        yield
    except AccelError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(problem, got=f"{type(error).__name__}: {text}", where=where(), fix=fix) from error


def timm_maker(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds a model of timm."""
    timm = import_extra("timm", "a model of timm", extra="timm", where=f"timm/{name}")
    return lambda: timm.create_model(name, pretrained=False)
