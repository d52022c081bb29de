#!/usr/bin/env bash
# Run what .ci/run leaves out, in fresh environments, at the end of a larger piece of work and before a release:
# the slow tests that hold no number (lessons, notebooks, the site, README's and the guides' commands, pages of
# experiments, clients of the server), and the default suite with the oldest Python and jax. About an hour on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environments=$(mktemp -d)
trap 'rm -rf "$environments"' EXIT
newest=$(tests/find_python.sh 3.13 || command -v python3)
"$newest" -m venv "$environments/newest"
(
  source "$environments/newest/bin/activate"
  python -m pip install -q -e ".[test,docs]"
  python -m pip install -q "lm-eval[api]>=0.4.9" openai || echo "no lm-eval and openai here"
  python -m pytest -m "slow and not numbers"
)
tests/versions.sh 3.11 0.10.2
