"""An exporter killed in mid-upload, and the next attempt of the same export: only what the store lacks is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exporter.contract.objects import MiB
from exporter.contract.spec import ExportSpec
from tests.integration.conftest import EXPORT_ID, make_spec
from tests.integration.test_export_s3 import model, plain_client, read, scripted
from tests.stores.stub.personality import Fault
from tests.stores.stub.server import BUCKET

__all__ = ["model"]
KEY = f"weights/{EXPORT_ID}-1/model.ptd"
PART = 5 * MiB


def test_the_next_attempt_sends_what_is_missing(
    model: Path, tmp_path: Path, export_process: Callable[..., Any]
) -> None:
    with scripted(tmp_path) as (endpoint, trust, keys, stub):
        settings = {"endpoint": endpoint, "caBundle": trust, "partSize": PART, "maxBuffer": 3 * PART}

        def start(attempt: int, resume: dict[str, Any] | None = None) -> Any:
            spec = make_spec("exported-program", model, "portable", f"s3://{BUCKET}/p")
            data = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
            data["store"].update(settings)
            data |= {"attempt": attempt} | ({"resume": resume} if resume else {})
            return export_process(ExportSpec.model_validate(data), environment=keys)

        stub.fault_for = lambda number, operation: Fault.SILENT if held() >= 3 else None

        def held() -> int:
            return sum(len(upload.parts) for upload in stub.state.uploads.values())

        first = start(1)
        opened = next(event for event in first.events() if event["type"] == "upload")
        until = time.monotonic() + 60
        while held() < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        first.child.kill()
        first.child.wait()
        stub.fault_for = lambda number, operation: None
        stub.log.clear()

        second = start(2, {"key": KEY, "uploadId": opened["uploadId"], "partSize": opened["partSize"]})
        events = list(second.events())
        assert second.child.wait(60) == 0, json.dumps(events[-1])
        uploads = [(event["state"], event["uploadId"]) for event in events if event["type"] == "upload"]
        assert uploads == [("opened", opened["uploadId"]), ("completed", opened["uploadId"])]
        client = plain_client(endpoint, trust, keys)
        manifest = json.loads(read(client, f"p/exports/{EXPORT_ID}/manifest.json"))
        client.close()
        (described,) = manifest["data"]
        assert described["urls"] == [f"s3://{BUCKET}/p/{KEY}"]
        assert described["size"] == len(stub.state.objects[f"p/{KEY}"].body)
        assert "CreateMultipartUpload" not in stub.log
        assert stub.log.count("UploadPart") == -(-described["size"] // PART) - 3
        assert events[-1]["bytesUploaded"] < described["size"] - 3 * PART + MiB
        assert stub.state.uploads == {}
