"""A migrated database of each kind, and a factory of exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.spec import ExportRequest
from service.database import Database
from service.jobs import Export, new_id
from tests.postgres_server import PostgresServer, find_programs

MakeExport = Callable[..., Export]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server programs are not installed (apt-get install postgresql)")
    with PostgresServer(programs) as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with tables, to be copied: a copy is quicker than the migrations."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A PostgreSQL database with tables, to be copied."""
    url = postgres.database()
    _migrated(url)
    return url


def _migrated(url: str) -> None:
    database = Database(url)
    database.migrate()
    database.dispose()


KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=KINDS)
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'test.db'}"
    else:
        url = request.getfixturevalue("postgres").database()
    database = Database(url)
    yield database
    database.dispose()


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database with tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{shutil.copy(request.getfixturevalue('sqlite_template'), tmp_path / 'test.db')}"
    else:
        url = request.getfixturevalue("postgres").database(request.getfixturevalue("postgres_template"))
    database = Database(url)
    yield database
    database.dispose()


@pytest.fixture
def sqlite(sqlite_template: Path, tmp_path: Path) -> Iterator[Database]:
    """An SQLite database with tables, for what does not differ between databases."""
    database = Database(f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'test.db')}")
    yield database
    database.dispose()


@pytest.fixture
def make_export() -> MakeExport:
    """A queued export; keywords are fields of the record, `body` fields of its request."""

    def make(body: dict[str, Any] | None = None, **fields: Any) -> Export:
        request = {"recipe": "huggingface", "source": "file:///m", "target": {"backend": "xnnpack"}, **(body or {})}
        data = ExportRequest.model_validate(request).model_dump(mode="json", by_alias=True)
        data["target"] = request["target"]
        data["budgets"] = {}
        given = {"id": new_id(), "owner": "local", "caller": {"kind": "local"}, "created_at": 1_700_000_000.0, **fields}
        return Export(request=data, **given)

    return make
