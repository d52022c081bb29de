#!/bin/bash
# Run every benchmark of this folder that needs no accelerator beside its peers, and write one table.
#
#   bash experiments/benchmarks/all.sh RESULTS [--nanogpt DIR] [--text FILE]
#
# The peers need pip install -e ".[bench,serve]" "transformers[serving]" transformer-lens, and a checkout of nanoGPT in DIR.
# RESULTS/table.md is the table, RESULTS/PART.md and PART.log each part and what it wrote to stderr. A part that is already
# there is not measured again, so that an interrupted call continues: delete the file to repeat it. Each part is killed at
# its deadline; one that fails, or lacks a peer or a file, becomes a line that says so. The deadlines add up to 40 minutes.
set -uo pipefail

results=${1:?a directory for the results is needed}
shift
nanogpt=() text=
while [ $# -gt 0 ]; do
  case $1 in
    --nanogpt) nanogpt=(--nanogpt "${2:?--nanogpt needs a directory}") ;;
    --text) text=$(realpath "${2:?--text needs a file}") ;;
    *) echo "got $1; the options are --nanogpt DIR and --text FILE" >&2; exit 2 ;;
  esac
  shift 2
done
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$results" || exit
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}

part() { # NAME SECONDS SCRIPT ARGUMENTS...: measure a part, unless it is there
  local name=$1 seconds=$2 script=$3 began=$SECONDS status
  shift 3
  [ -e "$results/$name.md" ] && return
  echo "$name: at most $seconds s" >&2
  timeout -s KILL "$seconds" python "$here/$script" "$@" >"$results/$name.part" 2>"$results/$name.log" </dev/null
  status=$?
  {
    printf '## %s\n\n`%s %s`, %d s\n\n' "$name" "$script" "$*" $((SECONDS - began))
    cat "$results/$name.part"
    case $status in
      0) ;;
      137) printf '\nStopped after %d s, its deadline.\n' "$seconds" ;;
      *) printf '\nFailed with status %d: %s\n' "$status" "$(grep . "$results/$name.log" | tail -n 1)" ;;
    esac
  } >"$results/$name.md"
  rm "$results/$name.part"
}

missing() { # NAME REASON: a part that cannot be measured here
  [ -e "$results/$1.md" ] || printf '## %s\n\nNot measured: %s.\n' "$1" "$2" >"$results/$1.md"
}

# The systems that are here. Without a checkout training.py leaves nanoGPT out by itself.
if python -c "import torch, transformers" 2>/dev/null; then
  systems=()
else
  systems=(--systems jaxgpt)
  nanogpt=()
  missing peers "torch or transformers is not installed, so that jaxgpt is alone below"
fi

# Part, seconds at most. Not here: parallel.py, which has no peer; gpu.py; and most of serving.py, 8 minutes a round.
part training-small     150 training.py "${nanogpt[@]}" "${systems[@]}" --rounds 5
part training-wide      260 training.py "${nanogpt[@]}" "${systems[@]}" --rounds 3 --seconds 4 --shape wide
part profile-small       60 training.py --profile
part profile-wide        90 training.py --profile --shape wide
part compilation        240 compilation.py "${nanogpt[@]}" "${systems[@]}" --rounds 1
part startup             90 startup.py --rounds 3 --trains 2
part products            60 products.py
if [ ${#systems[@]} -eq 0 ]; then
  part sampling         240 sampling.py --weights int8 --rounds 1
  part serving          240 serving.py --rounds 1 --clients 1 8 --system transformers-batching --system jaxgpt
  part interop          120 interop.py --size 124M --rounds 2
  part interventions    150 interventions.py --model gpt2 --rounds 2 --parts 4
else
  for name in sampling serving interop interventions; do missing $name "torch or transformers is not installed"; done
fi
if [ -n "$text" ]; then
  part speedrun         120 speedrun.py "$text" --seeds 5
  part speedrun-long    420 speedrun.py "$text" --experiment "$here/../speedrun_shakespeare_long.py" --seeds 1
  part data             160 data.py "$text" --megabytes 20 --gigabytes 1 --rounds 2
else
  for name in speedrun speedrun-long data; do missing $name "it needs --text FILE"; done
fi

{
  printf '# Benchmarks, %s\n\n' "$(date -u +%Y-%m-%d)"
  PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python - <<'VERSIONS'
import importlib.metadata, platform
from processor import describe_processor
print(f"{describe_processor()}. Python {platform.python_version()}", end="")
for name in ("jaxgpt", "jax", "torch", "transformers"):
    try:
        print(f", {name} {importlib.metadata.version(name)}", end="")
    except importlib.metadata.PackageNotFoundError:
        print(f", no {name}", end="")
print(".\n")
VERSIONS
  for name in peers training-{small,wide} profile-{small,wide} compilation startup products \
    sampling serving interop interventions speedrun speedrun-long data; do
    [ -e "$results/$name.md" ] && cat "$results/$name.md" && echo
  done
} >"$results/table.md"
echo "$results/table.md" >&2
