# CUDA is used where it is found; nothing of it is needed elsewhere. Sets TESSERA_HAS_CUDA.
set(TESSERA_HAS_CUDA OFF)
if(NOT TESSERA_CUDA STREQUAL "OFF" AND TESSERA_TORCH)
  # A CUDA compiler beside a CPU build of torch would give a program that cannot use its GPU.
  find_package(CUDAToolkit QUIET)
  if(EXISTS "${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so" AND CUDAToolkit_NVCC_EXECUTABLE)
    set(TESSERA_HAS_CUDA ON)
  elseif(TESSERA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "TESSERA_CUDA=ON needs a torch with CUDA (found: ${TESSERA_TORCH_ROOT}) and the CUDA compiler (found: ${CUDAToolkit_NVCC_EXECUTABLE}); install both, or use TESSERA_CUDA=AUTO")
  elseif(EXISTS "${TESSERA_TORCH_ROOT}/lib/libtorch_cuda.so")
    message(STATUS "This torch has CUDA, but no CUDA compiler was found: building for CPU only")
  endif()
elseif(TESSERA_CUDA STREQUAL "ON")
  message(FATAL_ERROR "TESSERA_CUDA=ON without torch (TESSERA_TORCH=OFF): what runs on a GPU needs both; turn torch on, or use TESSERA_CUDA=AUTO")
endif()
if(TESSERA_HAS_CUDA)
  tessera_torch_with_cuda()
endif()

# The CUDA compiler, for sources of kernels.
if(TESSERA_HAS_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    # A100 and H100; what comes later compiles the last one's PTX when it starts.
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
  endif()
  enable_language(CUDA)
  # Debian 12's CMake, 3.25.1, does not know that this compiler has C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
endif()

# tessera_cuda_kernels(TARGET): some of its sources are kernels. They give the host's bits: nothing is
# fused unless it says so, roots and divisions are IEEE's, and subnormal numbers stay.
function(tessera_cuda_kernels target)
  set_target_properties(${target} PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
                                             CUDA_RUNTIME_LIBRARY None)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false -prec-sqrt=true -prec-div=true -ftz=false>)
endfunction()

# c10d's NCCL header includes nccl.h, which lies in a Python package beside torch or in the system.
# The library itself is torch's business: nothing of ours calls it.
if(TESSERA_HAS_CUDA)
  find_path(TESSERA_NCCL_INCLUDE_DIR nccl.h
    HINTS ${TESSERA_TORCH_ROOT}/../nvidia/nccl/include ${CUDAToolkit_INCLUDE_DIRS})
  if(NOT TESSERA_NCCL_INCLUDE_DIR)
    message(FATAL_ERROR "nccl.h was not found beside torch, in the CUDA toolkit or in the system; set TESSERA_NCCL_INCLUDE_DIR, or build without CUDA: -DTESSERA_CUDA=OFF")
  endif()
endif()

# NVTX is a set of headers: without them spans are no ranges in NVIDIA's tools, and nothing else.
if(TESSERA_HAS_CUDA)
  find_path(TESSERA_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h
    HINTS ${CUDAToolkit_INCLUDE_DIRS} ${TESSERA_TORCH_ROOT}/../nvidia/nvtx/include
          ${TESSERA_TORCH_ROOT}/../nvidia/cu13/include)
  if(NOT TESSERA_NVTX_INCLUDE_DIR)
    message(STATUS "nvtx3/nvToolsExt.h was not found: spans are not shown in NVIDIA's tools")
  endif()
endif()
message(STATUS "CUDA: ${TESSERA_HAS_CUDA}")
