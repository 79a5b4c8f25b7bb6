#include "backend/cuda/core/blas.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <span>
#include <vector>

#include "backend/cuda/core/check.hpp"

namespace mla::cuda {
namespace {

constexpr size_t kWorkspace = size_t{32} << 20;  // what cuBLAS asks for on Hopper

// The library's functions, found once. Loaded by name: its static form is half a gigabyte, and the CPU must serve where
// no CUDA is installed.
struct Library {
  std::string error;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algorithm_get = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) desc_init = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;

  Library() {
    void* library = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"})
      if ((library = dlopen(name, RTLD_NOW | RTLD_LOCAL))) break;
    if (!library) {
      error = std::string("libcublasLt.so.13 is not found: ") + dlerror();
      return;
    }
    const auto find = [&]<class F>(F& function, const char* name) {
      function = reinterpret_cast<F>(dlsym(library, name));
      if (!function && error.empty()) error = std::string("cuBLASLt has no ") + name;
    };
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(matmul, "cublasLtMatmul");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute");
    find(desc_init, "cublasLtMatmulDescInit_internal");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_init, "cublasLtMatrixLayoutInit_internal");
    find(layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(preference_init, "cublasLtMatmulPreferenceInit_internal");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
  }
};
const Library& library() {
  static const Library l;
  return l;
}

cudaDataType_t type_of(Dtype t) {
  return t == Dtype::f32 ? CUDA_R_32F : t == Dtype::fp8_e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
}

// What cuBLASLt calls scales by blocks since 12.9; headers before that do not know the names.
constexpr auto kScaleModeOfA = static_cast<cublasLtMatmulDescAttributes_t>(31),
               kScaleModeOfB = static_cast<cublasLtMatmulDescAttributes_t>(32);
constexpr int32_t kScaleVec128 = 4, kScaleBlock128x128 = 5;

std::string shape_of(const Product& p) {
  return std::to_string(p.batch) + " x [" + std::to_string(p.rows) + ", " + std::to_string(p.in) + "] x [" +
         std::to_string(p.out) + ", " + std::to_string(p.in) + "]^T, " + std::string(to_string(p.dtype)) + " to " +
         std::string(to_string(p.y_dtype));
}

void require(cublasStatus_t status, std::string_view op, const char* what, const Product& p) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError(std::string(op) + ": cuBLASLt, " + what + " (" + shape_of(p) + "): status " +
                    std::to_string(static_cast<int>(status)));
}

// Largest power of two up to `most` that divides addresses and distances in bytes. Where bits must not depend on a
// batch, neither may the algorithm, so that `most` is then what every batch's memory has.
uint32_t alignment(const void* data, int64_t row, int64_t matrix, Dtype dtype, bool invariant) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(row) * size_of(dtype) |
                        static_cast<uint64_t>(matrix) * size_of(dtype) | (invariant ? 16 : 256);
  return uint32_t{1} << std::countr_zero(bits);
}

// Large matrices and many rows: parts of sums, 7168 x 128 x splits of f32, cost more than the multiprocessors that one
// sum a tile leaves idle. Of 7168 x 16384 and 128 rows 62 us for 69.
bool sums_whole(const Product& p) { return p.rows > 64 && p.batch == 1 && p.out * p.in >= int64_t{1} << 26; }

// Where bits must not depend on the number of rows: whose algorithm says what they are (that of 128 takes 14% longer
// for 8), and the most that algorithms are looked for.
constexpr int64_t kInvariantRows = 64, kMostInvariantRows = 8192;

bool splits(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t parts = 1;
  size_t written = 0;
  return library().algorithm_get(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written) ==
             CUBLAS_STATUS_SUCCESS &&
         parts > 1;
}

}  // namespace

Blas::Blas(std::string_view device) {
  missing_ = library().error;
  if (!missing_.empty()) return;
  if (const cublasStatus_t status = library().create(&handle_); status != CUBLAS_STATUS_SUCCESS)
    throw DeviceError(std::string(device) + ": cublasLtCreate: status " + std::to_string(static_cast<int>(status)));
  if (const cudaError_t status = cudaMalloc(&workspace_, kWorkspace); status != cudaSuccess) {
    library().destroy(handle_);
    check(status, device, "workspace of cuBLASLt");
  }
  if (cudaStreamCreateWithFlags(&trial_, cudaStreamNonBlocking) != cudaSuccess) {
    cudaGetLastError();
    trial_ = nullptr;
  }
}

