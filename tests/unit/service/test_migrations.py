"""The schema by migrations equals the tables in code, upwards and downwards, on both databases."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from service.database import Database
from service.job_store import JobStore
from service.tables import metadata
from tests.unit.service.conftest import MakeExport


def tables(database: Database) -> set[str]:
    return set(inspect(database.engine).get_table_names()) - {"alembic_version"}


def test_up_down_and_up_again(empty_database: Database, make_export: MakeExport) -> None:
    empty_database.migrate()
    assert tables(empty_database) == set(metadata.tables)
    empty_database.downgrade("base")
    assert tables(empty_database) == set()
    empty_database.migrate()
    assert tables(empty_database) == set(metadata.tables)
    stored, _ = JobStore(empty_database).submit(make_export())
    assert JobStore(empty_database).get(stored.id) == stored


def test_migrations_equal_the_tables(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_migrating_twice_changes_nothing(database: Database) -> None:
    database.migrate()
    assert tables(database) == set(metadata.tables)
