"""What Ray is asked to run: nothing to expand, nothing that is not allowed, the right requirements. A real shell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import ExportRequest, ExportSpec
from service.executors.ray_entrypoint import DOCTOR, RUN, SPEC_VARIABLE, export_job, requirements

EXPORT = "exp_01J0000000000000000000000A"


def spec(**request: Any) -> ExportSpec:
    body = {"recipe": "fake", "source": "s3://b/m", "target": {"backend": "portable"}, **request}
    return ExportSpec.model_validate(
        {
            "id": EXPORT,
            "attempt": 2,
            "createdAt": "2026-01-01T00:00:00Z",
            "request": body,
            "store": {"uri": "s3://b/results"},
        }
    )


@pytest.mark.parametrize("text", ["$HOME", "${HOME}", "${AWS_SECRET_ACCESS_KEY}", "$$", "%HOME%", "$(id)", "\\$HOME"])
def test_ray_nothing_of_a_user_is_expanded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts the values of variables through os.path.expandvars on the node."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    given = spec(labels={"a": text}, options={text: text}, source=f"s3://b/{text}")
    job = export_job(given, "ray-x")
    value = job["runtime_env"]["env_vars"][SPEC_VARIABLE]
    assert os.path.expandvars(value) == value
    assert ExportSpec.model_validate_json(value) == given
    assert job["entrypoint"] == export_job(spec(), "ray-x")["entrypoint"]


def test_ray_the_entry_point_is_constant_but_for_id_and_attempt() -> None:
    one, two = (export_job(given, "ray-x") for given in (spec(), spec(source="s3://b/;reboot", labels={"a": "\n`"})))
    assert one["entrypoint"] == two["entrypoint"] == f"{RUN}# {EXPORT} 2"
    assert one["submission_id"] == f"{EXPORT}-2"


def test_ray_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        export_job(spec(options={"a": "x" * 70_000}), "ray-x")
    with pytest.raises(InvalidRequest):
        export_job(spec(options={"a": "\n" * 40_000}), "ray-x")
    value = export_job(spec(options={"a": "x" * 50_000}), "ray-x")["runtime_env"]["env_vars"][SPEC_VARIABLE]
    subprocess.run(["true"], env={SPEC_VARIABLE: value, "RAY": json.dumps({"env_vars": value})}, check=True)


@pytest.mark.parametrize(
    ("target", "budgets", "expected"),
    [
        ({"backend": "portable"}, {}, {}),
        ({"backend": "xnnpack"}, {"hostMemory": "8GiB"}, {"entrypoint_memory": 8 * 2**30}),
        ({"backend": "cuda"}, {}, {"entrypoint_num_gpus": 1}),
        (
            {"backend": "cuda", "cudaVersion": "13.0"},
            {"hostMemory": 1, "gpuMemory": "8GiB"},
            {"entrypoint_num_gpus": 1, "entrypoint_resources": {"cuda-13.0": 0.001}, "entrypoint_memory": 1},
        ),
    ],
)
def test_ray_requirements(target: dict[str, Any], budgets: dict[str, Any], expected: dict[str, Any]) -> None:
    request = ExportRequest.model_validate({"recipe": "r", "source": "s3://b/m", "target": target, "budgets": budgets})
    assert requirements(request) == {"entrypoint_num_cpus": 1, **expected}


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a node, with a `python` that says what it got and ends as it is told."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'cp /proc/$$/environ {tmp_path}/environ; echo "$*" >{tmp_path}/arguments; pwd >{tmp_path}/folder; umask\n'
        'touch left-over; mkdir "$XDG_CACHE_HOME"; echo ready\n'
        "case $LC_ALL in wait) sleep 60 & wait ;; *) exit ${LC_ALL:-0} ;; esac\n"
    )
    program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": "/home/ray",
        "TMPDIR": str(tmp_path / "tmp"),
        "AWS_ACCESS_KEY_ID": "key",
        "HF_TOKEN": "hub token",
        "CUDA_VISIBLE_DEVICES": "1",
        "HTTPS_PROXY": "http://proxy",
        SPEC_VARIABLE: '{"a": "b c"}',
        "WEIGHTLESS_DATABASE_URL": "no",
        "WEIGHTLESS_WEBHOOK_KEY": "no",
        "RAY_AUTH_TOKEN": "no",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": "no",
        "DATABASE_PASSWORD": "no",
        "MULTI": "line\nPATH=/evil\nSECRET=no\n",
        "HOMEPAGE": "no",
        "LD_PRELOAD_NOT": "no",
    }


def environment(path: Path) -> dict[str, str]:
    pairs = (item.split("=", 1) for item in path.read_bytes().decode().split("\0") if item)
    return {name: value for name, value in pairs if name not in ("PWD", "OLDPWD", "_", "SHLVL")}


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_ray_an_exporter_gets_what_is_allowed(node: dict[str, str], tmp_path: Path, shell: str) -> None:
    done = subprocess.run([shell, "-c", f"{RUN}# {EXPORT} 1"], env=node, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "0077\nready\n"
    found = environment(tmp_path / "environ")
    folder = Path((tmp_path / "folder").read_text().strip())
    assert found == {
        "PATH": node["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SHARED_CREDENTIALS_FILE": "/home/ray/.aws/credentials",
        "AWS_CONFIG_FILE": "/home/ray/.aws/config",
        "HF_TOKEN": "hub token",
        "CUDA_VISIBLE_DEVICES": "1",
        "HTTPS_PROXY": "http://proxy",
        "PYTHONUNBUFFERED": "1",
        SPEC_VARIABLE: '{"a": "b c"}',
    }
    assert folder.parent == tmp_path / "tmp"
    assert not folder.exists()
    assert (tmp_path / "arguments").read_text() == f"-P -m exporter run --framed --spec-env {SPEC_VARIABLE}\n"


@pytest.mark.parametrize("status", [0, 1, 2, 143])
def test_ray_the_exporters_status_is_the_jobs(node: dict[str, str], tmp_path: Path, status: int) -> None:
    done = subprocess.run(["sh", "-c", RUN], env={**node, "LC_ALL": str(status)}, capture_output=True, check=False)
    assert done.returncode == status
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, 137)])
def test_ray_the_folder_goes_when_the_exporter_is_killed(
    node: dict[str, str], tmp_path: Path, number: int, status: int
) -> None:
    """Ray signals each process of the job; the shell outlives its child."""
    with subprocess.Popen(
        ["sh", "-c", RUN], env={**node, "LC_ALL": "wait"}, stdout=subprocess.PIPE, start_new_session=True
    ) as job:
        assert job.stdout is not None
        while job.stdout.readline() != b"ready\n":
            time.sleep(0.01)
        if number == signal.SIGTERM:
            os.killpg(job.pid, number)
        else:
            children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            os.kill(int(children[0]), number)
        assert job.wait(20) == status
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ray_doctor_sees_every_gpu(node: dict[str, str], tmp_path: Path) -> None:
    subprocess.run(["sh", "-c", DOCTOR], env=node, check=True, capture_output=True)
    assert "CUDA_VISIBLE_DEVICES" not in environment(tmp_path / "environ")
    assert (tmp_path / "arguments").read_text() == "-P -m exporter doctor --json\n"
