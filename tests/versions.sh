#!/usr/bin/env bash
# Run the default suite with other versions of Python and jax, each in a fresh virtual environment, and print a table.
#
#   tests/versions.sh                           every line of VERSIONS
#   tests/versions.sh 3.12 0.11.2               this one; "newest" is the newest jax that has this Python
#   tests/versions.sh 3.13 newest -n 1 -k lora  what follows the two versions goes to pytest
#
# Interpreters are found by tests/find_python.sh.
# ENVIRONMENTS=DIR keeps the virtual environments there, two gigabytes each; what is there already is used as it is.
# Peers (torch, transformers) are not installed: golden files speak for them. A line that fails makes the status 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VERSIONS=("3.12 0.11.2" "3.12 newest" "3.13 newest")
if [ $# -gt 0 ]; then
  VERSIONS=("$1 ${2:?a version of jax, or newest}")
  shift 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
environments=${ENVIRONMENTS:-$scratch}
table=()
status=0

make_environment() {  # INTERPRETER JAX FOLDER
  [ -e "$3/done" ] && return
  local jax="jax==$2"
  [ "$2" = newest ] && jax=jax
  rm -rf "$3"
  "$1" -m venv "$3" && "$3/bin/python" -m pip install -q "$jax" -e ".[test]" && touch "$3/done"
}

show_versions() {  # PYTHON
  "$1" -c 'import platform
from importlib.metadata import version
print(", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in ("jax", "flax", "numpy"))]))'
}

count() {  # ATTRIBUTE REPORT: print a number of a JUnit report, whose totals are in its first line
  sed -n "1,/<testsuite /s/.*<testsuite [^>]* $1=\"\([0-9]*\).*/\1/p" "$2"
}

add_line() {  # ENVIRONMENT PASSED FAILED SKIPPED TIME
  table+=("$(printf '%-55s %8s %8s %8s %8s' "$@")")
}

run_suite() {  # PYTHON JAX PYTEST_ARGUMENT...: one line of the table; not 0 if it is not a line of success
  local name="Python $1, jax $2" environment="$environments/$1-$2" report="$scratch/$1-$2.xml" interpreter began ended
  if ! interpreter=$(tests/find_python.sh "$1"); then
    add_line "$name: no python$1 here" - - - -
    return 1
  fi
  if ! make_environment "$interpreter" "$2" "$environment"; then
    add_line "$name: does not install" - - - -
    return 1
  fi
  name=$(show_versions "$environment/bin/python")
  echo "== $name"
  began=$SECONDS
  "$environment/bin/python" -m pytest --junitxml "$report" "${@:3}"
  ended=$?
  if [ -s "$report" ]; then
    local failed=$(($(count failures "$report") + $(count errors "$report"))) skipped
    skipped=$(count skipped "$report")
    add_line "$name" $(($(count tests "$report") - failed - skipped)) "$failed" "$skipped" "$((SECONDS - began)) s"
  else
    add_line "$name" - "ended: $ended" - "$((SECONDS - began)) s"
  fi
  return "$ended"
}

for version in "${VERSIONS[@]}"; do
  read -r python jax <<< "$version"
  run_suite "$python" "$jax" "$@" || status=1
  # The next one needs the space.
  [ -n "${ENVIRONMENTS:-}" ] || rm -rf "$environments/$python-$jax"
done
echo
printf '%-55s %8s %8s %8s %8s\n' environment passed failed skipped time
printf '%s\n' "${table[@]}"
exit "$status"
