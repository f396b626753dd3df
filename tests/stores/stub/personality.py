"""How a scripted S3 server behaves: the known differences between stores, and faults by call number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Fault(Enum):
    """What goes wrong at one request."""

    UNAVAILABLE = "503 SlowDown, nothing done"
    INTERNAL = "500 InternalError, nothing done"
    RESET = "the connection breaks before an answer, nothing done"
    LOST_REPLY = "done, then the connection breaks instead of an answer"
    SLOW = "done, answered after a pause"
    SILENT = "no answer until the client gives up, nothing done"
    TRUNCATED = "done, the answer's body breaks off"
    WRONG_ETAG = "done, answered with another ETag"
    ERROR_200 = "status 200 with an error document, nothing done"
    EXPIRED = "403 ExpiredToken, nothing done"
    DENIED = "403 AccessDenied, nothing done"
    GARBAGE = "200 with a body that is not XML, nothing done"
    CORRUPT = "the body that arrives has one bit flipped"


@dataclass(frozen=True)
class Personality:
    """One kind of store. The default is strict and knows everything, like AWS."""

    name: str = "strict"
    checksums: Literal["verify", "ignore", "refuse"] = "verify"
    refuse_status: int = 501
    trailer_status: int = 411
    """Answer to any `aws-chunked` body or trailer, as R2, GCS, Ceph and others give over HTTPS."""
    min_part: int = 5_242_880
    max_parts: int = 10_000
    equal_parts: bool = False
    page_size: int = 1_000
    conditional: Literal["honour", "ignore"] = "honour"
    list_uploads: bool = True
    empty_complete_etag: bool = False
    etag_is_md5: bool = True
    keeps_metadata: bool = True
    parts_in_order: bool = False
    """Never answers a part that comes before part 1, as rclone's `serve s3`."""
    copy_part: bool = True
    lists_checksums: bool = True
    """Whether ListParts tells the CRC64NVME of parts that came with one."""


STRICT = Personality()
CEPH = Personality("ceph", checksums="ignore", empty_complete_etag=True)
R2 = Personality("r2", equal_parts=True, trailer_status=501)
GCS = Personality("gcs", checksums="refuse", refuse_status=400, trailer_status=401, copy_part=False)
SCALEWAY = Personality("scaleway", checksums="refuse", max_parts=1_000, trailer_status=403)
NO_CHECKSUMS = Personality("no-checksums", checksums="refuse", refuse_status=501)
FORBIDS_CHECKSUMS = Personality("forbids-checksums", checksums="refuse", refuse_status=403)
ENCRYPTED = Personality("encrypted", checksums="ignore", etag_is_md5=False)
FORGETFUL = Personality("forgetful", keeps_metadata=False)
IN_ORDER = Personality("in-order", parts_in_order=True)
NO_CONDITION = Personality("no-condition", conditional="ignore")

COMPLETE_ONES = (STRICT, CEPH, R2, GCS, SCALEWAY, NO_CHECKSUMS, FORBIDS_CHECKSUMS, ENCRYPTED, FORGETFUL)
"""Personalities that every conforming use of a store must work on."""
