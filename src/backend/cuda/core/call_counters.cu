#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cuda/core/call_counters.hpp"
#include "backend/cuda/core/check.hpp"

namespace mla::cuda {
namespace {

constexpr int kPlaces = 1024, kOfStreams = kPlaces / 2;  // 2 MiB of each device
__device__ unsigned counters[kPlaces][kCallCounters];

struct Places {
  std::mutex mutex;  // never held across calls of CUDA: its threads give places back
  unsigned* first = nullptr;
  int used = 0;  // places from here on were never taken
  std::vector<int> back;
  std::map<unsigned long long, int> of_stream;  // by numbers, which no later stream gets
  struct OfCapture {
    unsigned long long capture;
    int place;
  };
  std::map<cudaStream_t, OfCapture> of_capture;  // a stream's latest

  // -1: none is left.
  int take() {
    if (!back.empty()) {
      const int place = back.back();
      back.pop_back();
      return place;
    }
    return used < kPlaces ? used++ : -1;
  }
};

// Never destroyed: graphs may go when the process ends.
Places& places_of(int device) {
  static std::mutex mutex;
  static auto* const all = new std::map<int, Places>;
  const std::lock_guard lock(mutex);
  return (*all)[device];
}

struct Held {
  Places* places;
  int place;
};
void CUDART_CB give_back(void* held) {
  const std::unique_ptr<Held> h(static_cast<Held*>(held));
  const std::lock_guard lock(h->places->mutex);
  h->places->back.push_back(h->place);
  std::erase_if(h->places->of_capture, [&](const auto& latest) { return latest.second.place == h->place; });
}

// The graph and its copies hold the place until the last of them is gone.
bool hold(cudaGraph_t graph, Places& places, int place) {
  auto held = std::make_unique<Held>(&places, place);
  cudaUserObject_t object = nullptr;
  if (cudaUserObjectCreate(&object, held.get(), give_back, 1, cudaUserObjectNoDestructorSync) != cudaSuccess) {
    cudaGetLastError();
    give_back(held.release());
    return false;
  }
  held.release();
  if (cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess) return true;
  cudaGetLastError();
  cudaUserObjectRelease(object);  // gives it back
  return false;
}

// A captured stream has none to ask for. Where another thread captures, asking must not end that.
bool number_of(cudaStream_t stream, unsigned long long& id) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const bool known = cudaStreamGetId(stream, &id) == cudaSuccess;
  if (!known) cudaGetLastError();
  cudaThreadExchangeStreamCaptureMode(&mode);
  return known;
}

}  // namespace

unsigned* call_counters(int device, cudaStream_t stream) {
  constexpr const char* op = "device_attention";
  cudaStreamCaptureStatus status{};
  unsigned long long capture = 0, id = 0;
  cudaGraph_t graph = nullptr;
  check(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph), op, "capture");
  const bool captured = status == cudaStreamCaptureStatusActive;
  if (captured ? stream == cudaStreamPerThread : !number_of(stream, id)) return nullptr;
  Places& places = places_of(device);
  unsigned* first = nullptr;
  int place = -1;
  {
    const std::lock_guard lock(places.mutex);
    first = places.first;
    if (!captured) {
      const auto found = places.of_stream.find(id);
      if (found != places.of_stream.end()) place = found->second;
      else if (places.of_stream.size() < kOfStreams && (place = places.take()) >= 0)
        places.of_stream.emplace(id, place);
    } else if (const auto found = places.of_capture.find(stream);
               found != places.of_capture.end() && found->second.capture == capture) {
      return first + int64_t{found->second.place} * kCallCounters;
    } else {
      place = places.take();
    }
  }
  if (place < 0) return nullptr;
  if (!first) {
    void* at = nullptr;
    check(cudaGetSymbolAddress(&at, counters), op, "counters");
    first = static_cast<unsigned*>(at);
  }
  const bool kept = !captured || hold(graph, places, place);
  const std::lock_guard lock(places.mutex);
  places.first = first;
  if (!kept) return nullptr;
  if (captured) places.of_capture[stream] = {capture, place};
  return first + int64_t{place} * kCallCounters;
}

}  // namespace mla::cuda
