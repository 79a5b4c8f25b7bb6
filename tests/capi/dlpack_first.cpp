// DLPack's own header came first: what it declares (here, in its guard) is used, and nothing is declared twice.
#define DLPACK_DLPACK_H_
#include <stdint.h>
#ifdef __cplusplus
typedef enum : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLMetal = 8, kDLCUDAManaged = 13 } DLDeviceType;
#else
typedef enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLMetal = 8, kDLCUDAManaged = 13 } DLDeviceType;
#endif
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

#include "mla/c/mla.h"
