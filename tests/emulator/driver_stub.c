/* A stub of NVIDIA's driver: it answers the calls of Triton's launcher, and runs nothing.
 *
 * Two functions of the test see all that matters: one is called for each module that is loaded, the
 * other for each launch. What they return is the driver's answer. Handles are numbers: a context is
 * its device plus one, and the upper half of a module or function is the context that it belongs to.
 * Compiled with the cuda.h that comes with Triton, so the compiler checks all types.
 */
#include "cuda.h"

#include <stdint.h>
#include <stdio.h>

#define HANDLE(type, number) ((type)(uintptr_t)(number))
#define CONTEXT(handle) HANDLE(CUcontext, (uintptr_t)(handle) >> 32)

static CUcontext current;
static CUresult (*on_load)(void);
static CUresult (*on_launch)(const CUlaunchConfig *, CUfunction, void **, CUcontext);

void observe(CUresult (*load)(void),
             CUresult (*launch)(const CUlaunchConfig *, CUfunction, void **, CUcontext)) {
  on_load = load;
  on_launch = launch;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = 9;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = 227 * 1024;
    break;
  default:
    *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = HANDLE(CUcontext, device + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  static uint32_t loaded;
  (void)image;
  *module = HANDLE(CUmodule, (uintptr_t)current << 32 | ++loaded);
  return on_load();
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  (void)name;
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  (void)module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  (void)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  (void)extra;
  if (CONTEXT(function) != current)
    return CUDA_ERROR_INVALID_HANDLE;
  return on_launch(config, function, parameters, current);
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  (void)attribute;
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  static char made[32];
  snprintf(made, sizeof made, "error %d", error);
  *text = made;
  return CUDA_SUCCESS;
}

/* Triton's launcher refers to these, but a launch does not call them. */
static CUresult absent(void) { return CUDA_ERROR_NOT_SUPPORTED; }
#define ABSENT(name) __typeof__(name) name __attribute__((alias("absent")))
ABSENT(cuCtxGetDevice);
ABSENT(cuCtxGetLimit);
ABSENT(cuCtxSetLimit);
ABSENT(cuDriverGetVersion);
ABSENT(cuFuncSetAttribute);
ABSENT(cuFuncSetCacheConfig);
ABSENT(cuOccupancyMaxActiveClusters);
ABSENT(cuStreamIsCapturing);
ABSENT(cuTensorMapEncodeTiled);
