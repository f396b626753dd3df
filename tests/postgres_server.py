"""A PostgreSQL server of its own, from the system's server programs, in a temporary directory and on a socket alone."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg


def find_programs() -> Path | None:
    """The directory of initdb and postgres, newest version first; None where there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    return Path(program).parent if program else None


class PostgresServer:
    """Started by `with`. `database()` gives the URL of a new, empty database."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # A socket's path has at most 107 bytes, so it cannot lie in pytest's own directories.
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._made = 0

    def __enter__(self) -> Self:
        if os.geteuid() == 0:  # the server refuses to run as root
            owner = pwd.getpwnam("postgres")
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        data = self._folder / "data"
        self._run("initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
        options = (
            f"-c listen_addresses='' -c unix_socket_directories={self._folder} -c fsync=off -c max_connections=200"
        )
        self._run("pg_ctl", "-D", str(data), "-w", "-l", str(self._folder / "log"), "-o", options, "start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self, template: str | None = None) -> str:
        """SQLAlchemy URL of a new database, empty or a copy of the one whose URL is `template`."""
        self._made += 1
        name = f"test{self._made}"
        source = "template1" if template is None else template.partition("?")[0].rpartition("/")[2]
        with psycopg.connect(host=str(self._folder), user="postgres", dbname="postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {source}")  # type: ignore[arg-type]
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.geteuid() == 0:
            command = ["runuser", "-u", "postgres", "--", *command]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/")
