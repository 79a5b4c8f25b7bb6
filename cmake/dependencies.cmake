# Debian 12: libhwy-dev 1.0.3, libdnnl-dev 2.6.3, nlohmann-json3-dev 3.11.2, libcli11-dev 2.1.2, libgtest-dev 1.12.1.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX) # oneDNN's Debian build threads with it; libmla holds it to one thread a call
find_package(hwy 1.0.3 REQUIRED CONFIG)
find_package(dnnl 2.6 REQUIRED CONFIG)
find_package(nlohmann_json 3.11 REQUIRED CONFIG)
if(MLA_BUILD_CLI)
  find_package(CLI11 2.1 REQUIRED CONFIG)
endif()
if(MLA_BUILD_TESTS)
  find_package(GTest 1.12 REQUIRED CONFIG)
endif()
