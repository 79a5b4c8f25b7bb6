#include "ranks.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "mla/error.hpp"
#include "mla/parallel.hpp"
#include "tensor.hpp"

namespace mla::python {
namespace {

PyObject* rank_error = nullptr;  // the class, as long as the module lives

std::string text_of(nb::python_error& e) {
  try {
    return std::string(nb::str(e.type().attr("__name__")).c_str()) + ": " + nb::str(e.value()).c_str();
  } catch (nb::python_error&) {
    return "an exception that has no text";
  }
}

// Whose fault a caller's function says it is: the attribute `rank` of a RankError that it raises.
std::optional<int> rank_of(const nb::python_error& e, int ranks) {
  int rank = -1;
  if (!e.matches(rank_error) || !nb::hasattr(e.value(), "rank") || !nb::try_cast(e.value().attr("rank"), rank) ||
      rank < 0 || rank >= ranks)
    return std::nullopt;
  return rank;
}

// Messages are bytearrays: what a function keeps of them is its own, and the library's memory is never Python's.
class CallersTransport final : public Transport {
 public:
  CallersTransport(int ranks, const RankFunctions& functions) : ranks_(ranks), functions_(functions) {}

  void exchange(const Exchange& e) override {
    const nb::gil_scoped_acquire gil;
    try {
      nb::list send, receive;
      for (size_t r = 0; r < e.send.size(); ++r) {
        send.append(nb::bytearray(e.send[r].data, e.send[r].bytes));
        receive.append(nb::bytearray(nullptr, e.receive[r].bytes));
      }
      const double seconds = std::chrono::duration<double>(e.deadline - std::chrono::steady_clock::now()).count();
      // A name that is no UTF-8, of a caller in C++, is none here.
      const nb::object exchange = functions_.exchange;
      if (!exchange.is_valid()) throw DeviceError("exchange is gone: nobody refers to the communicator");
      exchange(nb::steal(PyUnicode_DecodeUTF8(e.step.data(), static_cast<Py_ssize_t>(e.step.size()), "replace")),
               std::max(seconds, 0.0), send, receive);
      for (size_t r = 0; r < e.receive.size(); ++r) {
        const nb::handle got = receive[r];
        if (!PyByteArray_Check(got.ptr()) || static_cast<size_t>(PyByteArray_Size(got.ptr())) != e.receive[r].bytes)
          throw DeviceError("exchange of step '" + std::string(e.step) + "': receive[" + std::to_string(r) +
                            "] is not the bytearray of " + std::to_string(e.receive[r].bytes) + " bytes that it was");
        if (e.receive[r].bytes > 0) std::memcpy(e.receive[r].data, PyByteArray_AsString(got.ptr()), e.receive[r].bytes);
      }
    } catch (nb::python_error& error) {
      const std::string text = "exchange raised " + text_of(error);
      if (const std::optional<int> rank = rank_of(error, ranks_)) throw RankError(*rank, std::string(e.step), text);
      throw DeviceError(text);
    }
  }
  void abort(int rank, std::string_view reason) noexcept override {
    const nb::gil_scoped_acquire gil;
    const nb::object abort = functions_.abort;
    if (!abort.is_valid() || abort.is_none()) return;
    try {
      abort(rank, nb::steal(PyUnicode_DecodeUTF8(reason.data(), static_cast<Py_ssize_t>(reason.size()), "replace")));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(abort);
    } catch (...) {  // no memory
    }
  }

 private:
  int ranks_;
  const RankFunctions& functions_;
};

// A communicator is often an attribute of what its functions are methods of.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  if (const auto& functions = nb::inst_ptr<PyCommunicator>(self)->functions) {
    Py_VISIT(functions->exchange.ptr());
    Py_VISIT(functions->abort.ptr());
  }
  return 0;
}
int clear(PyObject* self) {
  if (const auto& functions = nb::inst_ptr<PyCommunicator>(self)->functions) {
    functions->exchange.reset();
    functions->abort.reset();
  }
  return 0;
}
PyType_Slot kSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

