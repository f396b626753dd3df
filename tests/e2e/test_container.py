"""The Dockerfile's `service` target, built by Debian's buildah as an operator without a Docker engine would."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/weightless-service"
MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.buildah,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="buildah's chroot isolation needs root"),
]


@dataclass(frozen=True)
class Container:
    """A working container of the image; `run` starts a command in it as the image's own user."""

    buildah: Sequence[str]
    name: str

    def command(self, *words: str, env: Sequence[str] = ()) -> list[str]:
        variables = [word for pair in env for word in ("--env", pair)]
        return [*self.buildah, "run", "--isolation", "chroot", *variables, self.name, "--", *words]

    def run(self, *words: str, env: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words, env=env), capture_output=True, text=True, timeout=120)


def working_folder(disk: Path) -> Path:
    """Where the build stores: the driver vfs copies every layer whole, so memory if there is plenty, else disk."""
    memory = Path("/dev/shm")
    plenty = memory.is_dir() and min(shutil.disk_usage(memory).free, psutil.virtual_memory().available) > 6 * 2**30
    return Path(tempfile.mkdtemp(prefix="weightless-image-", dir=memory)) if plenty else disk


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    work = working_folder(tmp_path_factory.mktemp("image"))
    script = Path(__file__).with_name("build_service_image.sh")
    built = subprocess.run([script, ROOT, work, IMAGE], capture_output=True, text=True, timeout=570)
    if built.returncode != 0:
        shutil.rmtree(work)
        pytest.fail(built.stdout[-2000:] + built.stderr[-4000:])
    buildah = ["buildah", "--storage-driver", "vfs", "--root", str(work / "storage"), "--runroot", str(work / "run")]
    started = subprocess.run([*buildah, "from", "--pull-never", IMAGE], capture_output=True, text=True, check=True)
    yield Container(buildah, started.stdout.strip())
    # Images, containers and their storage all lie in this folder.
    shutil.rmtree(work)


def test_command_line_works_as_an_ordinary_user(container: Container) -> None:
    shown = container.run("weightless", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "serve" in shown.stdout
    assert "submit" in shown.stdout
    assert container.run("id", "-u").stdout.strip() == "10001"


def test_image_has_no_torch_and_nothing_of_the_build(container: Container) -> None:
    absent = container.run(
        "python3", "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('executorch'))"
    )
    assert absent.stdout.strip() == "None None"
    left = container.run(
        "sh", "-c", "ls -A /src /dist /opt/build 2>/dev/null; cat /etc/pip.conf 2>/dev/null; env | grep PIP_"
    )
    assert left.stdout == ""


def test_refuses_to_listen_beyond_loopback_without_authentication(container: Container) -> None:
    refused = container.run("weightless", "serve")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "WEIGHTLESS_AUTH" in refused.stderr


def test_serves_health_and_pages_and_stops_on_sigterm(container: Container) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = ["WEIGHTLESS_HOST=127.0.0.1", f"WEIGHTLESS_PORT={port}"]
    server = subprocess.Popen(
        container.command("weightless", "serve", env=env), stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert _healthy(port, server) == 200
        for path in ("/", "/static/weightless.css"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                assert len(answer.read()) > 1000
    finally:
        os.killpg(server.pid, 15)
        _, errors = server.communicate(timeout=30)
    assert b"Traceback" not in errors


def _healthy(port: int, server: subprocess.Popen[bytes]) -> int:
    for _ in range(300):
        assert server.poll() is None, "the service ended by itself"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                return int(answer.status)
        except OSError:
            time.sleep(0.1)
    pytest.fail("the service did not answer /healthz")
