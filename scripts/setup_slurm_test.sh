#!/usr/bin/env bash
# Installs Debian's Slurm and munge for tests/slurm, which run a cluster of two nodes on this machine out of a temporary folder.
# Nothing else is changed: no service is started, no file below /etc is written by us. Fails with the reason where it cannot.
set -euo pipefail

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

missing=0
for program in slurmctld slurmd sbatch munged; do command -v "$program" >/dev/null || missing=1; done
[[ $missing == 1 ]] || exit 0
[[ $(id -u) == 0 ]] || fail "slurm-wlm and munge are not installed, and installing them needs root"
command -v apt-get >/dev/null || fail "slurm-wlm and munge are not installed, and there is no apt-get to install them with"
export DEBIAN_FRONTEND=noninteractive
# Packages would start their daemons where there is an init system; a policy for the time of the installation says no.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
log=$(mktemp)
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge procps iproute2; } >"$log" 2>&1 ||
  fail "slurm-wlm and munge could not be installed: $(tail -n 1 "$log")"
rm -f "$log"
