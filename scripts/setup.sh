#!/usr/bin/env bash
# Installs what the build needs on Debian 12, if it is not there yet, and the packages in more_packages. Sourced by run.sh
# and test.sh.
set -euo pipefail

packages=(g++ cmake ninja-build libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev "${more_packages[@]}")
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  echo "installing: ${missing[*]}"
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# ccache is used where it is, and not asked for.
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
