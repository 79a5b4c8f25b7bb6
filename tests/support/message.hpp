// What an error says.
#pragma once

#include <string>

#include "mla/error.hpp"

namespace mla::test {

/// The message of the E that f() throws; "no error" if it throws nothing.
template <class E = Error, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace mla::test
