"""An exporter that does what its request's options say, for tests of what surrounds an export.

Options: `events` (event lines to write, each with its `type`), `log` (text for the log), `segments` (an export with
that many is stored), `failure` (the error to end with), `seconds` (how long to stay before the end). It speaks the
exporter's real protocol (contract.md) through the contract's own classes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

from exporter.attempt import Keys
from exporter.contract.errors import Cancelled
from exporter.contract.events import EventLog, now
from exporter.contract.machine import BackendReport, MachineReport, RecipeReport
from exporter.contract.manifest import (
    Data,
    ExportInfo,
    Manifest,
    Method,
    Program,
    Resources,
    SegmentInfo,
    SegmentKey,
    Source,
    StageUse,
    Toolchain,
    Verification,
    digest,
)
from exporter.contract.spec import ExportSpec
from exporter.store.open import open_store

PROGRAM = b"a program that is none"


def doctor() -> int:
    """Offer one recipe, `scripted`, that takes any options."""
    recipe = RecipeReport(
        name="scripted",
        description="Does what its options say.",
        options_schema={"type": "object"},
        example={"options": {}},
        available=True,
    )
    report = MachineReport(recipes=(recipe,), backends=(BackendReport(name="portable", available=True),))
    sys.stdout.write(report.model_dump_json(by_alias=True))
    return 0


def run() -> int:
    """One scripted export."""
    spec = ExportSpec.model_validate_json(sys.stdin.buffer.read())
    options: dict[str, Any] = spec.request.options
    log = EventLog(lambda line: os.write(1, line))

    def stop(number: int, frame: object) -> None:
        log.emit("failed", error=Cancelled("the exporter was told to stop").as_dict())
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    log.emit("stage", name="resolving", state="started")
    sys.stderr.write(options.get("log", ""))
    sys.stderr.flush()
    for event in options.get("events", []):
        fields = dict(event)
        log.emit(fields.pop("type"), **fields)
    time.sleep(float(options.get("seconds", 0)))
    if "failure" in options:
        log.emit("failed", error={"hint": "", "retryable": False, **options["failure"]})
        return 1
    uri, manifest_digest = store_export(spec, options)
    log.emit("finished", manifest_uri=uri, manifest_digest=manifest_digest, bytes_uploaded=1, bytes_reused=0)
    return 0


def store_export(spec: ExportSpec, options: dict[str, Any]) -> tuple[str, str]:
    """Put a small program, a data file and a manifest into the store; the manifest's URI and digest."""
    store, folder = open_store(spec.store), f"exports/{spec.id}"
    count, name = int(options.get("segments", 2)), options.get("tensor", "layers.{}.weight")
    body = b"".join(index.to_bytes(16, "little") for index in range(count))
    segments = tuple(
        SegmentInfo(
            offset=16 * index,
            size=16,
            digest=digest(body[16 * index : 16 * index + 16]),
            names=(SegmentKey(key=name.format(index), fqn=name.format(index), dtype="float32", shape=(2, 2)),),
        )
        for index in range(count)
    )
    put(store, f"{folder}/{spec.attempt}/model.pte", PROGRAM)
    put(store, f"weights/{spec.id}-{spec.attempt}/model.ptd", body)
    manifest = Manifest(
        export=ExportInfo(
            id=spec.id,
            attempt=spec.attempt,
            recipe=spec.request.recipe,
            created_at=now(),
            source=Source(uri=spec.request.source),
            target={"backend": "portable"},
        ),
        program=Program(
            name="model.pte",
            media_type="application/vnd.pytorch.executorch.pte",
            digest=digest(PROGRAM),
            size=len(PROGRAM),
            urls=(f"{spec.attempt}/model.pte",),
            methods=(Method(name=options.get("method", "forward")),),
        ),
        data=(
            Data(
                name="model.ptd",
                layout="flat-tensor/fqn",
                size=len(body),
                header_digest=digest(b""),
                header_size=0,
                urls=(Keys.data_url(store, f"weights/{spec.id}-{spec.attempt}/model.ptd"),),
                segment_base_offset=0,
                segments=segments,
            ),
        ),
        toolchain=Toolchain(weightless="0"),
        resources=Resources(bytes_uploaded=len(body), stages=(StageUse(name="compiling", milliseconds=1500),)),
        verification=(Verification(method="forward", status="passed", max_relative_error="0.0021", against="eager"),),
    )
    data = manifest.canonical()
    put(store, f"{folder}/manifest.json", data)
    return store.uri(f"{folder}/manifest.json"), "sha256:" + hashlib.sha256(data).hexdigest()


def put(store: Any, key: str, data: bytes) -> None:
    """One object, whole."""
    store.put(key, data, media_type="application/octet-stream")


if __name__ == "__main__":
    sys.exit(doctor() if "doctor" in sys.argv else run())
