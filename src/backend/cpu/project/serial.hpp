// oneDNN's Debian build threads with OpenMP. Tasks already run on the pool, so each call is held to the calling thread.
#pragma once

#include <omp.h>

namespace mla::cpu {

class SerialOpenMp {
 public:
  SerialOpenMp() : threads_(omp_get_max_threads()) {
    if (threads_ != 1) omp_set_num_threads(1);
  }
  ~SerialOpenMp() {
    if (threads_ != 1) omp_set_num_threads(threads_);
  }
  SerialOpenMp(const SerialOpenMp&) = delete;
  SerialOpenMp& operator=(const SerialOpenMp&) = delete;

 private:
  int threads_;  // this setting belongs to the calling thread alone
};

}  // namespace mla::cpu
