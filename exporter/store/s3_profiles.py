"""What the known S3 implementations can and cannot do; `auto` starts from the endpoint's name and asks for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from exporter.contract.objects import Capabilities, MiB


@dataclass(frozen=True, slots=True)
class Profile:
    """Limits to plan by; `crc64nvme` None: ask the server at the first write and remember."""

    name: str
    capabilities: Capabilities
    crc64nvme: bool | None = None


_S3 = Capabilities()
PROFILES: dict[str, Profile] = {
    "aws": Profile("aws", _S3, crc64nvme=True),
    "minio": Profile("minio", _S3),
    "r2": Profile("r2", Capabilities(equal_parts=True), crc64nvme=None),
    # Google's XML interface: no x-amz-checksum-*, no UploadPartCopy, preconditions under names of its own.
    "gcs": Profile("gcs", Capabilities(conditional_put=False, crc64nvme=False, copy_part=False), crc64nvme=False),
    # Pacific (16.2) ignores x-amz-checksum-*; later releases know it: asked.
    "ceph": Profile("ceph", _S3),
    "scaleway": Profile("scaleway", Capabilities(max_parts=1_000, crc64nvme=False), crc64nvme=False),
    "auto": Profile("auto", _S3),
}
_HOSTS = {
    "amazonaws.com": "aws",
    "amazonaws.com.cn": "aws",
    "r2.cloudflarestorage.com": "r2",
    "storage.googleapis.com": "gcs",
    "scw.cloud": "scaleway",
}
SMALLEST_PART = 5 * MiB


def profile_for(name: str, endpoint: str | None) -> Profile:
    """The profile of that name; `auto` is told from the endpoint's host, and is AWS where there is no endpoint."""
    if name != "auto":
        return PROFILES[name]
    if endpoint is None:
        return PROFILES["aws"]
    host = (urlsplit(endpoint).hostname or "").lower()
    for suffix, known in _HOSTS.items():
        if host == suffix or host.endswith("." + suffix):
            return PROFILES[known]
    return PROFILES["auto"]
