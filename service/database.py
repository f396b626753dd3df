"""One database connection pool for SQLite or PostgreSQL, and the two kinds of transaction: `read` and `write`.

SQLite runs in WAL mode, where a transaction that reads first and writes later fails at once when another one wrote in
between, whatever the busy timeout. Every write therefore starts with BEGIN IMMEDIATE.
"""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from exporter.contract.errors import DiskFull, InternalError, WeightlessError

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 30
"""How long a SQLite connection waits for another process's write."""
_MIGRATION_LOCK = 0x5745_4947
"""Key of the PostgreSQL advisory lock under which replicas migrate one after the other."""


class Database:
    """An engine and its transactions. `path` is the database file for SQLite, None for PostgreSQL."""

    def __init__(self, url: str, *, pool_size: int = 16) -> None:
        self.url = make_url(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        if not self.sqlite and self.url.get_backend_name() != "postgresql":
            raise InternalError(
                f"the database {self.url.get_backend_name()} is not supported",
                hint="Set WEIGHTLESS_DATABASE_URL to sqlite:///FILE or postgresql+psycopg://….",
            )
        if not self.sqlite and self.url.drivername == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        if self.sqlite and self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.engine = _sqlite_engine(self, pool_size) if self.sqlite else _postgres_engine(self, pool_size)
        # Our SQLite connections commit each statement by themselves unless a transaction was begun.
        self._reader = self.engine if self.sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        # One writer at a time in this process: threads queue here in order instead of polling SQLite's lock.
        self._turn = threading.Lock()
        self._turn_file = Path(f"{self.url.database}.turn")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection whose statements commit one by one; for single reads."""
        with _wrapped(), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write: committed at the end, rolled back on any error."""
        if self.sqlite:
            with (
                _wrapped(),
                self._turn,
                self._file_turn(),
                self.engine.connect().execution_options(immediate=True) as connection,
                connection.begin(),
            ):
                yield connection
        else:
            with _wrapped(), self.engine.begin() as connection:
                yield connection

    @contextmanager
    def _file_turn(self) -> Iterator[None]:
        """This process's turn to write. Without it processes would poll SQLite's lock, and some would starve."""
        with self._turn_file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def ping(self) -> None:
        """Raise `WeightlessError` unless the database answers."""
        with self.read() as connection:
            connection.execute(text("SELECT 1"))

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to `revision` (upwards). Replicas that start together take turns."""
        with self.write() as connection:
            if not self.sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            command.upgrade(self._alembic(connection), revision)

    def downgrade(self, revision: str) -> None:
        """Take the schema back to `revision`."""
        with self.write() as connection:
            command.downgrade(self._alembic(connection), revision)

    def dispose(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    def _alembic(self, connection: Connection) -> Config:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        return config


def _sqlite_engine(database: Database, pool_size: int) -> Engine:
    engine = create_engine(
        database.url,
        pool_size=pool_size,
        max_overflow=64,
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False, "isolation_level": None},
    )

    def connected(connection: Any, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            f"busy_timeout={BUSY_SECONDS * 1000}",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("immediate"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begin)
    return engine


def _postgres_engine(database: Database, pool_size: int) -> Engine:
    return create_engine(database.url, pool_size=pool_size, max_overflow=32, pool_pre_ping=True)


@contextmanager
def _wrapped() -> Iterator[None]:
    try:
        yield
    except WeightlessError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull("the database's disk is full") from error
        raise InternalError(f"the database's directory cannot be used: {error.strerror}") from error
    except OperationalError as error:
        if "full" in str(error.orig):
            raise DiskFull("the database's disk is full") from error
        raise InternalError(
            f"the database did not answer: {type(error.orig).__name__}",
            hint="Try again; if it goes on, check WEIGHTLESS_DATABASE_URL.",
            incident="database-unreachable",
            httpStatus=503,
        ) from error
    except DBAPIError as error:
        raise InternalError(f"the database refused a statement: {type(error.orig).__name__}") from error
    except SQLAlchemyError as error:
        raise InternalError(f"the database layer failed: {type(error).__name__}") from error


Clock = Callable[[], float]
"""Seconds since the epoch."""