Blas::~Blas() {
  if (trial_) cudaStreamDestroy(trial_);
  cudaFree(workspace_);
  if (handle_) library().destroy(handle_);
}

// Column-major as cuBLAS sees it: y^T [out, rows] = w [out, in] x^T [in, rows].
struct Blas::Problem {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t w, x, y;
  bool known = true;  // to this cuBLASLt

  Problem(const Product& p, int64_t rows, std::string_view op) {
    const Library& l = library();
    require(l.desc_init(&desc, sizeof desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), op, "product", p);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    require(l.desc_set(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), op, "product", p);
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& m, Dtype dtype, int64_t height, int64_t width, int64_t step,
                            int64_t matrix) {
      const int64_t leading = std::max(step, height);  // of a single column any distance will do
      require(l.layout_init(&m, sizeof m, type_of(dtype), static_cast<uint64_t>(height), static_cast<uint64_t>(width),
                            leading),
              op, "layout", p);
      const int32_t batch = static_cast<int32_t>(p.batch);
      require(l.layout_set(&m, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch), op, "layout", p);
      require(l.layout_set(&m, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &matrix, sizeof matrix), op, "layout", p);
    };
    layout(w, p.dtype, p.in, p.out, p.w_row, p.w_matrix);
    layout(x, p.dtype, p.in, rows, p.x_row, p.x_matrix);
    layout(y, p.y_dtype, p.out, rows, p.y_row, p.y_matrix);
    if (p.dtype != Dtype::fp8_e4m3) return;
    const auto attribute = [&](cublasLtMatmulDescAttributes_t what, const auto& value) {
      known = known && l.desc_set(&desc, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
    };
    attribute(kScaleModeOfA, kScaleBlock128x128);
    attribute(kScaleModeOfB, kScaleVec128);
    attribute(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(p.w_scales));
    attribute(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(p.x_scales));
  }
};

// Some algorithms have a counter cleared first. In a captured step that is a node of another kind between two kernels,
// which cost 12 us on an H200.
bool Blas::launches_kernels_alone(const Problem& problem, const Product& p,
                                  const cublasLtMatmulAlgo_t& algorithm) const {
  if (!trial_) return true;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // a caller may be capturing, too
  cudaGraph_t graph = nullptr;
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) return true;
  bool alone = true;
  if (cudaStreamBeginCapture(trial_, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
    const cublasStatus_t status = launch(problem, p, algorithm, trial_);
    std::array<cudaGraphNode_t, 8> nodes{};
    size_t count = nodes.size();
    alone = cudaStreamEndCapture(trial_, &graph) == cudaSuccess && status == CUBLAS_STATUS_SUCCESS &&
            cudaGraphGetNodes(graph, nodes.data(), &count) == cudaSuccess;
    for (size_t i = 0; alone && i < count; ++i) {
      cudaGraphNodeType type = cudaGraphNodeTypeKernel;
      alone = cudaGraphNodeGetType(nodes[i], &type) == cudaSuccess && type == cudaGraphNodeTypeKernel;
    }
    if (graph) cudaGraphDestroy(graph);
  }
  cudaGetLastError();  // what a trial did wrong is nobody's error
  cudaThreadExchangeStreamCaptureMode(&mode);
  return alone;
}

