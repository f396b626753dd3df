"""What the kernel says of a stream's memory: a gigabyte goes through, the peak stays within the stated bound."""

from __future__ import annotations

import json
import subprocess
import sys

from exporter.contract.objects import MiB
from exporter.contract.segments import MAX_CHUNK

STREAM = """
import json, os, sys
from pathlib import Path
from exporter.contract.objects import Part, StoredObject, Upload, Capabilities
from exporter.contract.segments import Segment, SegmentName, MAX_CHUNK
from exporter.stream.multipart import WeightStream

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

class Nothing:
    capabilities = Capabilities()
    total = 0
    def uri(self, key): return "null://" + key
    def create_upload(self, key, **_): return Upload(key, "1")
    def upload_part(self, upload, number, body, *, crc64nvme):
        self.total += len(body)
        return Part(number, len(body), "e", crc64nvme)
    def complete_upload(self, upload, parts, *, crc64nvme): return StoredObject("k", self.total)
    def abort_upload(self, upload): ...

class Quiet:
    def opened(self, *_): ...
    def completed(self, *_): ...
    def aborted(self, *_): ...
    def sent(self, *_): ...

chunk = bytearray(os.urandom(MAX_CHUNK))
def segment(n, size):
    def read():
        left = size
        while left:
            chunk[0:8] = n.to_bytes(8, "big")
            yield memoryview(chunk)[: min(left, MAX_CHUNK)]
            left -= min(left, MAX_CHUNK)
    return Segment((SegmentName(f"s{n}"),), size, read)

sizes = [n * 1_000_003 % (40 << 20) for n in range(1, 51)]
before = peak()
with WeightStream(Nothing(), "k", part_size=None, max_buffer=int(sys.argv[1]), listener=Quiet()) as weights:
    weights.open([])
    weights.send(segment(n, size) for n, size in enumerate(sizes))
    weights.finish(name="m.ptd", layout="flat-tensor/fqn", used=None)
print(json.dumps({"grown": peak() - before, "sent": weights.bytes_sent, "buffers": weights.peak_buffer}))
"""
SLACK = 16 * MiB
"""For the interpreter, threads and tables."""


def test_the_process_grows_by_no_more_than_the_buffer() -> None:
    bound = 80 * MiB
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(bound)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["sent"] > 800 * MiB
    assert figures["buffers"] <= bound
    assert 32 * MiB < figures["grown"] <= bound + MAX_CHUNK + SLACK
