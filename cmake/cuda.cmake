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
      set(MLA_HAVE_CUDA ON)
    else()
      message(STATUS "CUDA kernels left out: nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, they need 12.5")
    endif()
  else()
    message(STATUS "CUDA kernels left out: no nvcc")
  endif()
endif()

# What every target with CUDA sources is compiled with.
function(mla_cuda_target_defaults target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES 90a CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
endfunction()
