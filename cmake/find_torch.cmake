# Finds LibTorch and makes the target tessera_torch. Used by this build, and installed beside the
# package: whoever uses that finds torch in the same way.
#
# LibTorch: TORCH_DIR (option or environment), else the torch of .venv, else the one python3 imports.
set(TORCH_DIR "$ENV{TORCH_DIR}" CACHE PATH "Folder of a LibTorch, or of an installed Python package torch")

set(_tessera_torch_prefix "")
if(TORCH_DIR)
  foreach(_candidate "${TORCH_DIR}" "${TORCH_DIR}/share/cmake" "${TORCH_DIR}/torch/share/cmake")
    if(EXISTS "${_candidate}/Torch/TorchConfig.cmake")
      set(_tessera_torch_prefix "${_candidate}")
    elseif(EXISTS "${_candidate}/share/cmake/Torch/TorchConfig.cmake")
      set(_tessera_torch_prefix "${_candidate}/share/cmake")
    endif()
  endforeach()
  if(NOT _tessera_torch_prefix)
    message(FATAL_ERROR "TORCH_DIR=${TORCH_DIR} holds no share/cmake/Torch/TorchConfig.cmake")
  endif()
else()
  foreach(_python "${CMAKE_SOURCE_DIR}/.venv/bin/python3" python3)
    execute_process(COMMAND ${_python} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE _prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _failed)
    if(NOT _failed)
      set(_tessera_torch_prefix "${_prefix}")
      break()
    endif()
  endforeach()
  if(NOT _tessera_torch_prefix)
    message(FATAL_ERROR "No LibTorch: run scripts/setup, or set TORCH_DIR to one")
  endif()
endif()

# Torch's own CMake package insists on a CUDA compiler where torch was built for CUDA, as the torch
# that pip installs on x86-64 is, and on libraries that none of our units use. We need two include
# folders and three libraries, so we name them ourselves; cuda.cmake adds the CUDA half.
get_filename_component(TESSERA_TORCH_ROOT "${_tessera_torch_prefix}/../.." ABSOLUTE)
set(TORCH_INCLUDE_DIRS "${TESSERA_TORCH_ROOT}/include"
    "${TESSERA_TORCH_ROOT}/include/torch/csrc/api/include")
set(TORCH_LIBRARIES "")
foreach(_library torch_cpu c10)
  find_library(TESSERA_LIB_${_library} ${_library} PATHS "${TESSERA_TORCH_ROOT}/lib"
               NO_DEFAULT_PATH REQUIRED)
  list(APPEND TORCH_LIBRARIES "${TESSERA_LIB_${_library}}")
endforeach()

find_file(TESSERA_TORCH_VERSION_HEADER NAMES torch/headeronly/version.h torch/version.h
          PATHS ${TORCH_INCLUDE_DIRS} NO_DEFAULT_PATH REQUIRED)
file(STRINGS "${TESSERA_TORCH_VERSION_HEADER}" _version_lines
     REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" _version_parts "${_version_lines}")
list(JOIN _version_parts "." TESSERA_TORCH_VERSION)
if(NOT TESSERA_TORCH_VERSION MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$")
  message(FATAL_ERROR "The version of the torch under ${TESSERA_TORCH_ROOT} cannot be read")
endif()
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11 OR TESSERA_TORCH_VERSION VERSION_GREATER_EQUAL 2.16)
  message(FATAL_ERROR "torch ${TESSERA_TORCH_VERSION} was found under ${TESSERA_TORCH_ROOT}; Tessera builds with 2.11 to 2.15")
endif()
message(STATUS "torch ${TESSERA_TORCH_VERSION} from ${TESSERA_TORCH_ROOT}")

# Torch's flags belong to the units that include it, not to every unit of the project.
add_library(tessera_torch INTERFACE)
target_include_directories(tessera_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_compile_definitions(tessera_torch INTERFACE USE_DISTRIBUTED)
# Torch loads the shared C++ library, so our programs use that one, too, and find it first: a static
# one beside it (some compilers bring no other) ends in a crash, and torch's packages export a
# std::filesystem of their own, linked in from another compiler's.
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
  OUTPUT_VARIABLE _cxx_library OUTPUT_STRIP_TRAILING_WHITESPACE)
if(IS_ABSOLUTE "${_cxx_library}")
  set(TESSERA_CXX_LIBRARY "${_cxx_library}")
else()
  find_library(TESSERA_CXX_LIBRARY NAMES libstdc++.so.6
               PATH_SUFFIXES ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu REQUIRED)
endif()
target_link_libraries(tessera_torch INTERFACE ${TESSERA_CXX_LIBRARY} ${TORCH_LIBRARIES})
string(REGEX REPLACE "\\.[0-9]+$" "" TESSERA_TORCH_MAJOR_MINOR "${TESSERA_TORCH_VERSION}")

# For a build with CUDA. libtorch_cuda registers its operators when it is loaded: it must be loaded
# although nothing of ours names it. Its own dependencies are found by its run path, which the linker
# does not read.
function(tessera_torch_with_cuda)
  target_link_libraries(tessera_torch INTERFACE
    -Wl,--no-as-needed "${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so"
    "${TESSERA_TORCH_ROOT}/lib/libc10_cuda.so" -Wl,--as-needed
    -Wl,--allow-shlib-undefined CUDA::cudart)
endfunction()
