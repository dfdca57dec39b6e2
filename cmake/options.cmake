# Every switch of the build, in one place.
option(TESSERA_TORCH "Build the parts that need LibTorch; OFF builds the torch-free rooms only" ON)
set(TESSERA_CUDA AUTO CACHE STRING "Build for CUDA: AUTO (if compiler and torch have it), ON, OFF")
set_property(CACHE TESSERA_CUDA PROPERTY STRINGS AUTO ON OFF)
option(TESSERA_TESTS "Build the tests" ON)
option(TESSERA_BENCH "Build the benchmarks" ON)
option(TESSERA_WERROR "Warnings are errors" ON)
set(TESSERA_SANITIZE "" CACHE STRING "address (with undefined) or thread; empty for none")
set_property(CACHE TESSERA_SANITIZE PROPERTY STRINGS "" address thread)
