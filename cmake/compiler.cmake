set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

# Line numbers for stack traces, without the description of every type: half the time and a
# quarter of the bytes.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")

# Multiplies and adds are never fused behind our back: results must not depend on the compiler.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)

# Most of what a source costs is its headers. make tidy compiles each alone, so that includes stay complete.
set(CMAKE_UNITY_BUILD ${TESSERA_UNITY})
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)
if(TESSERA_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # An anonymous namespace of an included source is taken for one in a header.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
endif()

# ccache needs to be told that a precompiled header is an input like any other.
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
      ${TESSERA_CCACHE})
endif()

if(TESSERA_SANITIZE STREQUAL "address")
  # Not null and alignment, which are checked at every access and made a unit take twice as long to
  # compile: an access through null ends in the address sanitizer's report all the same.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=null,alignment
                      -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(TESSERA_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(TESSERA_SANITIZE)
  message(FATAL_ERROR "TESSERA_SANITIZE=${TESSERA_SANITIZE}: use address or thread; one build holds one of them")
endif()
# Optimising the address sanitizer's checks takes as long as all the rest; a million inputs of a fuzzer
# are worth it.
if(TESSERA_SANITIZE STREQUAL "address" AND NOT TESSERA_FUZZER)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O0 -g1")
elseif(TESSERA_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
endif()
if(TESSERA_SANITIZE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 reports the unused alternatives of a std::variant as uninitialised once a sanitizer has
    # changed its control flow; its manual calls that warning unreliable there.
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
endif()
if(TESSERA_SANITIZE AND TESSERA_TORCH)
  message(FATAL_ERROR "TESSERA_SANITIZE needs TESSERA_TORCH=OFF: LibTorch is not built with sanitizers, so they would report its internals")
endif()

if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # libstdc++'s own std::stable_sort calls what it has marked as deprecated.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-deprecated-declarations>)
endif()

add_library(tessera_warnings INTERFACE)
target_compile_options(tessera_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${TESSERA_WERROR}>>:-Werror>)
