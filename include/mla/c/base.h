// What all of the C interface shares: status codes, messages, versions, the rules of its structs.
//
// Rules
// - Every function that can fail returns a status and, on failure, leaves a one-line message for its thread. What it
//   was to write is unspecified then, except for handles, which are set to NULL.
// - Handles are opaque numbers, no addresses, and none is given twice in a process. Each is ended by its `_destroy`
//   function, which takes NULL too. A call with NULL, with a destroyed handle (also a second destroy) or with one of
//   another kind is MLA_ERROR_HANDLE.
// - Handles may be destroyed in any order: what one was made of stays inside as long as it is needed. A running call
//   keeps its handles. On a GPU calls go on after they return: a handle is destroyed, and memory given back, once the
//   stream has done the calls that used it (mla_stream_synchronize); what a graph's calls use, once it is launched no
//   more. The caller's memory behind mla_cache_create_in and a borrowed cudaStream_t outlive all that was made of them.
// - A handle may be used by one thread at a time; models, weights, rotary tables, plans and caches by any number of
//   readers. Calls on one stream wait for one another.
// - Structs begin with struct_size, set to sizeof: a struct of an older header is read as if its missing fields had
//   their defaults, one of a newer header as long as what this library does not know is zero. The mla_..._default()
//   functions fill every field; `{0}` with struct_size set leaves optional pointers and lists out. Structs that lie in
//   arrays or within others have no size of their own and do not grow.
// - Tensors are DLPack's, borrowed for the call (on a GPU until its work is done). Shapes are written [Token, Head] by
//   the dimensions' names. Strides are free unless a dimension is said to be dense; a tensor that is written has no
//   two elements in one place: each stride passes what the shorter ones reach. MLA_ERROR_SHAPE for a dtype, device,
//   shape or stride that does not fit.
// - dtypes: f32, bf16 and f16 are DLPack's float 32, bfloat 16 and float 16; fp8 is float8_e4m3fn, or uint8 that holds
//   its codes.
// - Plain arrays (`const int32_t*` and a count, work items) are host memory and read during the call. A GPU's ops read
//   them where they lie: in pinned or managed memory, as it is until the stream has done the call. A plan's own
//   lists are copied to the GPU by mla_staged_step_stage, and read there by calls that name the staged step.
// - Texts are written to `text`, at most `capacity` bytes with the closing 0; *length, unless NULL, is the whole text's
//   length without it. text may be NULL with capacity 0.
#ifndef MLA_C_BASE_H
#define MLA_C_BASE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mla/c/dlpack.h"

#if defined(__GNUC__)
#define MLA_API __attribute__((visibility("default")))
#else
#define MLA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mla_status {
  MLA_OK = 0,
  MLA_ERROR_HANDLE = 1,       ///< NULL where something is needed, a destroyed handle, a handle of another kind
  MLA_ERROR_SHAPE = 2,        ///< extents, strides, dtypes, devices or sizes that do not fit
  MLA_ERROR_INPUT = 3,        ///< any other unusable value
  MLA_ERROR_BATCH = 4,        ///< a batch that contradicts itself
  MLA_ERROR_CHECKPOINT = 5,   ///< a malformed config or checkpoint
  MLA_ERROR_UNSUPPORTED = 6,  ///< valid, but not done by this library, build or device
  MLA_ERROR_OUT_OF_PAGES = 7,
  MLA_ERROR_DEVICE = 8,         ///< a device or the operating system refused
  MLA_ERROR_OUT_OF_MEMORY = 9,  ///< of the host
  MLA_ERROR_INTERNAL = 10,      ///< a fault of this library
} mla_status;

/// Why this thread's last failed call failed, in one line of at most some 1000 bytes of UTF-8 with the function's name;
/// "" before any. Valid until the thread's next failure.
MLA_API const char* mla_last_error(void);
/// "MLA_ERROR_SHAPE"; "unknown status" for a number that is none.
MLA_API const char* mla_status_name(mla_status status);
/// "0.1.0"
MLA_API const char* mla_version(void);
/// 10000 major + 100 minor + patch.
MLA_API int32_t mla_version_number(void);

/// Element types where no tensor says them.
enum { MLA_F32 = 0, MLA_BF16 = 1, MLA_F16 = 2, MLA_FP8_E4M3 = 3 };

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_BASE_H
