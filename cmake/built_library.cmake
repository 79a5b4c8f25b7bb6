# mla::mla from MLA_LIBRARY_DIR, a build folder of this tree, for the Python package alone: nothing of the library is
# compiled again.
set(archive ${MLA_LIBRARY_DIR}/src/libmla.a)
if(NOT EXISTS ${archive})
  message(FATAL_ERROR "MLA_LIBRARY_DIR is ${MLA_LIBRARY_DIR}, which holds no src/libmla.a: build the target mla there first")
endif()
set(MLA_BUILD_CLI OFF)
set(MLA_BUILD_TESTS OFF)
include(dependencies)
include(targets)
find_package(CUDAToolkit QUIET)

add_library(mla STATIC IMPORTED)
add_library(mla::mla ALIAS mla)
set_target_properties(mla PROPERTIES IMPORTED_LOCATION ${archive})
target_compile_features(mla INTERFACE cxx_std_20)
target_include_directories(mla INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(mla INTERFACE Threads::Threads hwy::hwy
  $<$<TARGET_EXISTS:CUDA::cudart_static>:CUDA::cudart_static>)  # of no use to a library without CUDA, and no harm
