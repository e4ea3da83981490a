# SPDX-License-Identifier: Apache-2.0
"""A server of weights and samples in another process, reached by HTTP: accel's own, and the client that trainers use.

A request is one verb of the protocol: `POST /begin`, `/load` (a safetensors file), `/commit`, `/sample`. An answer of
another status than 200 is the server's error as JSON. The token is in each request.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from safetensors.torch import load, save
from torch import Tensor

from accel.context import DistContext, context_first
from accel.endpoints import post
from accel.errors import AccelError, ConfigError, ServerError
from accel.errors._base import ErrorRecord, describe
from accel.post_training._local import Check, Layout, LocalServer
from accel.post_training._sample import DrawnTokens, Place, SampleOptions, SampleRequest, samples_of
from accel.post_training._samples import Samples, Version
from accel.terminal import show_limit

T = TypeVar("T")
A = TypeVar("A")
_PATIENCE_S = 60.0  # of the server, for the next bytes of a request


# Bodies of the requests commit and sample, and of the answer to sample.
_Commit = tuple[str, int]
_Asked = tuple[list[SampleRequest], SampleOptions]
_Drawn = tuple[list[DrawnTokens], Version]


class HttpServer:
    """Servers of `serve` in other processes, as one; made by `http`."""

    layout: Layout = "model"
    checks: frozenset[Check] = frozenset({"digest", "dtype", "version"})
    place: Place = "remote"

    def __init__(self, urls: Sequence[str], token: str, timeout_s: float) -> None:
        self._urls, self._token, self._timeout_s = urls, token, timeout_s

    def begin(self, version: Version) -> None:
        """Begin to send weights; see `WeightServer`."""
        self._send_all("begin", msgspec.json.encode(version))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors as a safetensors file; see `WeightServer`."""
        self._send_all("load", as_safetensors(tensors))

    def commit(self, digest: str, count: int) -> None:
        """Have each server compare what it holds; see `WeightServer`."""
        self._send_all("commit", msgspec.json.encode((digest, count)))

    def sample(self, ctx: DistContext, requests: Sequence[SampleRequest], options: SampleOptions) -> Samples:
        """Draw samples, a part of them from each server; see `SampleServer`. No communication with ranks."""
        count = len(self._urls)
        parts = {url: list(requests[at::count]) for at, url in enumerate(self._urls) if at < len(requests)}

        def ask(part: tuple[str, list[SampleRequest]]) -> _Drawn:
            url, asked = part
            answer = self._ask(url, "sample", msgspec.json.encode((asked, options)))
            with understood(url):
                rows, version = msgspec.json.decode(answer, type=_Drawn)
                if len(rows) != len(asked):
                    raise ValueError(f"{len(rows)} samples for {len(asked)} requests")
                if any(len(row.tokens) != len(row.logprobs) for row in rows):
                    raise ValueError("a log-probability is missing")
                return rows, version

        found = in_threads(ask, parts.items())
        versions = {url: version for url, (_, version) in zip(parts, found, strict=True)}
        if len({*versions.values()}) > 1:
            raise ServerError(
                "servers have different weights",
                expected="one version",
                got=", ".join(f"{url}: {each}" for url, each in versions.items()),
                where="sample",
                fix="Publish the weights again, or name the version: sample(version=...).",
            )
        rows = [found[at % count][0][at // count] for at in range(len(requests))]
        version = found[0][1] if found else options.version
        return samples_of(requests, rows, version, limited=options.is_limited)

    def _send_all(self, verb: str, body: bytes) -> None:
        _ = in_threads(lambda url: self._ask(url, verb, body), self._urls)

    def _ask(self, url: str, verb: str, body: bytes) -> bytes:
        status, answer = request(f"{url}/{verb}", body, self._timeout_s, self._token)
        if status == 200:
            return answer
        try:
            problem = msgspec.json.decode(answer, type=ErrorRecord)
        except msgspec.DecodeError:
            problem = _failure(f"the server has refused {verb}", got=f"HTTP status {status}")
        raise ServerError(
            problem.problem,
            expected=problem.expected,
            got=problem.got,
            where=f"{url}, {problem.where or verb}",
            fix=problem.fix,
        )


def as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as a file of safetensors."""
    return save({name: each.detach().cpu().contiguous() for name, each in tensors.items()})


def request(
    url: str, body: bytes, timeout_s: float, token: str, kind: str = "application/octet-stream"
) -> tuple[int, bytes]:
    """Return status and body of the answer to a body of a media type; raise `ServerError` for none in time."""
    try:
        return post(url, body, timeout_s, {"Authorization": f"Bearer {token}", "Content-Type": kind})
    except OSError as error:
        raise ServerError(
            "a server does not answer",
            expected=f"an answer within {show_limit(timeout_s)}",
            got=f"{type(error).__name__}: {error}",
            where=url,
            fix="Start it again, and publish the weights to it.",
        ) from error


@contextmanager
def understood(url: str) -> Generator[None]:
    """Raise `ServerError` for an answer that is not what its request is answered by."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:  # msgspec's are ValueErrors
        raise ServerError(
            "a server has answered something else",
            expected="the answer to the request",
            got=f"{type(error).__name__}: {error}",
            where=url,
            fix="Check that this kind of server listens at the address, and its version.",
        ) from error


def in_threads(call: Callable[[A], T], values: Iterable[A]) -> list[T]:
    """Call a function for each value at the same time; raise the first error, and begin no call after it."""
    given = list(values)
    with ThreadPoolExecutor(max_workers=min(64, len(given)) or 1) as pool:
        return list(pool.map(call, given))


def http(urls: str | Sequence[str], *, token: str, timeout_s: float = 300.0) -> HttpServer:
    """Return servers of other processes, started by `serve`. No communication yet.

    Args:
        urls: address of a server, such as "http://host:8000", or of several: each gets all weights, and draws a part of
            the samples. A draw does not depend on the server.
        token: the servers' token.
        timeout_s: most seconds of a request. One that takes longer is a `ServerError`.

    Raises:
        ConfigError: an address that is neither http nor https, or an empty token.
    """
    listed = [urls] if isinstance(urls, str) else list(urls)
    if not listed:
        raise ConfigError("the list of addresses is empty", expected="http://host:port", got="none", where="http(urls)")
    check_address(listed, timeout_s, "http", "urls")
    _check_token(token, "http")
    return HttpServer([url.rstrip("/") for url in listed], token, timeout_s)


def check_address(urls: Sequence[str], timeout_s: float, call: str, name: str) -> None:
    """Raise `ConfigError` for addresses that are neither http nor https, and for no time to answer."""
    for url in urls:
        try:
            parts = urlsplit(url)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, AttributeError, TypeError):  # another port, or no text
            is_right = False
        if not is_right:
            raise ConfigError(
                "the address is not valid", expected="http://host:port", got=repr(url), where=f"{call}({name})"
            )
    if not timeout_s > 0:
        raise ConfigError(
            "no time to answer", expected="seconds above 0", got=repr(timeout_s), where=f"{call}(timeout_s=)"
        )


@context_first
@contextmanager
def serve(
    ctx: DistContext,
    server: LocalServer,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    most_bytes: int = 2**31,
) -> Generator[str]:
    """Serve a model of this process by HTTP while the block runs; the block gets the address.

    Requests are answered one at a time. Traffic is not encrypted: use it in a network that you trust.

    Args:
        ctx: the context of this process, such as `accel.single()`.
        server: a plain model, from `servers.local`.
        token: a secret that clients send.
        host: address to listen at; "0.0.0.0" for other machines.
        port: port; 0 for a free one.
        most_bytes: largest request, above `publish(chunk_bytes=)` and the largest tensor.

    Raises:
        ConfigError: a model that is spread over ranks, or an empty token.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> with post_training.servers.serve(ctx, post_training.servers.local(model), token="secret") as url:
        ...     client = post_training.servers.http(url, token="secret")
        ...     done = post_training.publish(ctx, client, nn.Linear(2, 1), version=post_training.Version("run", 1))
        >>> done.count
        2
    """
    _check_token(token, "serve")
    if server.place != "rank":
        raise ConfigError("a spread model cannot be served", expected="a plain model", got=server.place, where="serve")
    shown = f"[{host}]" if ":" in host else host
    with _Listener((host, port), ctx, server, token, most_bytes) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), name="accel-serve", daemon=True)
        thread.start()
        try:
            yield f"http://{shown}:{listener.server_address[1]}"
        finally:
            listener.shutdown()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that hangs does not hold the end

    def __init__(
        self, address: tuple[str, int], ctx: DistContext, server: LocalServer, token: str, most_bytes: int
    ) -> None:
        super().__init__(address, _Handler)
        self.ctx, self.server, self.token, self.most_bytes = ctx, server, token, most_bytes
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    wbufsize = -1  # headers and body in one packet: two would wait 40 ms for each other
    server: _Listener  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        """Answer one verb."""
        given = self.headers.get("Authorization", "")
        size = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return self._answer(403, _failure("the token is not the server's", fix="Pass the token of serve(token=)."))
        if not size.isdecimal() or int(size) > self.server.most_bytes:
            most = f"at most {self.server.most_bytes} bytes"
            return self._answer(413, _failure("a request of a wrong size", expected=most, got=size or "no length"))
        body = self.rfile.read(int(size))
        try:
            with self.server.lock:
                answer = self._run(self.path.strip("/"), body)
        except AccelError as error:
            return self._answer(400, describe(error))
        except Exception as error:  # whatever a model raises: the client has to know
            return self._answer(500, _failure("the server has failed", got=f"{type(error).__name__}: {error}"))
        return self._answer(200, answer)

    def _run(self, verb: str, body: bytes) -> object:
        to = self.server.server
        if verb == "begin":
            return to.begin(msgspec.json.decode(body, type=Version))
        if verb == "load":
            return to.load(load(body))
        if verb == "commit":
            return to.commit(*msgspec.json.decode(body, type=_Commit))
        if verb == "sample":
            requests, options = msgspec.json.decode(body, type=_Asked)
            rows = to.draw(self.server.ctx, requests, options)
            _ = samples_of(requests, rows, to.version, limited=False)  # refuses NaN, which JSON does not have
            return rows, to.version
        raise ServerError("no such request", expected="begin, load, commit or sample", got=verb, where="serve")

    def _answer(self, status: int, value: object) -> None:
        data = msgspec.json.encode(value)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        _ = self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def _failure(problem: str, **fields: str) -> ErrorRecord:
    return ErrorRecord(ServerError.__name__, problem, **fields)


def _check_token(token: str, call: str) -> None:
    if not token.strip() or not token.isascii() or not token.isprintable():
        raise ConfigError(
            "the token is not valid",
            expected="printable ASCII characters, such as secrets.token_urlsafe()",
            got="nothing" if not token.strip() else "other characters",
            where=f"{call}(token=)",
        )