// By sums that would be 0, were they exact: what is found follows from the order of summing alone. Memory comes and
// goes in the trial's stream, so that nothing waits for others.
bool Blas::same_bits(const Product& p, const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) const {
  constexpr int64_t kSide = 128;  // rows and outputs
  if (!trial_) return false;
  const int64_t half = p.in / 2, row = (p.in + 15) / 16 * 16;
  const bool codes = p.dtype == Dtype::fp8_e4m3;
  const size_t x_bytes = static_cast<size_t>(kSide * row) * size_of(p.dtype),
               scales = codes ? static_cast<size_t>((p.in + 127) / 128 * kSide) : 0,
               given_bytes = 2 * x_bytes + scales * sizeof(float),
               y_bytes = static_cast<size_t>(kSide * kSide) * size_of(p.y_dtype);
  std::vector<std::byte> given(given_bytes);  // x, w and scales of 1
  uint64_t state = 1;
  for (int64_t i = 0; i < 2 * kSide; ++i)
    for (int64_t k = 0; k < half; ++k) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float value = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
      store_float(p.dtype, given.data(), i * row + k, value);
      // Each product once more, negative, somewhere else.
      store_float(p.dtype, given.data(), i * row + half + (k + half / 3) % half, i < kSide ? value : -value);
    }
  std::fill_n(reinterpret_cast<float*>(given.data() + 2 * x_bytes), scales, 1.0f);

  std::vector<std::byte> found[2];
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // a caller may be capturing
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) return false;
  void* memory = nullptr;
  bool good = cudaMallocAsync(&memory, kWorkspace + given_bytes + y_bytes, trial_) == cudaSuccess;
  if (good) {
    std::byte* const x = static_cast<std::byte*>(memory) + kWorkspace;
    Product t = p;
    t.rows = t.out = kSide, t.batch = 1;
    t.x = x, t.w = x + x_bytes, t.y = x + given_bytes;
    t.x_row = t.w_row = row, t.y_row = kSide;
    t.x_matrix = t.w_matrix = t.y_matrix = 0;
    t.x_scales = t.w_scales = codes ? reinterpret_cast<const float*>(x + 2 * x_bytes) : nullptr;
    const Problem problem(t, kSide, "project");
    good = cudaMemcpyAsync(x, given.data(), given_bytes, cudaMemcpyHostToDevice, trial_) == cudaSuccess;
    for (int i = 0; good && i < 2; ++i) {
      found[i].resize(y_bytes);
      good =
          cudaMemsetAsync(t.y, i == 0 ? 0x00 : 0xff, y_bytes, trial_) == cudaSuccess &&  // what is not written differs
          launch(problem, t, i == 0 ? a : b, trial_, memory) == CUBLAS_STATUS_SUCCESS &&
          cudaMemcpyAsync(found[i].data(), t.y, y_bytes, cudaMemcpyDeviceToHost, trial_) == cudaSuccess;
    }
    cudaFreeAsync(memory, trial_);
    good = cudaStreamSynchronize(trial_) == cudaSuccess && good;
  }
  cudaGetLastError();  // what a trial did wrong is nobody's error
  cudaThreadExchangeStreamCaptureMode(&mode);
  return good && found[0] == found[1];
}

Blas::Algorithm Blas::choose(const Problem& problem, const Product& p, const Algorithm& like,
                             std::string_view op) const {
  if (!problem.known) return {};
  const Library& l = library();
  cublasLtMatmulPreferenceOpaque_t preference;
  require(l.preference_init(&preference, sizeof preference), op, "preference", p);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
    require(l.preference_set(&preference, what, &value, sizeof value), op, "preference", p);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspace));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.w, p.w_row, p.w_matrix, p.dtype, p.invariant));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.x, p.x_row, p.x_matrix, p.dtype, p.invariant));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.y, p.y_row, p.y_matrix, p.y_dtype, p.invariant));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.y, p.y_row, p.y_matrix, p.y_dtype, p.invariant));
  // Sums split over blocks are joined in an order that may follow the number of rows.
  if (p.invariant)
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  std::array<cublasLtMatmulHeuristicResult_t, 8> found{};
  int count = 0;
  const cublasStatus_t status = l.heuristic(
      handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&problem.desc),
      const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.w), const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.x),
      const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.y), const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.y),
      &preference, static_cast<int>(found.size()), found.data(), &count);
  // Scales that a library does not take, on a GPU without their kernels, are an invalid value.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0) ||
      (status == CUBLAS_STATUS_INVALID_VALUE && p.dtype == Dtype::fp8_e4m3))
    return {};
  require(status, op, "choice of an algorithm", p);
  const std::span<const cublasLtMatmulHeuristicResult_t> candidates(found.data(), static_cast<size_t>(count));
  const auto alone = [&](const cublasLtMatmulHeuristicResult_t& c) {
    return !(sums_whole(p) && splits(c.algo)) && launches_kernels_alone(problem, p, c.algo);
  };
  // Of many rows it does not matter what a launch costs.
  constexpr int64_t kMany = 256;
  const auto alike = [&](const cublasLtMatmulHeuristicResult_t& c) {
    return (p.rows > kMany || alone(c)) && same_bits(p, c.algo, *like);
  };
  const auto best = like ? std::find_if(candidates.begin(), candidates.end(), alike)
                         : std::find_if(candidates.begin(), candidates.end(), alone);
  if (best != candidates.end()) return best->algo;
  return like ? like : candidates.front().algo;
}

