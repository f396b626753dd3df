"""The deployment's id: one per database, stated in the store too, so that no other deployment cleans up there."""

from __future__ import annotations

import uuid

from sqlalchemy import insert, select

from service.database import Database
from service.tables import deployment

ONLY = 1


def deployment_id(database: Database) -> str:
    """The id; made at the first call. Replicas that share a database share it."""
    query = select(deployment.c.id).where(deployment.c.number == ONLY)
    with database.read() as connection:
        found: str | None = connection.execute(query).scalar()
    if found is not None:
        return found
    made = uuid.uuid4().hex
    with database.write() as connection:
        # A replica that starts at the same time may be first: the row says whose id it is.
        present: str | None = connection.execute(query).scalar()
        if present is not None:
            return present
        connection.execute(insert(deployment).values(number=ONLY, id=made))
    return made
