# CUDA: found, never required. MLA_HAVE_CUDA says whether the CUDA targets are built.
set(MLA_HAVE_CUDA OFF)
if(MLA_CUDA AND NOT MLA_SANITIZE)  # compute-sanitizer looks after kernels
  include(CheckLanguage)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.5)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has C++20
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
      find_package(CUDAToolkit REQUIRED)
      # Matrix products are cuBLASLt's: its header is needed here, the library when a GPU is used.
      find_path(MLA_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
      if(MLA_CUBLASLT_INCLUDE)
        set(MLA_HAVE_CUDA ON)
      else()
        message(STATUS "CUDA backend left out: no cublasLt.h")
      endif()
      find_path(MLA_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
    else()
      message(STATUS "CUDA kernels left out: nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, they need 12.5")
    endif()
  else()
    message(STATUS "CUDA kernels left out: no nvcc")
  endif()
endif()

option(MLA_CUDA_FAST_COMPILE "Compile CUDA kernels, and what tests and measures them, in half of the time, as slow ones: for a machine that has nvcc and no GPU" OFF)

# What every target with CUDA sources is compiled with.
function(mla_cuda_target_defaults target)
  if(MLA_CUDA_FAST_COMPILE AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES 90a CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
endfunction()

# Programs that need a GPU to do anything, where there is none.
function(mla_needs_gpu)
  if(MLA_CUDA_FAST_COMPILE)
    foreach(target IN LISTS ARGN)
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
    endforeach()
  endif()
endfunction()

# As mla_together, for CUDA sources, which CMake 3.25 does not compile as one: takes these of the list `of` out and has one
# that includes them instead.
function(mla_cuda_together of)
  if(MLA_TOGETHER)
    string(MAKE_C_IDENTIFIER ${ARGV1} group)
    set(one ${CMAKE_CURRENT_BINARY_DIR}/together_${group}.cu)
    list(TRANSFORM ARGN REPLACE ".+" "#include \"${CMAKE_CURRENT_SOURCE_DIR}/\\0\"\n" OUTPUT_VARIABLE includes)
    list(JOIN includes "" includes)
    file(CONFIGURE OUTPUT ${one} CONTENT "${includes}" @ONLY)
    list(REMOVE_ITEM ${of} ${ARGN})
    set(${of} ${${of}} ${one} PARENT_SCOPE)
  endif()
endfunction()
