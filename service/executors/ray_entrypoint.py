"""What Ray is asked to run: a constant shell script, the export's id and attempt, and what a node must have.

The shell takes away every variable that an exporter may not have, gives it a folder of its own and removes that at the
end. Credentials of the store are the node's; the specification, without secrets, is one variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import ExportRequest, ExportSpec
from service.executors.environment import NAMES, PREFIXES

SPEC_VARIABLE = "WEIGHTLESS_SPEC"
STOP_SECONDS = 8
"""Seconds that Ray waits between SIGTERM and SIGKILL: a cancelled export is `cancelled` within ten."""
MAX_SPEC = 60_000
"""Characters of a spec. Linux limits one variable to 128 KiB, and Ray repeats it, escaped, in another one."""
LABEL_SHARE = 0.001
"""How much of a custom resource such as `cuda-13.0` an export takes: it is a mark, not a quantity."""

# TERM must not end the shell before its child; a trap that does something is reset in the child, unlike an ignored
# signal. `unset` sees plain identifiers only. The interpreter is the one that Ray itself runs on, which is found by the
# library that the job's supervisor has loaded: PATH often names another one, or none.
_PREPARE = f"""umask 077; ulimit -c 0; trap : TERM INT HUP
p=$(sed -n 's|.* \\(/.*\\)/lib/python[^/]*/[a-z]*-packages/ray/_raylet[.]so$|\\1/bin/python|p' /proc/$PPID/maps)
p=$(printf '%s\\n' "$p" | head -n 1); [ -x "$p" ] || p=python
for n in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p'); do
case $n in HOME|TMPDIR|{SPEC_VARIABLE}|{"|".join(sorted(NAMES))}|{"|".join(f"{prefix}*" for prefix in PREFIXES)}) ;;
*) unset "$n" ;; esac; done
d=$(mktemp -d "${{TMPDIR:-/tmp}}/weightless-ray.XXXXXXXX") || exit 125
export AWS_SHARED_CREDENTIALS_FILE="${{AWS_SHARED_CREDENTIALS_FILE:-$HOME/.aws/credentials}}"
export AWS_CONFIG_FILE="${{AWS_CONFIG_FILE:-$HOME/.aws/config}}" PYTHONUNBUFFERED=1
export HOME="$d" TMPDIR="$d" XDG_CACHE_HOME="$d/cache" CUDA_CACHE_PATH="$d/cuda"
"""
_FINISH = """status=$?; rm -rf "$d"; exit $status
"""
RUN = f'{_PREPARE}cd "$d" && "$p" -P -m exporter run --framed --spec-env {SPEC_VARIABLE}\n{_FINISH}'
# Ray hides the GPUs of a job that asks for none; the description is to see them.
DOCTOR = f'{_PREPARE}unset CUDA_VISIBLE_DEVICES; cd "$d" && "$p" -P -m exporter doctor --json\n{_FINISH}'


def job_id(export_id: str, attempt: int) -> str:
    """The submission id: Ray never takes one twice."""
    return f"{export_id}-{attempt}"


def export_job(spec: ExportSpec, executor_id: str) -> dict[str, Any]:
    """The body of a submission; `executor_id` in its metadata says whose it is."""
    text = json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_unset=True), separators=(",", ":"))
    # Ray expands $NAME in the values of variables with the node's environment, credentials included.
    text = text.replace("$", "\\u0024")
    if len(json.dumps(text)) > MAX_SPEC * 2 or len(text) > MAX_SPEC:
        raise InvalidRequest(
            f"the request is larger than the {MAX_SPEC} characters that fit a Ray job",
            hint="Move large options into a file of the source.",
        )
    return {
        "submission_id": job_id(spec.id, spec.attempt),
        "entrypoint": f"{RUN}# {spec.id} {spec.attempt}",
        "runtime_env": {"env_vars": {SPEC_VARIABLE: text, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}},
        "metadata": {"export": spec.id, "attempt": str(spec.attempt), "executor": executor_id},
        **requirements(spec.request),
    }


def requirements(request: ExportRequest) -> Mapping[str, Any]:
    """What a node must have free: a processor, for CUDA a GPU, the memory budget, and the CUDA version's resource."""
    needed: dict[str, Any] = {"entrypoint_num_cpus": 1}
    if request.target.backend == "cuda":
        needed["entrypoint_num_gpus"] = 1
        if request.target.cuda_version is not None:
            needed["entrypoint_resources"] = {f"cuda-{request.target.cuda_version}": LABEL_SHARE}
    if request.budgets.host_memory is not None:
        needed["entrypoint_memory"] = request.budgets.host_memory
    return needed


def doctor_job(submission_id: str, node_id: str) -> dict[str, Any]:
    """A job that describes one node."""
    return {
        "submission_id": submission_id,
        "entrypoint": DOCTOR,
        "entrypoint_label_selector": {"ray.io/node-id": node_id},
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "2"}},
    }
