# What most sources include; scripts/tidy compiles without it, and finds an include that is missing.
set(TESSERA_STANDARD_HEADERS <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <filesystem>
    <fstream> <functional> <map> <memory> <mutex> <numeric> <optional> <random> <set> <span> <sstream> <string>
    <thread> <tuple> <utility> <vector>)

# tessera_module(NAME SOURCES... DEPENDS...): one library per module, torch-free unless TORCH is given;
# installed as tessera::NAME.
function(tessera_module name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(tessera_${name} STATIC ${ARG_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})
  target_include_directories(tessera_${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_DEPENDS} Threads::Threads
                        PRIVATE ${ARG_PRIVATE_DEPENDS} $<BUILD_INTERFACE:tessera_warnings>)
  if(ARG_TORCH)
    tessera_use_torch(tessera_${name})
  else()
    tessera_reuse_headers(tessera_${name} plain_pch HEADERS ${TESSERA_STANDARD_HEADERS})
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
  set(_headers <gtest/gtest.h> ${TESSERA_STANDARD_HEADERS})
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

# tessera_tests(NAME SOURCES... DEPENDS...): the tests of a folder as one gtest program, NAME_tests, with one
# ctest entry, since a process start costs more than most tests. What else can be said of them:
#   TORCH              sources include torch's headers
#   SHIPPED            without TORCH, but wanted in builds with torch, too: for what the optimiser makes of the code,
#                      or for a program that needs torch. Others are built and run without torch, under the
#                      sanitizers; what they test is run as it is shipped by the tests that train
#   LABELS words       unit, dist, gpu (ctest -L)
#   SINGLE sources...  tests in which only one thread ever runs, as a program NAME_single_tests: the
#                      thread sanitizer has nothing to find in them, so its build leaves them out
#   COST n             seconds that they take, about: the longest start first
#   PARTS n            ctest entries that share the tests, so that a long program uses several cores
#   SERIAL suites...   suites that read machine-wide counters: an entry of their own, alone
#   PLAIN_STACK        most of it is loops over elements: asan does not look for uses of a stack that is gone
#   GPU                some run on a GPU: suites with Cuda in their name, the entry NAME.gpu of a build with CUDA
#   ENVIRONMENT ...    NAME=value, for all entries
function(tessera_tests name)
  cmake_parse_arguments(ARG "TORCH;SHIPPED;GPU;PLAIN_STACK" "PARTS;COST" "SOURCES;SINGLE;DEPENDS;LABELS;SERIAL;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TORCH AND NOT ARG_SHIPPED AND NOT TESSERA_BUILDS_PLAIN_TESTS AND NOT (ARG_GPU AND TESSERA_HAS_CUDA))
    return()
  endif()
  if(ARG_TORCH)
    set(_torch TORCH)
    # Ranks are threads, and entries run side by side: operators with threads of their own would spin
    # against each other for the cores.
    list(APPEND ARG_ENVIRONMENT OMP_NUM_THREADS=1)
  endif()
  if(ARG_SINGLE AND NOT TESSERA_SANITIZE STREQUAL "thread")
    tessera_test_program(${name}_single_tests ${_torch} SOURCES ${ARG_SINGLE} DEPENDS ${ARG_DEPENDS})
    if(NOT TESSERA_SANITIZE)
      target_sources(${name}_single_tests PRIVATE ${PROJECT_SOURCE_DIR}/tests/support/one_thread.cpp)
    endif()
    tessera_test_entry(${name}.single ${name}_single_tests "*" COST "${ARG_COST}" LABELS ${ARG_LABELS}
      ENVIRONMENT ${ARG_ENVIRONMENT} ASAN_OPTIONS=detect_stack_use_after_return=0)
  endif()
  # Work that outlives the function whose variables it uses is the mistake of asynchronous code. Looking
  # for it costs every function call, up to ten times the whole, so where nothing is asynchronous it is off.
  if(ARG_PLAIN_STACK)
    list(APPEND ARG_ENVIRONMENT ASAN_OPTIONS=detect_stack_use_after_return=0)
  else()
    list(APPEND ARG_ENVIRONMENT ASAN_OPTIONS=detect_stack_use_after_return=1)
  endif()
  if(NOT ARG_SOURCES)
    return()
  endif()
  tessera_test_program(${name}_tests ${_torch} SOURCES ${ARG_SOURCES} DEPENDS ${ARG_DEPENDS})

  set(_apart "")
  if(ARG_SERIAL)
    list(TRANSFORM ARG_SERIAL APPEND ".*")
    list(JOIN ARG_SERIAL ":" _serial)
    tessera_test_entry(${name}.serial ${name}_tests "${_serial}" COST "${ARG_COST}" LABELS ${ARG_LABELS} ENVIRONMENT ${ARG_ENVIRONMENT})
    set_tests_properties(${name}.serial PROPERTIES RUN_SERIAL ON)
    list(APPEND _apart ${_serial})
  endif()
  if(ARG_GPU AND TESSERA_HAS_CUDA)
    tessera_test_entry(${name}.gpu ${name}_tests "*Cuda*" COST "${ARG_COST}" LABELS gpu ENVIRONMENT ${ARG_ENVIRONMENT})
    # Some fill the GPU's memory, and ranks that share it take turns on it.
    set_tests_properties(${name}.gpu PROPERTIES RESOURCE_LOCK gpu)
    list(APPEND _apart "*Cuda*")
  endif()
  list(JOIN _apart ":" _apart)
  if(NOT ARG_PARTS)
    tessera_test_entry(${name} ${name}_tests "*-${_apart}" COST "${ARG_COST}" LABELS ${ARG_LABELS} ENVIRONMENT ${ARG_ENVIRONMENT})
    return()
  endif()
  foreach(_part RANGE 1 ${ARG_PARTS})
    math(EXPR _index "${_part} - 1")
    tessera_test_entry(${name}.${_part} ${name}_tests "*-${_apart}" COST "${ARG_COST}" LABELS ${ARG_LABELS}
      ENVIRONMENT ${ARG_ENVIRONMENT} GTEST_TOTAL_SHARDS=${ARG_PARTS} GTEST_SHARD_INDEX=${_index})
  endforeach()
endfunction()

function(tessera_test_program name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} tessera_testing GTest::gtest_main tessera_warnings)
  if(ARG_TORCH)
    tessera_test_headers(${name} TORCH)
  else()
    tessera_test_headers(${name})
  endif()
endfunction()

# What each test took is in build/PRESET/test-times/ENTRY.xml; scripts/test_report.py reads it. The limit ends
# what hangs; nothing is decided by it.
function(tessera_test_entry name program filter)
  cmake_parse_arguments(ARG "" "COST" "LABELS;ENVIRONMENT" ${ARGN})
  add_test(NAME ${name} COMMAND ${program} "--gtest_filter=${filter}"
           "--gtest_output=xml:${PROJECT_BINARY_DIR}/test-times/${name}.xml")
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 LABELS "${ARG_LABELS}" ENVIRONMENT "${ARG_ENVIRONMENT}")
  if(ARG_COST)
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
endfunction()
