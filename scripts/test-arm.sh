#!/usr/bin/env bash
# Builds what computes for ARM (aarch64, NEON) with Debian's cross compiler and runs its tests in an emulator, qemu-user, which is
# some twenty times as slow as a machine.
cd "$(dirname "$0")/.."
if ! dpkg --print-foreign-architectures | grep -qx arm64; then
  root=()
  ((EUID == 0)) || root=(sudo)
  "${root[@]}" dpkg --add-architecture arm64
fi
more_packages=(g++-aarch64-linux-gnu qemu-user libhwy-dev:arm64 libgtest-dev:arm64)
source scripts/setup.sh
cmake --preset arm64 "${launcher[@]}" >/dev/null
cmake --build --preset arm64
MLA_TEST_EMULATED=1 ctest --preset arm64 -j"$(nproc)"