HeadRange heads_of(const std::pair<int64_t, int64_t>& heads) { return {heads.first, heads.second}; }

}  // namespace

std::vector<HeadRange> head_ranges(const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  std::vector<HeadRange> ranges;
  for (const auto& p : pairs) ranges.push_back(heads_of(p));
  return ranges;
}

namespace {

void bind_communicator(nb::module_& m) {
  nb::class_<PyCommunicator>(
      m, "Communicator",
      "A rank's place in its group: of thread_communicators, or over a caller's own functions.\n\n"
      "All ranks make the same calls in the same order. A group that has failed stays so: RankError, naming rank\n"
      "and step. As a context manager it leaves the group at its end; an exception ends the others' calls, too.",
      nb::is_weak_referenceable(), nb::type_slots(kSlots))
      .def(
          "__init__",
          [](PyCommunicator* self, int rank, int ranks, nb::callable exchange, nb::object abort) {
            if (!abort.is_none() && !PyCallable_Check(abort.ptr()))
              throw nb::type_error("Communicator: abort is neither None nor a function");
            auto functions = std::make_unique<RankFunctions>(std::move(exchange), std::move(abort));
            Communicator made(rank, ranks, std::make_unique<CallersTransport>(ranks, *functions));
            new (self) PyCommunicator(std::move(made), std::move(functions));
          },
          nb::arg("rank"), nb::arg("ranks"), nb::arg("exchange"), nb::arg("abort").none() = nb::none(),
          "exchange(step: str, seconds: float, send: list[bytearray], receive: list[bytearray]) brings send[r] to "
          "rank\n"
          "r, and fills receive[r], whose length is right, with what rank r sent here; nothing to itself. Messages of\n"
          "two ranks come in the order in which they were sent. It ends within `seconds`; where it cannot it raises: "
          "a\n"
          "RankError whose attribute rank says whose fault that is, anything else counts as this rank's.\n"
          "abort(rank: int, reason: str) makes the exchanges of all ranks fail as far as it can, from any thread, at\n"
          "any time. Without it the others learn of a failure at their deadlines.")
      .def_prop_ro("rank", &PyCommunicator::rank)
      .def_prop_ro("ranks", &PyCommunicator::ranks)
      .def(
          "barrier",
          [](PyCommunicator& c, const std::string& step, double seconds) {
            const std::chrono::nanoseconds deadline = deadline_of(seconds);
            c.use([&](Communicator& group) { group.barrier({step, deadline}); });
          },
          nb::arg("step") = "barrier", nb::arg("seconds") = 60.0, nb::call_guard<nb::gil_scoped_release>(),
          "Returns once all ranks are here.")
      .def(
          "connect",
          [](PyCommunicator& c, const std::string& device, const std::string& link, int64_t staging_bytes,
             double seconds) {
            const std::chrono::nanoseconds deadline = deadline_of(seconds);
            if (staging_bytes < 1)
              throw InputError("Communicator: staging_bytes is " + std::to_string(staging_bytes) + ", at least 1");
            c.use([&](Communicator& group) {
              group.connect(parse_device(device), parse_gpu_link(link), static_cast<size_t>(staging_bytes), deadline);
            });
          },
          nb::arg("device"), nb::kw_only(), nb::arg("link") = "peer", nb::arg("staging_bytes") = int64_t{64} << 20,
          nb::arg("seconds") = 60.0, nb::call_guard<nb::gil_scoped_release>(),
          "Makes calls on streams of this GPU possible; by all ranks, each for a GPU of its own. link: peer, stores\n"
          "into each other's memory, at most 16 GPUs of one machine; or nccl.")
      .def(
          "abort", [](PyCommunicator& c, const std::string& reason) { c.abort(reason); }, nb::arg("reason"),
          nb::call_guard<nb::gil_scoped_release>(),
          "The group ends: the others' calls, those that wait too, fail with this rank and the reason.")
      .def("leave", &PyCommunicator::leave, nb::call_guard<nb::gil_scoped_release>(),
           "Leaves the group, once calls of other threads have ended: who waits for this rank fails.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Communicator"))
      .def(
          "__exit__",
          [](PyCommunicator& c, nb::handle type, nb::handle value, nb::handle) {
            std::string reason;
            if (!type.is_none())
              reason = std::string(nb::str(type.attr("__name__")).c_str()) + ": " + nb::str(value).c_str();
            const nb::gil_scoped_release released;
            if (!reason.empty()) c.abort(reason);
            c.leave();
          },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none())
      .def("__repr__", [](const PyCommunicator& c) {
        return "mla.Communicator(rank=" + std::to_string(c.rank()) + ", ranks=" + std::to_string(c.ranks()) + ")";
      });
  m.def(
      "thread_communicators",
      [](int ranks) {
        nb::typed<nb::list, PyCommunicator> all;
        for (Communicator& c : thread_communicators(ranks))
          all.append(nb::cast(new PyCommunicator(std::move(c)), nb::rv_policy::take_ownership));
        return all;
      },
      nb::arg("ranks"), "A group of threads of this process: one for each thread. ranks from 1 to 1024.");
}

