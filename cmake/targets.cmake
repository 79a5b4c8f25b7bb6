# How every target of this project is compiled.
function(mla_target_defaults target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wnon-virtual-dtor;-Wno-ignored-attributes;-Wno-missing-field-initializers>
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
    $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unused-private-field>)  # those of core/gpu.hpp where there is no CUDA
  if(MLA_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  if(MLA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${MLA_SANITIZE})
    # A quarter of the time to compile, for what AddressSanitizer sees, too; the fuzz targets, by clang, have them.
    if(MLA_SANITIZE MATCHES undefined AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      target_compile_options(${target} PRIVATE -fno-sanitize=null,object-size,vptr)
    endif()
  endif()
endfunction()

# What runs little is compiled in half of the time: with sanitizers, and in a build from nothing.
function(mla_compiled_quickly target)
  if(MLA_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  elseif(MLA_TOGETHER)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
endfunction()

# What computes the numbers that a result is held against is not what sanitizers are asked about: without them sanitized
# sweeps take two fifths less.
function(mla_oracle target)
  if(MLA_SANITIZE MATCHES address AND NOT MLA_FUZZ)
    target_compile_options(${target} PRIVATE -fno-sanitize=all -O2)
  endif()
endfunction()

# Appends to the list `to` the sources, of these endings, in each op's folder: mla_op_sources(sources generic/ cpp cu).
function(mla_op_sources to in)
  get_property(ops GLOBAL PROPERTY MLA_OPS)
  foreach(op IN LISTS ops)
    foreach(ending IN LISTS ARGN)
      file(GLOB found CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} ${in}${op}/*.${ending})
      list(APPEND ${to} ${found})
    endforeach()
  endforeach()
  set(${to} ${${to}} PARENT_SCOPE)
endfunction()

# A part of the library: mla_module(cache pages.cpp ... LINKS core). Its objects go into libmla; tests may link it alone.
function(mla_module name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINKS")
  add_library(mla_${name} OBJECT ${arg_UNPARSED_ARGUMENTS})
  target_include_directories(mla_${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(mla_${name} PRIVATE ${arg_LINKS})
  mla_target_defaults(mla_${name})
  set_property(GLOBAL APPEND PROPERTY MLA_MODULES mla_${name})
endfunction()

# Sources of a target that MLA_TOGETHER compiles as one: headers are read once, and what they have inline is compiled once.
# Two that give a name in an unnamed namespace two meanings cannot be together.
function(mla_together target)
  if(MLA_TOGETHER)
    string(MAKE_C_IDENTIFIER ${ARGV1} group)
    set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  endif()
endfunction()
