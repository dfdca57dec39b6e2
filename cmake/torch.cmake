include(cmake/find_torch.cmake)

# Gloo's headers are not part of torch's packages; ours declare what c10d's header mentions. Checked
# here, because a change there would otherwise show as a link error in the middle of a build.
try_compile(TESSERA_GLOO_LINKS
  ${PROJECT_BINARY_DIR}/gloo_check
  ${PROJECT_SOURCE_DIR}/tessera/comm/c10d_link_check.cpp
  CMAKE_FLAGS "-DINCLUDE_DIRECTORIES:STRING=${CMAKE_SOURCE_DIR}/tessera/comm/gloo_declarations;${TORCH_INCLUDE_DIRS}"
  COMPILE_DEFINITIONS -DUSE_C10D_GLOO -DUSE_DISTRIBUTED
  LINK_LIBRARIES ${TORCH_LIBRARIES}
  CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON
  OUTPUT_VARIABLE _tessera_gloo_output)
if(NOT TESSERA_GLOO_LINKS)
  unset(TESSERA_GLOO_LINKS CACHE)  # ask again next time
  message(FATAL_ERROR "torch ${TESSERA_TORCH_VERSION} does not link with tessera/comm/gloo_declarations:\n${_tessera_gloo_output}")
endif()
