# SPDX-License-Identifier: Apache-2.0
"""Speeds of a device by shape: of matmuls, attention, memory and collectives; published ones, and a benchmark."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from accel.errors import ConfigError
from accel.opening import read_named

if TYPE_CHECKING:
    import torch

    from accel.context import DistContext

_VERSION = 1
_MOST_BYTES = 1 << 24
T = TypeVar("T")


class ProductSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A matmul of an m x k and a k x n matrix.

    Attributes:
        dtype: dtype of both matrices: "fp32", "tf32", "bf16", "fp16" or "fp8".
        m: rows of the first.
        n: columns of the second.
        k: length of the sums.
        flops: operations a second.
    """

    dtype: str
    m: int
    n: int
    k: int
    flops: float


class AttentionSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Causal attention; its masked half counts no operations.

    Attributes:
        dtype: as for matmuls.
        tokens: length of a sequence.
        head_width: size of a head.
        forward: operations a second of the forward.
        backward: of the backward, which has two and a half times as many.
    """

    dtype: str
    tokens: int
    head_width: int
    forward: float
    backward: float


class MessageSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of several ranks.

    Attributes:
        operation: the collective.
        ranks: number of ranks.
        hosts: number of hosts that they are on.
        bytes: of the larger side.
        seconds: of the collective.
    """

    operation: str
    ranks: int
    hosts: int
    bytes: int
    seconds: float


