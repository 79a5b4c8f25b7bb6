# Writes text files as C++ string constants, without tools of its own at build time:
#   cmake -DOUT=embedded.cpp -DNAMESPACE=a::b "-DFILES=page.html;style.css" -P embed.cmake
# page.html becomes `extern const char page_html[]`.
set(text "namespace ${NAMESPACE} {\n")
foreach(path IN LISTS FILES)
  get_filename_component(name ${path} NAME)
  string(MAKE_C_IDENTIFIER ${name} name)
  file(READ ${path} content)
  string(FIND "${content}" ")embedded\"" end)
  if(NOT end EQUAL -1)
    message(FATAL_ERROR "${path} has the delimiter that ends an embedded text")
  endif()
  string(APPEND text "extern const char ${name}[];\nconst char ${name}[] = R\"embedded(${content})embedded\";\n")
endforeach()
string(APPEND text "}  // namespace ${NAMESPACE}\n")
file(WRITE ${OUT} "${text}")
