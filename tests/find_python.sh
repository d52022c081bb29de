#!/usr/bin/env bash
# Print the path of a Python X.Y that runs, which a shim of pyenv may not: tests/find_python.sh 3.13
#
# It is looked for in the folders of PYTHONS (separated by colons), on PATH, and in pyenv's root, in this order.
set -uo pipefail
IFS=: read -ra folders <<< "${PYTHONS:-}:$PATH"
folders+=("${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin)
for folder in "${folders[@]}"; do
  path=$folder/python$1
  [ -x "$path" ] && "$path" -c "" 2> /dev/null && echo "$path" && exit
done
exit 1
