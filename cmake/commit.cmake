# Writes the source's commit into a C++ file, anew only when it has changed:
#   cmake -DOUT=commit.cpp -DSOURCE=folder -DCOMMIT=given-or-empty -P commit.cmake
set(commit "${COMMIT}")
if(NOT commit)
  set(commit unknown)
  find_program(GIT git)
  if(GIT)
    # An unpacked archive may lie within another project's checkout: its prefix there is not empty.
    execute_process(COMMAND ${GIT} rev-parse --show-prefix WORKING_DIRECTORY ${SOURCE}
      OUTPUT_VARIABLE prefix RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(failed EQUAL 0 AND prefix STREQUAL "")
      execute_process(COMMAND ${GIT} rev-parse --short=12 HEAD WORKING_DIRECTORY ${SOURCE}
        OUTPUT_VARIABLE head RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      if(failed EQUAL 0)
        execute_process(COMMAND ${GIT} --no-optional-locks status --porcelain --untracked-files=no WORKING_DIRECTORY ${SOURCE}
          OUTPUT_VARIABLE changes ERROR_QUIET)
        set(commit ${head})
        if(changes)
          string(APPEND commit "+changes")
        endif()
      endif()
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#include \"cli/version.hpp\"

namespace mla::cli {

const char* commit() { return \"${commit}\"; }

}  // namespace mla::cli
")
