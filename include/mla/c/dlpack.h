// The part of DLPack 1.x that libmla's C interface speaks: a borrowed tensor's memory, device, dtype, shape and
// strides. Names, values and layout are DLPack's, so tensors of any library that exports them can be passed as they
// are. Where DLPack's own header is used too, include it before this one, which then declares nothing.
#ifndef MLA_C_DLPACK_H
#define MLA_C_DLPACK_H

#ifndef DLPACK_DLPACK_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,  ///< pinned host memory
  kDLCUDAManaged = 13,
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLBfloat = 4U,
  kDLFloat8_e4m3fn = 10U,
} DLDataTypeCode;

typedef struct {
  uint8_t code;  ///< a DLDataTypeCode
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;        ///< [ndim]
  int64_t* strides;      ///< [ndim], in elements; null: dense, the last dimension fastest
  uint64_t byte_offset;  ///< from data to the first element
} DLTensor;

#ifdef __cplusplus
}
#endif

#endif  // DLPACK_DLPACK_H_
#endif  // MLA_C_DLPACK_H
