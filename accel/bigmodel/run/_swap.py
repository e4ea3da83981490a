# SPDX-License-Identifier: Apache-2.0
"""`swap_models`: whole models that take turns on a device, one there at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from accel.bigmodel._arguments import device_of
from accel.bigmodel.run._places import has_values, set_memory
from accel.bigmodel.run._stream import running_modules
from accel.errors import ConfigError, StreamError
from accel.parallel._modules import check_module

M = TypeVar("M", bound=nn.Module)


class _Turn:
    """The hooks of a model that takes turns. Copies of the model share them."""

    def __init__(
        self, model: nn.Module, begin: Callable[[nn.Module], object], end: Callable[[nn.Module], object]
    ) -> None:
        self._model = model
        self._begin = begin
        self._end = end

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._begin(self._model)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._end(self._model)

    def __deepcopy__(self, memo: object) -> _Turn:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise StreamError(
            "a model that takes turns cannot be pickled",
            where=type(self._model).__name__,
            fix="Save with accel.save_model(ctx, model, folder), or after swap.close().",
        )


class Swap:
    """Models that take turns on a device. Made by `swap_models`; use it in a `with` block."""

    def __init__(self, device: torch.device, models: Sequence[nn.Module]) -> None:
        self._device = device
        self._models = models
        self._present: nn.Module | None = None
        self._away: list[tuple[torch.Tensor, torch.Tensor, int | None]] = []  # tensor, its host memory, its version
        self._uses: list[tuple[nn.Module, bool]] = []  # of one thread: the model, and whether in a `with` block
        self._user: int | None = None
        self._turn = threading.Condition()
        self._handles = [handle for model in models for handle in self._hook(model)]

    @contextlib.contextmanager
    def use(self, model: M) -> Generator[M]:
        """Keep a model on the device in a `with` block, for calls of other methods than its forward.

        Args:
            model: one of the models.

        Raises:
            ConfigError: another model than those given.
            StreamError: the thread is using another one of them.
        """
        self._begin(model, scoped=True)
        try:
            yield model
        finally:
            self._end(model)

    def close(self) -> None:
        """Bring every model back to the host, and remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with self._turn:
            self._bring_back()

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self, model: nn.Module) -> list[Any]:
        turn = _Turn(model, functools.partial(self._begin, scoped=False), self._end_call)
        return [
            model.register_forward_pre_hook(turn.before, prepend=True),
            model.register_forward_hook(turn.after, always_call=True),
        ]

    def _end_call(self, model: nn.Module) -> None:
        if self._user == threading.get_ident() and self._uses[-1][0] is model:  # else `_begin` has raised
            self._end(model)

    def _begin(self, model: nn.Module, *, scoped: bool) -> None:
        if not any(model is each for each in self._models):
            raise ConfigError("a model that is not swapped", got=type(model).__name__, where="Swap.use")
        me = threading.get_ident()
        with self._turn:
            if self._user == me:
                self._drop_abandoned()
            if self._present is not model and self._user == me:
                raise StreamError(
                    "two models at a time",
                    got=f"{type(model).__name__} while {type(self._present).__name__} runs",
                    where="Swap",
                    fix="End the use of one first, or let dispatch_model stream both.",
                )
            # Calls of another thread end first; calls of this one may nest.
            self._turn.wait_for(lambda: not self._uses or self._user == me)
            if self._present is not model:
                self._bring_back()
                self._bring_in(model)
            self._user = me
            self._uses.append((model, scoped))

    def _end(self, model: nn.Module) -> None:
        with self._turn:
            self._drop_abandoned(inside=model)
            self._pop()

    def _pop(self) -> None:
        self._uses.pop()
        if not self._uses:
            self._user = None
            self._turn.notify_all()

    def _drop_abandoned(self, inside: nn.Module | None = None) -> None:
        """End calls that no longer run: torch runs no hook after a KeyboardInterrupt."""
        # A use that was interrupted would keep its model on the device, and every other thread waiting.
        running = running_modules()
        while self._uses:
            model, scoped = self._uses[-1]
            if scoped or model is inside or id(model) in running:
                return
            self._pop()

    def _bring_in(self, model: nn.Module) -> None:
        self._present = model
        try:
            with torch.inference_mode(False), torch.no_grad():  # memory of inference mode could never train
                for tensor in {id(each): each for each in (*model.parameters(), *model.buffers())}.values():
                    if tensor.device != self._device or self._device.type == "cpu":  # a copy on the host is a rehearsal
                        # The host memory is kept: a model that has not changed goes back without a copy.
                        host = tensor.data
                        set_memory(tensor, host.to(self._device, copy=True))
                        self._away.append((tensor, host, _version(tensor)))
        except BaseException:  # such as a device without room: the next call finds no half of a model there
            self._bring_back()
            raise

    def _bring_back(self) -> None:
        """Give the present model its host memory again; values that changed meanwhile are copied to it."""
        with torch.inference_mode(False), torch.no_grad():
            for tensor, host, version in self._away:
                if version is None or tensor._version != version:
                    with torch.inference_mode(host.is_inference()):
                        host.copy_(tensor.data)
                set_memory(tensor, host)
        self._away.clear()
        self._present = None


def _version(tensor: torch.Tensor) -> int | None:
    """Return the number of changes that torch has counted; of a tensor made in inference mode it counts none."""
    return None if tensor.is_inference() else tensor._version


def swap_models(device: int | str | torch.device, *models: nn.Module) -> Swap:
    """Let models that do not fit on a device together take turns on it. Mutates the models until the result is closed.

    A call of a model brings it to the device, and the one before it back to the host, where its memory stays. Only
    values that changed are copied back. What threads call waits for its turn.

    Args:
        device: the computing device; a number is a CUDA device.
        models: models on the host, each called alone, as the parts of a diffusion pipeline are.

    Returns:
        The handle; close it, or use it in a `with` block.

    Raises:
        ConfigError: fewer than two models, what is no model, or one without values.
        DeviceError: the device is not there.
    """
    if len(models) < 2:
        raise ConfigError("models take turns", expected="two or more", got=str(len(models)), where="swap_models")
    for model in models:
        check_module(model, where="swap_models")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not has_values(tensor):
                raise ConfigError(
                    "a model without values takes no turns",
                    got=f"{type(model).__name__}, {name!r}",
                    where="swap_models",
                    fix="Load its weights first.",
                )
    return Swap(device_of(device, where="swap_models"), models)