void bind_parts(nb::module_& m) {
  m.def(
      "head_share",
      [](int64_t heads, int rank, int ranks) {
        const HeadRange share = head_share(heads, rank, ranks);
        return std::pair(share.begin, share.count);
      },
      nb::arg("heads"), nb::arg("rank"), nb::arg("ranks"),
      "(first head, number of heads) of rank's share, as even as can be. InputError for a rank outside the group, or\n"
      "more ranks than heads.");
  m.def(
      "part_of",
      [](const ModelConfig& model, const std::pair<int64_t, int64_t>& heads) {
        return part_of(model, heads_of(heads));
      },
      nb::arg("model"), nb::arg("heads"),
      "The model of heads (first, number) alone. InputError unless there is one at least, all of them the model's.");
  m.def(
      "part_of",
      [](const ModelConfig& model, const LayerTensors& tensors, const std::pair<int64_t, int64_t>& heads,
         const std::vector<std::pair<int64_t, int64_t>>& group) {
        return part_of(model, tensors, heads_of(heads), head_ranges(group));
      },
      nb::arg("model"), nb::arg("tensors"), nb::arg("heads"),
      nb::arg("group") = std::vector<std::pair<int64_t, int64_t>>(), nb::call_guard<nb::gil_scoped_release>(),
      "A layer's tensors for part_of(model, heads), for prepare(). ShapeError naming a tensor that is not the "
      "model's.\n"
      "group: heads of each member of the group that shares a cache with this rank, for plans whose ranks exchange\n"
      "heads (PlanOptions): W_UK and W_UV are then held of all of them.");
}

}  // namespace

std::chrono::nanoseconds deadline_of(double seconds) {
  constexpr double kMost = 86400;
  if (!(seconds > 0) || seconds > kMost)
    throw InputError("seconds is " + std::to_string(seconds) + ", allowed above 0 to 86400");
  return std::chrono::nanoseconds(std::max<int64_t>(static_cast<int64_t>(seconds * 1e9), 1));
}

void bind_rank_error(nb::module_& m, nb::handle base) {
  const nb::exception<RankError> made(m, "RankError", base.ptr());
  rank_error = made.ptr();
  made.attr("__doc__") =
      "The group cannot go on. rank: the one that it failed by; step: of the call that could not be made.";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const RankError& e) {
      nb::object value = nb::handle(rank_error)(e.what());
      value.attr("rank") = e.rank();
      value.attr("step") = e.step();
      PyErr_SetObject(rank_error, value.ptr());
    }
  });
}

void bind_ranks(nb::module_& m) {
  bind_communicator(m);
  bind_parts(m);
}

}  // namespace mla::python
