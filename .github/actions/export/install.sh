#!/bin/bash
# Installs the client of this very commit into a virtual environment of its own: the job's Python stays as it is.
set -euo pipefail
venv=$RUNNER_TEMP/weightless
if [ -x "$venv/bin/weightless" ]; then
    exit 0
fi
python=${WEIGHTLESS_PYTHON:-}
for candidate in python3.12 python3.11 python3; do
    if [ -z "$python" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
        python=$candidate
    fi
done
if [ -z "$python" ]; then
    echo "::error title=No usable Python::The Weightless action needs Python 3.11 or 3.12 on the runner. Run actions/setup-python before it, or set its input python."
    exit 2
fi
echo "::group::Install the Weightless client"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$GITHUB_ACTION_PATH/../../.."
"$venv/bin/weightless" --version || true
echo "::endgroup::"
