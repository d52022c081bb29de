#!/usr/bin/env bash
# A SLURM of two nodes on this machine, for one command: tests/slurm.sh COMMAND...
# Installs Debian's packages, starts the daemons in a temporary folder, waits until both nodes are idle, and runs the
# command there, with a deadline of SLURM_DEADLINE seconds (600). At the end, whatever it is, the daemons, the files and
# the packages that were not there before are removed. It starts no service and needs root: a container is meant.
# Status 77: nothing may be installed here.
set -euo pipefail

if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || command -v slurmctld > /dev/null; then
  echo "needs root, apt-get, and a machine without a SLURM of its own" >&2
  exit 77
fi
[ $# != 0 ] || { echo "no command" >&2 && exit 2; }

folder=$(mktemp -d)
chmod 711 "$folder" # munged's socket is for everyone
pids=()
installed() { dpkg-query -W -f '${db:Status-Abbrev}${binary:Package}\n' | sed -n 's/^ii //p' | sort; }

clean() {
  trap - EXIT INT TERM
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do # munged, which the others need, is the last
    kill "${pids[i]}" 2> /dev/null || true
    wait "${pids[i]}" 2> /dev/null || true
  done
  cat "$folder/hosts" > /etc/hosts # a container's cannot be replaced, only written
  installed | comm -13 "$folder/packages" - | xargs -r apt-get purge -q -y &>> "$folder/apt.log"
  for user in slurm munge; do
    grep -q "^$user:" "$folder/passwd" || deluser --quiet --system "$user" &>> "$folder/apt.log" || true
  done
  [ -e "$folder/policy" ] || rm -f /usr/sbin/policy-rc.d
  rm -rf "$folder"
  echo "slurm: all removed after $SECONDS s" >&2
}
installed > "$folder/packages"
cp /etc/hosts /etc/passwd "$folder"
[ ! -e /usr/sbin/policy-rc.d ] || touch "$folder/policy"
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# dpkg asks this script before it starts a service: none.
[ -e "$folder/policy" ] || { printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d; }
export DEBIAN_FRONTEND=noninteractive
{ timeout 100 apt-get update -q && timeout 300 apt-get install -q -y --no-install-recommends slurmctld slurmd slurm-client munge; } &> "$folder/apt.log" ||
  { tail -n 20 "$folder/apt.log" >&2 && exit 77; }
echo "slurm: $(slurmctld -V) installed after $SECONDS s" >&2

echo "127.0.0.1 n1 n2" >> /etc/hosts # JAX looks for the first node by its name
cat > "$folder/slurm.conf" << END
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n[1-2] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[16818-16819] CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$folder/slurm.conf
mkdir "$folder/state" "$folder/n1" "$folder/n2"

start() { # what it says is in a file of the folder
  "$@" &>> "$folder/said.log" &
  pids+=($!)
}
head -c 1024 /dev/urandom > "$folder/munge.key"
chmod 600 "$folder/munge.key"
start munged --foreground --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
  --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
deadline=$((SECONDS + 60))
until [ -S "$folder/munge.socket" ] || ((SECONDS > deadline)); do sleep 0.1; done
start slurmctld -D
start slurmd -D -N n1
start slurmd -D -N n2
until [ "$(timeout 10 sinfo -h -N -t idle -o %N 2> /dev/null | tr '\n' ' ')" = "n1 n2 " ]; do
  ((SECONDS < deadline)) || { tail -n 20 "$folder"/*.log >&2 && exit 1; }
  sleep 0.5
done
echo "slurm: two idle nodes after $SECONDS s" >&2

status=0
timeout --kill-after=10 "${SLURM_DEADLINE:-600}" "$@" || status=$?
echo "slurm: the command ended with $status after $SECONDS s" >&2
exit "$status"
