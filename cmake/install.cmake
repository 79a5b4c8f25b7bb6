include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS mla EXPORT mla-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/mla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
if(TARGET mla_c)
  install(TARGETS mla_c EXPORT mla-c-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY include/mla/c DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/mla FILES_MATCHING PATTERN "*.h")
  install(EXPORT mla-c-targets NAMESPACE mla:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/mla)
endif()
install(EXPORT mla-targets NAMESPACE mla:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/mla)
configure_package_config_file(cmake/mla-config.cmake.in ${PROJECT_BINARY_DIR}/mla-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/mla)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mla-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mla-config.cmake ${PROJECT_BINARY_DIR}/mla-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/mla)
if(TARGET mla_cli)
  install(TARGETS mla_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
