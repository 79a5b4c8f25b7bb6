# Debian 12: libhwy-dev 1.0.3, nlohmann-json3-dev 3.11.2, libcli11-dev 2.1.2, libgtest-dev 1.12.1.
find_package(Threads REQUIRED)
find_package(hwy 1.0.3 REQUIRED CONFIG)
# Highway 1.0.3's TruncateTo from 32 to 8 bits permutes words where it means bytes on this target, which compilers take for
# -march=native on many machines: three of four codes would be wrong.
#
# SVE's vectors have no size that a compiler knows, and kernels here hold vectors in arrays: ARM is served by NEON.
set_property(TARGET hwy::hwy APPEND PROPERTY INTERFACE_COMPILE_DEFINITIONS
  "HWY_DISABLED_TARGETS=(HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
find_package(nlohmann_json 3.11 REQUIRED CONFIG)
if(MLA_BUILD_CLI)
  find_package(CLI11 2.1 REQUIRED CONFIG)
endif()
if(MLA_BUILD_TESTS)
  find_package(GTest 1.12 REQUIRED CONFIG)
endif()
if(MLA_MPI AND NOT MLA_SANITIZE)  # MPI's own leaks and races are not ours to report
  find_package(MPI QUIET COMPONENTS CXX)
endif()
