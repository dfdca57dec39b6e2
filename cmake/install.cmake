# `cmake --install`: the library as a CMake package, tessera::tessera, and the program.
if(NOT TESSERA_TORCH)
  return()
endif()
add_library(tessera_all INTERFACE)
add_library(tessera::tessera ALIAS tessera_all)
target_link_libraries(tessera_all INTERFACE tessera_engine)
target_compile_features(tessera_all INTERFACE cxx_std_20)
set_target_properties(tessera_all PROPERTIES EXPORT_NAME tessera)
install(TARGETS tessera_all EXPORT tessera_targets)

set(TESSERA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tessera_targets NAMESPACE tessera:: DESTINATION ${TESSERA_PACKAGE_DIR})
configure_package_config_file(cmake/tesseraConfig.cmake.in ${PROJECT_BINARY_DIR}/tesseraConfig.cmake
                              INSTALL_DESTINATION ${TESSERA_PACKAGE_DIR})
# Names change until 1.0, so a package is compatible with its own minor version only.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tesseraConfig.cmake
              ${PROJECT_BINARY_DIR}/tesseraConfigVersion.cmake cmake/find_torch.cmake
        DESTINATION ${TESSERA_PACKAGE_DIR})
install(DIRECTORY tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "gloo_declarations" EXCLUDE)
install(TARGETS tessera RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
