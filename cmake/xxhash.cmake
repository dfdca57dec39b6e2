# xxHash, whose header holds all of it: in the system, or under XXHASH_DIR (a variable of CMake or of
# the environment; a folder with xxhash.h, or with include/xxhash.h). Compiled into one source, so
# programs need no library, and an installed Tessera no header. Sets XXHASH_INCLUDE_DIR.
if(NOT XXHASH_DIR AND NOT "$ENV{XXHASH_DIR}" STREQUAL "")
  set(XXHASH_DIR "$ENV{XXHASH_DIR}")
endif()
if(XXHASH_DIR)
  find_path(XXHASH_INCLUDE_DIR xxhash.h PATHS ${XXHASH_DIR} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  if(NOT XXHASH_INCLUDE_DIR)
    message(FATAL_ERROR "XXHASH_DIR=${XXHASH_DIR} holds no xxhash.h; name the folder that has it, or unset it")
  endif()
else()
  find_path(XXHASH_INCLUDE_DIR xxhash.h NO_CACHE)
  if(NOT XXHASH_INCLUDE_DIR)
    message(FATAL_ERROR "xxhash.h was not found. On Debian or Ubuntu: apt-get install libxxhash-dev, or run scripts/setup, which installs everything, or set XXHASH_DIR to a folder with that header")
  endif()
endif()
# XXH3 came with 0.8.0.
file(STRINGS ${XXHASH_INCLUDE_DIR}/xxhash.h _xxhash_has_xxh3 REGEX "XXH3_64bits_update" LIMIT_COUNT 1)
if(NOT _xxhash_has_xxh3)
  message(FATAL_ERROR "${XXHASH_INCLUDE_DIR}/xxhash.h has no XXH3; Tessera needs xxHash 0.8.0 or newer. Set XXHASH_DIR to a folder with such a header")
endif()
