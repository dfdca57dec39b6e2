# liburing, where there is one: in the system, or under LIBURING_DIR (a variable of CMake or of the
# environment; a folder with include/liburing.h and the library below it). Never required: without it
# files are read and written by threads. Sets TESSERA_HAS_LIBURING,
# LIBURING_INCLUDE_DIR and LIBURING_LIBRARY; the static library first, so that programs can move.
if(NOT LIBURING_DIR AND NOT "$ENV{LIBURING_DIR}" STREQUAL "")
  set(LIBURING_DIR "$ENV{LIBURING_DIR}")
endif()
set(TESSERA_HAS_LIBURING OFF)
if(LIBURING_DIR)
  # The folder that was named decides: a copy in the system must not hide a mistake in it.
  find_path(LIBURING_INCLUDE_DIR liburing.h PATHS ${LIBURING_DIR} PATH_SUFFIXES include src/include
            NO_DEFAULT_PATH NO_CACHE)
  find_library(LIBURING_LIBRARY NAMES liburing.a uring PATHS ${LIBURING_DIR} PATH_SUFFIXES lib lib64 src
               ${CMAKE_INSTALL_LIBDIR} lib/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH NO_CACHE)
  if(NOT LIBURING_INCLUDE_DIR OR NOT LIBURING_LIBRARY)
    message(FATAL_ERROR "LIBURING_DIR=${LIBURING_DIR} holds no liburing.h or no library; name the folder that liburing was installed or built in, or unset it")
  endif()
else()
  find_path(LIBURING_INCLUDE_DIR liburing.h NO_CACHE)
  find_library(LIBURING_LIBRARY NAMES liburing.a uring NO_CACHE)
endif()
if(LIBURING_INCLUDE_DIR AND LIBURING_LIBRARY)
  set(TESSERA_HAS_LIBURING ON)
  message(STATUS "io_uring: ${LIBURING_LIBRARY}")
else()
  message(STATUS "io_uring: no liburing; files are read and written by threads")
endif()
