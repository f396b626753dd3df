"""Whose a key is: keys say which attempt of which export wrote them, since listings carry no metadata (contract.md)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from exporter.artifact.ports import StoreReads
from exporter.contract.errors import IllegalState
from exporter.contract.spec import EXPORT_ID

EXPORTS = "exports/"
WEIGHTS = "weights/"
INDEX = "weights/by-layout/"
DEPLOYMENT = ".weightless.json"
_WEIGHTS = re.compile(rf"weights/({EXPORT_ID.pattern})-([0-9]{{1,6}})/.+")
_FILES = re.compile(rf"exports/({EXPORT_ID.pattern})/([0-9]{{1,6}})/.+")


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """One attempt of one export."""

    export: str
    attempt: int

    @property
    def weights(self) -> str:
        """The folder of its weights."""
        return f"{WEIGHTS}{self.export}-{self.attempt}/"


def owner_of(key: str) -> Owner | None:
    """The attempt that `key` belongs to; None for every key that is not of our making."""
    match = _WEIGHTS.fullmatch(key) or _FILES.fullmatch(key)
    return None if match is None else Owner(match.group(1), int(match.group(2)))


def check_deployment(store: StoreReads, deployment: str | None) -> None:
    """`IllegalState` where the store's prefix says that another deployment keeps its exports there."""
    found = store.head(DEPLOYMENT)
    if deployment is None or found is None:
        return
    try:
        stated = json.loads(store.read(DEPLOYMENT, 0, min(found.size, 4096)))["deployment"]
    except (ValueError, KeyError, TypeError):
        stated = None
    if stated != deployment:
        raise IllegalState(
            f"{store.uri(DEPLOYMENT)} names another deployment: nothing was touched",
            hint="Check WEIGHTLESS_STORE and WEIGHTLESS_DATABASE_URL: they belong together.",
        )
