# Sourced by the other scripts: makes .venv beside the project and installs fmeg into it, with the extra named first.
# A second run with nothing changed installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "error: fmeg needs Python 3.11 or newer as python3; found $(python3 --version 2>&1)" >&2
  exit 1
fi
if [ ! -x .venv/bin/pip ]; then
  echo "making .venv"
  python3 -m venv .venv || { echo "error: python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }
fi
stamp=".venv/installed-$1"
wanted=$(cat pyproject.toml constraints.txt | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing fmeg and what it needs into .venv (some minutes the first time)"
  .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
  echo "$wanted" > "$stamp"
fi
