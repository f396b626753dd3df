#!/bin/bash
# Static checks of workflows, actions and shell scripts, without network: zizmor, GitHub's JSON Schemas, shellcheck, mypy.
# The tools come with the extra `dev`. Usage: check_workflows.sh [BIN_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}
mapfile -t workflows < <(git ls-files '.github/workflows/*.yml')
mapfile -t actions < <(git ls-files '.github/actions/*/action.yml')
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)

"$bin/check-jsonschema" --quiet --builtin-schema vendor.github-workflows "${workflows[@]}"
"$bin/check-jsonschema" --quiet --builtin-schema vendor.github-actions "${actions[@]}"
"$bin/zizmor" --offline --no-progress --quiet "${workflows[@]}" "${actions[@]}"

# The action's program is no part of the package, so mypy's own settings do not reach it.
MYPYPATH=.github/actions/export "$bin/mypy" --no-error-summary .github/actions/export/run.py .github/actions/export/export_action

# Scripts inside workflow and action files: shellcheck sees each as the runner runs it, expressions as words.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/python" - "$folder" "${workflows[@]}" "${actions[@]}" <<'PYTHON'
import pathlib, re, sys

import yaml

folder = pathlib.Path(sys.argv[1])
for path in sys.argv[2:]:
    document = yaml.safe_load(pathlib.Path(path).read_text())
    jobs = document.get("jobs", {"action": document.get("runs", {})})
    for name, job in jobs.items():
        for number, step in enumerate(job.get("steps", [])):
            if "run" in step:
                script = re.sub(r"\$\{\{.*?\}\}", "expression", step["run"])
                file = folder / f"{pathlib.Path(path).parent.name}-{pathlib.Path(path).stem}-{name}-{number}.sh"
                file.write_text(f"#!/bin/bash\nset -eo pipefail\n{script}\n")
PYTHON
"$bin/shellcheck" --severity=style "${scripts[@]}" "$folder"/*.sh