class Efficiencies(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Speeds of a device.

    Attributes:
        version: of the file's format.
        device: name of the device.
        kind: its kind, as torch names it: "cuda", "cpu".
        torch: version of torch; empty for published figures.
        date: of the measurement.
        bandwidth: bytes a second that elementwise operators read and write.
        products: of matmuls.
        attention: causal.
        messages: collectives; empty where one rank measured.
        sources: addresses of published figures.
        power_w: power limit of the device in watts while its matmuls and attention were measured; 0 if not known.

    Raises:
        ConfigError: no products, or a number that is not above 0.
    """

    version: int = _VERSION
    device: str
    kind: str
    torch: str
    date: str
    bandwidth: float
    products: tuple[ProductSpeed, ...]
    attention: tuple[AttentionSpeed, ...] = ()
    messages: tuple[MessageSpeed, ...] = ()
    sources: tuple[str, ...] = ()
    power_w: float = 0

    def __post_init__(self) -> None:
        if not self.products:
            raise ConfigError("a table without products", expected="one or more", got="none", where="Efficiencies")
        rows = {"products": self.products, "attention": self.attention, "messages": self.messages}
        for name, table in rows.items():
            for at, row in enumerate(table):
                _check_numbers(row, f"Efficiencies.{name}[{at}]")
        _check_numbers(self, "Efficiencies", {"power_w"} if self.power_w == 0 else ())

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the matmuls, each once."""
        return list(dict.fromkeys(each.dtype for each in self.products))


def _check_numbers(record: msgspec.Struct, where: str, unknown: Collection[str] = (), *, finite: bool = True) -> None:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in unknown or not isinstance(value, int | float):
            continue
        if not value > 0 or (finite and math.isinf(value)):
            raise ConfigError(
                "the speed is not valid", expected="a number above 0", got=str(value), where=f"{where}.{name}"
            )


def product_flops(table: Efficiencies, dtype: str, m: int, n: int, k: int) -> float:
    """Return operations a second of a matmul: the mean over measured shapes, weighted by their nearness.

    Shapes count by the inverse fourth power of their distance, in doublings of m, n and k. So a measured shape has its
    own speed, and others lie between the slowest and the fastest.

    Raises:
        ConfigError: the table has no matmuls of this dtype.
    """
    return _product(table, dtype, m, n, k)


@functools.lru_cache(maxsize=4096)
def _product(table: Efficiencies, dtype: str, m: int, n: int, k: int) -> float:
    points = [((each.m, each.n, each.k), each.flops) for each in table.products if each.dtype == dtype]
    if not points:
        raise ConfigError(
            "the table of speeds has no products of this format",
            expected=" or ".join(table.dtypes),
            got=dtype,
            where=f"speeds of {table.device}",
            fix="Measure on a device that has them, by accel plan --calibrate, or take another --precision.",
        )
    return _between(points, (m, n, k))


@functools.lru_cache(maxsize=4096)
def attention_flops(table: Efficiencies, dtype: str, tokens: int, head_width: int) -> tuple[float, float]:
    """Return operations a second of causal attention, forward and backward; a matmul's if none is known."""
    rows = [each for each in table.attention if each.dtype == dtype]
    if not rows:
        speed = _product(table, dtype, tokens, tokens, head_width)
        return speed, speed
    forward = _between([((each.tokens, each.head_width), each.forward) for each in rows], (tokens, head_width))
    backward = _between([((each.tokens, each.head_width), each.backward) for each in rows], (tokens, head_width))
    return forward, backward


def _between(points: Iterable[tuple[Sequence[int], float]], shape: Sequence[int]) -> float:
    total = weights = 0.0
    for known, speed in points:
        distance = sum(math.log2(ours / theirs) ** 2 for ours, theirs in zip(shape, known, strict=True))
        if distance == 0:
            return speed
        weight = distance**-2
        total += weight * speed
        weights += weight
    return total / weights


def read_efficiencies(path: Path) -> Efficiencies:
    """Return the table in a file of `accel plan --calibrate`.

    Raises:
        ConfigError: no such file, one that is not a table, or one of another version.
    """
    fix = "accel plan --calibrate FILE writes one."
    try:
        data = read_named(path, _MOST_BYTES)
        version = msgspec.json.decode(data, type=_TableVersion).version
        if version != _VERSION:
            raise ConfigError(
                "a table of speeds of another version", expected=str(_VERSION), got=str(version), where=str(path),
                fix=fix,
            )  # fmt: skip
        return msgspec.json.decode(data, type=Efficiencies)
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no such file", expected="a table of speeds", got=repr(str(path)), fix=fix
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        got = str(error)
        raise ConfigError(
            "the file is not a table of speeds", expected="JSON", got=got, where=str(path), fix=fix
        ) from error


class _TableVersion(msgspec.Struct, frozen=True):
    version: int


def _published() -> Iterator[ProductSpeed]:
    """Products on H100, in 10^12 operations a second, as published."""
    bf16 = (
        # openxla: matmul_interpolator_data.h, sm_90
        (256, 256, 1024, 19.5), (512, 512, 512, 40.7), (512, 256, 2048, 60.1), (512, 1024, 512, 80.5),
        (1024, 1024, 256, 82.0), (4096, 256, 256, 82.2), (2048, 512, 256, 83.9), (256, 1024, 2048, 119.0),
        (512, 4096, 256, 134.2), (4096, 256, 512, 137.2), (512, 2048, 512, 143.4), (1024, 512, 4096, 298.9),
        (4096, 256, 4096, 376.2), (1024, 1024, 4096, 470.1), (512, 4096, 4096, 644.1), (2048, 1024, 4096, 653.1),
        (1024, 2048, 4096, 653.5), (4096, 4096, 1024, 677.4), (2048, 4096, 2048, 715.4),
        # float8_experimental, 38: products of a Llama 2 70B on 8 GPUs
        (16384, 1280, 8192, 568.9), (16384, 8192, 1024, 549.8), (16384, 7168, 8192, 539.0), (16384, 8192, 3584, 605.1),
    )  # fmt: skip
    tf32 = (
        (256, 256, 1024, 14.3), (512, 4096, 4096, 264.2), (1024, 2048, 4096, 266.5), (2048, 1024, 4096, 307.9),
        (4096, 4096, 1024, 309.0), (2048, 4096, 2048, 316.6),
    )  # fmt: skip
    fp8 = (
        (16384, 1280, 8192, 1414.0), (16384, 8192, 1024, 1095.2), (16384, 7168, 8192, 1384.3),
        (16384, 8192, 3584, 1291.3),
        # DeepGEMM, on H800
        (64, 2112, 7168, 206.0), (128, 2112, 7168, 352.0), (128, 24576, 1536, 535.0), (128, 7168, 16384, 645.0),
        (4096, 2112, 7168, 1058.0), (4096, 24576, 1536, 990.0), (4096, 32768, 512, 590.0), (4096, 7168, 16384, 1358.0),
        (4096, 4096, 7168, 1304.0), (4096, 7168, 2048, 1025.0),
    )  # fmt: skip
    tables = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp8": fp8, "fp32": ((4096, 4096, 4096, 66.9),)}
    for dtype, rows in tables.items():
        for m, n, k, speed in rows:
            yield ProductSpeed(dtype=dtype, m=m, n=n, k=k, flops=speed * 1e12)


# Of FlashAttention-2, which torch has, for heads of 128: the forward causal.
_ATTENTION = (
    (512, 191, 214), (1024, 260, 260), (2048, 298, 291), (4096, 319, 310), (8192, 333, 318), (16384, 335, 322),
)  # fmt: skip

H100 = Efficiencies(
    device="NVIDIA H100 SXM, as published",
    kind="cuda",
    torch="",
    date="2025",
    bandwidth=2.9e12,  # of a copy; 3.35 TB/s are specified
    products=tuple(_published()),
    attention=tuple(
        AttentionSpeed(dtype=dtype, tokens=tokens, head_width=128, forward=forward * 1e12, backward=backward * 1e12)
        for dtype in ("bf16", "fp16")
        for tokens, forward, backward in _ATTENTION
    ),
    sources=(
        "https://github.com/openxla/xla/blob/main/xla/service/gpu/model/matmul_interpolator_data.h",
        "https://github.com/meta-pytorch/float8_experimental/pull/38",
        "https://github.com/deepseek-ai/DeepGEMM",
        "https://arxiv.org/abs/2407.08608",  # FlashAttention-3, with figures of FlashAttention-2
        "https://glennklockwood.com/garden/peak-FLOPS",  # fp32
        "https://github.com/Azure/AI-benchmarking-guide/blob/main/Azure_Results/ND_H100_v5_results.md",  # memory
    ),
    power_w=700,
)


# Formats that torch multiplies in on a kind of device; a device that lacks one has no rows of it.
_FORMATS = {"cpu": ("fp32", "bf16"), "cuda": ("bf16", "fp16", "tf32", "fp32", "fp8")}
_SIZES = {"cpu": (128, 512, 1024), "cuda": (1024, 4096, 16384)}  # of m, n and k
_TOKENS = {"cpu": (128, 512, 1024), "cuda": (1024, 4096, 16384)}
_MESSAGES = {"cpu": (1 << 16, 1 << 22), "cuda": (1 << 20, 1 << 28)}
_HEADS, _HEAD_WIDTH = 8, 128


def measure_efficiencies(
    ctx: DistContext, *, sizes: Sequence[int] | None = None, least_s: float = 0.02, date: str
) -> Efficiencies:
    """Measure the speeds of this rank's device, and of collectives where there are several ranks. A collective.

    Args:
        ctx: the context.
        sizes: of m, n and k of matmuls, and lengths of attention; by the kind of device by default.
        least_s: seconds to measure each operation for.
        date: of the measurement, as stored.
    """
    import torch

    device = ctx.device
    kind = device.type if device.type in _SIZES else "cuda"
    timed = functools.partial(_seconds, device, least_s)
    lengths = sizes or _SIZES[kind]
    products = [
        found
        for dtype in _FORMATS[kind]
        for m in lengths
        for n in lengths
        for k in lengths
        if (found := _measured_product(device, dtype, m, n, k, timed)) is not None
    ]
    attention = [
        found
        for dtype in ("bf16", "fp16", "fp32")
        if dtype in _FORMATS[kind]
        for tokens in sizes or _TOKENS[kind]
        if (found := _measured_attention(device, dtype, tokens, timed)) is not None
    ]
    size = 1 << (22 if kind == "cpu" else 28)
    values = torch.ones(size, device=device)
    bandwidth = 2 * 4 * size / timed(lambda: values.mul_(1.0))
    return Efficiencies(
        device=_device_name(device),
        kind=device.type,
        torch=str(torch.__version__),
        date=date,
        bandwidth=bandwidth,
        products=tuple(products),
        attention=tuple(attention),
        messages=tuple(_measured_messages(ctx, _MESSAGES[kind])) if ctx.world_size > 1 else (),
    )


def _device_name(device: torch.device) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"the CPU of this machine ({platform.machine()}, {torch.get_num_threads()} threads)"


def _seconds(device: torch.device, least_s: float, call: Callable[[], object]) -> float:
    """Seconds of a call: the least of three means."""
    import time

    import torch

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def mean(count: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            _ = call()
        wait()
        return (time.perf_counter() - begin) / count

    _ = mean(1)  # kernels are chosen and loaded
    count = max(1, math.ceil(least_s / max(mean(1), 1e-7)))
    return min(mean(count) for _ in range(3))


def _measured_product(
    device: torch.device, dtype: str, m: int, n: int, k: int, timed: Callable[[Callable[[], object]], float]
) -> ProductSpeed | None:
    """The speed of a matmul; None if the device has none of this dtype."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        seconds = timed(_product_call(device, dtype, m, n, k))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return ProductSpeed(dtype=dtype, m=m, n=n, k=k, flops=2 * m * n * k / seconds)


def _product_call(device: torch.device, dtype: str, m: int, n: int, k: int) -> Callable[[], object]:
    import torch

    if dtype != "fp8":
        format_ = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
        one = torch.randn(m, k, device=device).to(format_)
        other = torch.randn(n, k, device=device).to(format_)
        return lambda: one @ other.t()
    functional: Any = torch.nn.functional  # scaled_mm is of torch 2.10
    by_tensor = functional.ScalingType.TensorWise
    scale = torch.ones((), device=device)
    small = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    others = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
    return lambda: functional.scaled_mm(small, others, scale, by_tensor, scale, by_tensor)


def _measured_attention(
    device: torch.device, dtype: str, tokens: int, timed: Callable[[Callable[[], object]], float]
) -> AttentionSpeed | None:
    import torch

    format_ = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    shape = (1, _HEADS, tokens, _HEAD_WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=format_, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    try:
        out = forward()
        grad = torch.ones_like(out)
        ahead = timed(forward)
        back = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    except RuntimeError:  # out of memory, where no kernel does without a matrix of weights
        return None
    work = 2.0 * tokens**2 * _HEADS * _HEAD_WIDTH
    return AttentionSpeed(
        dtype=dtype, tokens=tokens, head_width=_HEAD_WIDTH, forward=work / ahead, backward=2.5 * work / back
    )


def _measured_messages(ctx: DistContext, sizes: Iterable[int]) -> Iterator[MessageSpeed]:
    import time

    import torch

    from accel.collectives import gather, reduce
    from accel.process import wait_for_everyone

    def seconds(call: Callable[[], object]) -> float:
        least = math.inf
        for _ in range(4):
            wait_for_everyone(ctx)
            begin = time.perf_counter()
            _ = call()
            if ctx.device.type != "cpu":
                torch.accelerator.synchronize(ctx.device)
            least = min(least, time.perf_counter() - begin)
        return least

    for size in sizes:
        values = torch.ones(size // 4, device=ctx.device)
        part = values[: size // 4 // ctx.world_size].clone()
        calls: dict[str, Callable[[], object]] = {
            "all-reduce": functools.partial(reduce, ctx, values),
            "all-gather": functools.partial(gather, ctx, part),
        }
        for operation, call in calls.items():
            yield MessageSpeed(
                operation=operation, ranks=ctx.world_size, hosts=ctx.num_nodes, bytes=size, seconds=seconds(call)
            )


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of the machine. The defaults describe hosts of eight H100.

    Attributes:
        ranks: number of GPUs of a host.
        inside: bytes a second that a GPU sends to others of its host.
        between: bytes a second that a GPU sends to other hosts.
        latency_s: seconds of a message, whatever its length.
        efficiencies: speeds of a GPU by shape; those published for H100 by default.
        flops: operations a second of a GPU to use instead, for matmuls and attention of any shape and dtype.
        power_w: power limit of a GPU in watts; the table's by default.

    Raises:
        ConfigError: a number that is not above 0, or a power limit for speeds of an unknown one.
    """

    ranks: int = 8
    inside: float = 450e9
    between: float = 50e9
    latency_s: float = 10e-6
    efficiencies: Efficiencies = H100
    flops: float | None = None
    power_w: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, "Hosts", finite=False)  # links without limits are estimates too
        if self.power_w and (self.flops or not self.efficiencies.power_w):
            got = "one speed" if self.flops else "a table without `power_w`"
            expected = "a table of speeds with its power limit, such as the one of H100"
            raise ConfigError(
                "a power limit for speeds of an unknown one", expected=expected, got=got, where="Hosts.power_w"
            )

    @property
    def clock(self) -> float:
        """The GPU's clock under its power limit, as a part of the table's.

        The power of a circuit goes with its clock and the square of its voltage, which goes with the clock. The data
        sheets of H100 SXM (700 W) and NVL (400 W) agree: 989 and 835 Tflop/s are an exponent of 0.30.
        """
        return 1.0 if self.power_w is None else min(1.0, (self.power_w / self.efficiencies.power_w) ** (1 / 3))
