"""Bearer tokens: made and revoked beside the database, stored as digests only.

A token is `wl_{id}_{secret}`: the id finds the row, and the SHA-256 of the secret (32 random bytes: no slow hash is
needed) is compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import RowMapping, insert, select, update

from exporter.contract.errors import InvalidRequest, NotFound
from service.database import Clock, Database
from service.tables import tokens

SCOPES = ("read", "read-all", "submit", "cancel", "delete", "admin")
_SHAPE = re.compile(r"wl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token without its secret."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    revoked_at: float | None


class TokenTable:
    """The table of tokens."""

    def __init__(self, database: Database, *, clock: Clock = time.time) -> None:
        self._db = database
        self._clock = clock

    def create(self, name: str, scopes: Sequence[str], *, expires_in: int | None = None) -> tuple[TokenRow, str]:
        """A new token: its row, and the token itself, which is not kept anywhere."""
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise InvalidRequest(f"a token's scopes are some of {', '.join(SCOPES)}", field="scopes")
        token_id, secret, now = secrets.token_hex(8), secrets.token_urlsafe(32), self._clock()
        row = TokenRow(token_id, name, tuple(scopes), now, None if expires_in is None else now + expires_in, None)
        with self._db.write() as connection:
            connection.execute(
                insert(tokens).values(
                    id=row.id,
                    digest=_digest(secret),
                    name=row.name,
                    scopes=list(row.scopes),
                    created_at=row.created_at,
                    expires_at=row.expires_at,
                )
            )
        return row, f"wl_{token_id}_{secret}"

    def revoke(self, token_id: str) -> None:
        """Make a token useless from now on; `NotFound` where there is none."""
        with self._db.write() as connection:
            changed = connection.execute(
                update(tokens)
                .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
                .values(revoked_at=self._clock())
            )
            if (
                changed.rowcount == 0
                and connection.execute(select(tokens.c.id).where(tokens.c.id == token_id)).first() is None
            ):
                raise NotFound(f"there is no token {token_id}", hint="`weightless token list` shows them.")

    def all(self) -> list[TokenRow]:
        """Every token, newest first."""
        with self._db.read() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created_at.desc())).mappings().all()
        return [_row(row) for row in rows]

    def find(self, token: str) -> TokenRow | None:
        """The row of a token whose secret is right, revoked and expired ones included; None for anything else."""
        match = _SHAPE.fullmatch(token)
        if match is None:
            return None
        token_id, secret = match.groups()
        with self._db.read() as connection:
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).mappings().first()
        # The comparison happens for unknown ids too, so that timing does not tell which ids exist.
        stored = _digest("") if row is None else row["digest"]
        same = hmac.compare_digest(stored, _digest(secret))
        return _row(row) if row is not None and same else None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _row(row: RowMapping) -> TokenRow:
    return TokenRow(
        row["id"], row["name"], tuple(row["scopes"]), row["created_at"], row["expires_at"], row["revoked_at"]
    )
