# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on a real S3 server of this process: parts, conditional locks, listings, deletions."""

import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catching import assert_raises
from ckpt_helpers import CPU

import accel
from accel.errors import CheckpointError
from accel.storage import RemotePath, as_place
from accel.testing import simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the server's and the client's own
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def bucket() -> Iterator[RemotePath]:
    # here, so that workers that run no test of this file import neither
    pytest.importorskip("s3fs", reason="needs accel-torch[s3]")
    server = pytest.importorskip("moto.server", reason="needs moto, an S3 server; it is in accel-torch[tests]")
    import fsspec

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # S3 compares and writes in one; the server here does both in a thread for each request
    response = importlib.import_module("moto.s3.responses").S3Response
    put, one_at_a_time = response.put_object, threading.Lock()

    def put_object(self: Any) -> Any:
        with one_at_a_time:
            return put(self)

    response.put_object = put_object
    running = server.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    options = {
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
    }
    fsspec.filesystem("s3", **options).call_s3("create_bucket", Bucket="bucket")
    yield RemotePath("s3://bucket", options)
    running.stop()
    response.put_object = put


def keys(place: RemotePath) -> list[str]:
    import fsspec

    store = fsspec.filesystem("s3", **place.options)
    store.invalidate_cache()
    start = place.url.removeprefix("s3://") + "/"
    return sorted(name.removeprefix(start) for name in store.find(start))


def test_two_ranks_save_keep_and_load(bucket: RemotePath) -> None:
    out = bucket / "run"
    assert accel.latest_checkpoint(out) is None

    def items(value: float) -> dict[str, Any]:
        return {"x": torch.full((4,), value), "y": {"z": torch.full((5,), value)}}

    def body(ctx: accel.DistContext) -> None:
        for step in range(3):
            mode: Any = "async" if step == 1 else "sync"
            accel.save_state(ctx, out, items(step), step=step, keep=2, mode=mode)
        accel.save_state(ctx, out, items(7), step=2, keep=2)

    simulate(body, 2)
    found = keys(out)
    assert {key.partition("/")[0] for key in found} == {"step-00000001", "step-00000002"}
    assert len(found) == 4  # and no step holds files of two saves
    path = accel.latest_checkpoint(out, verify=True)
    assert path == out / "step-00000002"
    loaded: Any = accel.load_state(CPU, path, items(0))
    assert torch.equal(loaded["y"]["z"], torch.full((5,), 7.0))


def test_a_large_object_is_uploaded_in_parts_and_a_failed_one_leaves_none(bucket: RemotePath) -> None:
    import fsspec

    out = bucket / "parts"
    store = fsspec.filesystem("s3", **bucket.options)
    value = torch.arange(5_000_000, dtype=torch.float64)
    path = accel.save_state(CPU, out, {"x": value}, step=0)
    name = next(key for key in keys(out) if key.endswith(".safetensors"))
    assert store.info(f"bucket/parts/{name}")["ETag"].strip('"').endswith("-3")  # three parts of at most 16 MiB
    loaded: Any = accel.load_state(CPU, path, {"x": torch.zeros(1)})
    assert torch.equal(loaded["x"], value)

    def broken() -> Iterator[memoryview]:
        yield from [memoryview(bytes(20 << 20))] * 2
        raise ConnectionError("unplugged")

    from accel.storage._objects import upload

    class Chunks(list[memoryview]):
        def __iter__(self) -> Iterator[memoryview]:
            return broken()

    with assert_raises(CheckpointError, problem="unplugged"):
        upload(out / "step-00000001", "tensors", Chunks([memoryview(b"")]))
    assert "step-00000001/tensors" not in keys(out)
    assert store.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", []) == []


def test_the_next_save_aborts_uploads_of_dead_writers_in_its_folder_alone(bucket: RemotePath) -> None:
    import fsspec

    out = bucket / "aborted"
    store = fsspec.filesystem("s3", **bucket.options)
    for key in ("aborted/step-00000001/tensors", "aborted-not/step-00000001/tensors"):
        store.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    accel.save_state(CPU, out, {"x": torch.ones(2)}, step=2)
    left = store.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    assert [each["Key"] for each in left] == ["aborted-not/step-00000001/tensors"]
    store.call_s3("abort_multipart_upload", Bucket="bucket", Key=left[0]["Key"], UploadId=left[0]["UploadId"])


def test_of_many_writers_at_once_one_gets_the_lock(bucket: RemotePath) -> None:
    out, outcomes = bucket / "locks", list[str]()
    ready = threading.Barrier(4)

    def take() -> None:
        ready.wait()
        try:
            locks.append(as_place(out).lock())
        except CheckpointError as error:
            outcomes.append(str(error))

    locks: list[Any] = []
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(locks) == 1
    assert len(outcomes) == 3
    assert all("another writer is saving" in outcome for outcome in outcomes)
    locks[0].release()
    assert keys(out) == []


def test_a_bucket_that_is_not_there_is_an_error_with_its_url(bucket: RemotePath) -> None:
    place = RemotePath("s3://nowhere/run", bucket.options)
    with assert_raises(CheckpointError, where="s3://nowhere/run"):
        accel.save_state(CPU, place, {"x": 1}, step=0)
