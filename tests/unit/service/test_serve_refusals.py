"""`weightless serve` with settings that cannot work: a sentence and status 2, before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from service.__main__ import listen, main


def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: Path, **settings: object) -> str:
    monkeypatch.setenv("WEIGHTLESS_DATA_DIR", str(data))
    monkeypatch.setenv("WEIGHTLESS_PORT", "0")
    for name, value in settings.items():
        monkeypatch.setenv(f"WEIGHTLESS_{name}", str(value))
    assert main() == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "error: " in said
    assert "hint: " in said
    return said


def test_a_data_directory_that_is_a_file(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "data directory" in refusal(monkeypatch, capfd, tmp_path / "file")
    assert "data directory" in refusal(monkeypatch, capfd, tmp_path / "file" / "below")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is where nobody can write, root included")
def test_a_data_directory_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "data directory" in refusal(monkeypatch, capfd, Path("/proc/weightless"))
    assert "data directory" in refusal(monkeypatch, capfd, Path("/proc/self"))


def test_a_port_that_is_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refusal(monkeypatch, capfd, tmp_path / "data", PORT=port)
    assert not (tmp_path / "data").exists()


def test_a_host_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refusal(monkeypatch, capfd, tmp_path / "data", HOST="no-such-host.invalid", AUTH="token")
    assert "no-such-host.invalid" in said


def test_every_address_of_a_name_is_listened_on() -> None:
    sockets = listen("127.0.0.1", 0)
    try:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
    finally:
        for each in sockets:
            each.close()
