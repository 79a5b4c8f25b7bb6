// Programs whose tests run on the CPU.
#include "support/device.hpp"

namespace mla::test {

constinit const Device kDevice{};
constinit const bool kOnGpu = false;

}  // namespace mla::test
