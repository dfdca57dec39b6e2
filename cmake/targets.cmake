# tessera_room(NAME SOURCES... DEPENDS...): one library per room, torch-free unless TORCH is given;
# installed as tessera::NAME.
function(tessera_room name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(tessera_${name} STATIC ${ARG_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})
  target_include_directories(tessera_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_DEPENDS} Threads::Threads
                        PRIVATE ${ARG_PRIVATE_DEPENDS} $<BUILD_INTERFACE:tessera_warnings>)
  if(ARG_TORCH)
    tessera_use_torch(tessera_${name})
  endif()
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS tessera_${name} EXPORT tessera_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# Links torch and reuses one precompiled header. It holds ATen, which every unit with torch needs, and
# no more: with all of torch.h it takes a minute to make and half a gigabyte to load each time.
function(tessera_use_torch target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:tessera_torch>
                        $<INSTALL_INTERFACE:tessera::torch>)
  tessera_reuse_headers(${target} torch_pch LIBRARIES tessera_torch HEADERS <ATen/ATen.h>)
endfunction()

# tessera_test_headers(TARGET [TORCH]): the precompiled header of tests, which is most of what the
# compiler reads of them. Names no header of ours: a change there would compile all tests anew.
function(tessera_test_headers target)
  set(_headers <gtest/gtest.h> <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable>
      <filesystem> <fstream> <functional> <map> <memory> <mutex> <numeric> <optional> <random> <set>
      <span> <sstream> <string> <thread> <tuple> <utility> <vector>)
  target_link_libraries(${target} PRIVATE GTest::gtest)  # for its definitions
  if("TORCH" IN_LIST ARGN)
    target_link_libraries(${target} PRIVATE tessera_torch)
    tessera_reuse_headers(${target} torch_test_pch LIBRARIES tessera_torch GTest::gtest
                          HEADERS <ATen/ATen.h> <torch/csrc/autograd/autograd.h> <torch/nn/module.h>
                                  ${_headers})
  else()
    tessera_reuse_headers(${target} test_pch LIBRARIES GTest::gtest HEADERS ${_headers})
  endif()
endfunction()

# tessera_reuse_headers(TARGET NAME LIBRARIES... HEADERS...): one precompiled header for all targets
# that name it, made in the folder of the first one, with the flags of that folder.
function(tessera_reuse_headers target name)
  cmake_parse_arguments(ARG "" "" "LIBRARIES;HEADERS" ${ARGN})
  set(_holder tessera_${name})
  if(NOT TARGET ${_holder})
    file(WRITE ${PROJECT_BINARY_DIR}/${name}.cpp "// Holds the precompiled header.\n")
    add_library(${_holder} OBJECT ${PROJECT_BINARY_DIR}/${name}.cpp)
    target_link_libraries(${_holder} PRIVATE ${ARG_LIBRARIES} tessera_warnings Threads::Threads)
    target_precompile_headers(${_holder} PRIVATE ${ARG_HEADERS})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${_holder})
  # A program is compiled as a library is, or it could not use the same precompiled header.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()

# tessera_test(NAME SOURCES... DEPENDS... LABELS...): a gtest program, one ctest entry for the whole
# program (a process start costs more than most of our tests), or one per word of PARTS, with the tests
# whose names end in it. SERIAL for tests that read machine-wide counters; SINGLE for those in which
# only one thread ever runs: the thread sanitizer has nothing to find there, so its build leaves them out.
function(tessera_test name)
  cmake_parse_arguments(ARG "TORCH;SERIAL;SINGLE" "TIMEOUT" "SOURCES;DEPENDS;LABELS;PARTS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  if(ARG_SINGLE AND TESSERA_SANITIZE STREQUAL "thread")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gtest_main tessera_warnings)
  if(ARG_TORCH)
    tessera_test_headers(${name} TORCH)
  else()
    tessera_test_headers(${name})
  endif()
  if(ARG_SINGLE AND NOT TESSERA_SANITIZE)
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/one_thread.cpp)
  endif()
  set(_tests ${name})
  if(ARG_PARTS)
    list(TRANSFORM ARG_PARTS PREPEND ${name}. OUTPUT_VARIABLE _tests)
    foreach(_part ${ARG_PARTS})
      add_test(NAME ${name}.${_part} COMMAND ${name} --gtest_filter=*/${_part})
    endforeach()
  else()
    add_test(NAME ${name} COMMAND ${name})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)
  endif()
  set_tests_properties(${_tests} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  if(ARG_TORCH)
    # Ranks are threads, and tests run side by side: operators with threads of their own would spin
    # against each other for the cores.
    set_tests_properties(${_tests} PROPERTIES ENVIRONMENT OMP_NUM_THREADS=1)
  endif()
  if(ARG_SERIAL)
    set_tests_properties(${_tests} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