cublasStatus_t Blas::launch(const Problem& problem, const Product& p, const cublasLtMatmulAlgo_t& algorithm,
                            cudaStream_t stream, void* workspace) const {
  const float one = 1, zero = 0;
  return library().matmul(handle_, const_cast<cublasLtMatmulDescOpaque_t*>(&problem.desc), &one, p.w,
                          const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.w), p.x,
                          const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.x), &zero, p.y,
                          const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.y), p.y,
                          const_cast<cublasLtMatrixLayoutOpaque_t*>(&problem.y), &algorithm,
                          workspace ? workspace : workspace_, kWorkspace, stream);
}

void Blas::multiply(const Product& p, cudaStream_t stream, std::string_view op) {
  if (p.rows == 0 || p.out == 0 || p.batch == 0) return;
  if (!missing_.empty()) throw DeviceError(std::string(op) + ": no matrix products on this machine: " + missing_);
  if (!try_multiply(p, stream, op))
    throw UnsupportedError(std::string(op) + ": cuBLASLt has no algorithm for " + shape_of(p));
}

bool Blas::try_multiply(const Product& p, cudaStream_t stream, std::string_view op) {
  if (!missing_.empty()) return false;
  if (p.rows == 0 || p.out == 0 || p.batch == 0) return true;
  // Algorithms are chosen for a few numbers of rows; a product takes that of the next one up.
  const int64_t rows = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(p.rows)));
  const Algorithm& chosen = algorithm(p, p.invariant ? std::clamp(rows, kInvariantRows, kMostInvariantRows) : rows, op);
  if (!chosen) return false;
  Problem problem(p, p.rows, op);
  cublasStatus_t status = launch(problem, p, *chosen, stream);
  const auto refused = [&] { return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE; };
  if (refused()) {  // an algorithm need not serve fewer rows
    const Algorithm own = p.invariant ? algorithm(p, kInvariantRows, op) : choose(problem, p, {}, op);
    if (!own) return false;
    status = launch(problem, p, *own, stream);
    if (refused() && p.invariant)
      throw UnsupportedError(std::string(op) + ": cuBLASLt does not run for " + std::to_string(p.rows) +
                             " rows the algorithm that it has for " + std::to_string(kInvariantRows) + " (" +
                             shape_of(p) + ")");
    if (refused()) return false;
  }
  require(status, op, "product", p);
  return true;
}

const Blas::Algorithm& Blas::algorithm(const Product& p, int64_t rows, std::string_view op) {
  const Key key{rows,
                p.out,
                p.in,
                p.batch,
                static_cast<int64_t>(p.dtype),
                static_cast<int64_t>(p.y_dtype),
                p.x_row,
                p.x_matrix,
                p.y_row,
                p.y_matrix,
                p.invariant,
                alignment(p.x, 0, 0, p.dtype, p.invariant) * 512 + alignment(p.y, 0, 0, p.y_dtype, p.invariant)};
  if (const auto at = algorithms_.find(key); at != algorithms_.end()) return at->second;
  Algorithm like;
  if (p.invariant && rows > kInvariantRows) {
    like = algorithm(p, kInvariantRows, op);
    if (!like) return algorithms_.emplace(key, like).first->second;
  }
  return algorithms_.emplace(key, choose(Problem(p, rows, op), p, like, op)).first->second;
}

}  // namespace mla::cuda
