// Several ranks on one model: which heads are a rank's, and the group over which mla_forward sums hidden rows.
//
// A rank makes the model of its heads (mla_model_part), weights of them (mla_prepare_options head_begin, head_count),
// plans with mla_plan_options tensor_parallel and passes its communicator in mla_layer_args ranks. All ranks make the
// same calls in the same order, each on a thread or in a process of its own. mla_attend gives a part's heads alone and
// needs no group.
#ifndef MLA_C_RANKS_H
#define MLA_C_RANKS_H

#include "mla/c/base.h"
#include "mla/c/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Heads [*begin, *begin + *count) are rank's of `ranks` shares that are as even as can be. MLA_ERROR_INPUT for a rank
/// outside the group, and for more ranks than heads.
MLA_API mla_status mla_head_share(int64_t heads, int32_t rank, int32_t ranks, int64_t* begin, int64_t* count);
/// The model of these heads alone. MLA_ERROR_INPUT unless there is one at least, all of them the model's.
MLA_API mla_status mla_model_part(const mla_model* model, int64_t head_begin, int64_t head_count, mla_model** part);

/// A rank's place in its group. A group that has failed stays so: MLA_ERROR_DEVICE, naming rank and step, from the
/// calls of all ranks.
typedef struct mla_communicator mla_communicator;

/// A group of threads of this process: communicators[ranks], one for each thread. ranks from 1 to 1024.
MLA_API mla_status mla_communicator_create_threads(int32_t ranks, mla_communicator** communicators);

/// One round of messages, this rank's to each and each one's to this rank. A rank sends itself nothing.
typedef struct mla_exchange {
  size_t struct_size;
  const char* step;  ///< what it is for; the same on all ranks
  double seconds;    ///< until when it must be over, from now
  int64_t ranks;     ///< length of the four lists
  const void* const* send;
  const size_t* send_bytes;
  void* const* receive;
  const size_t* receive_bytes;
} mla_exchange;

/// A rank's connections, where the caller has them: an engine's own functions, MPI, sockets.
typedef struct mla_transport {
  size_t struct_size;
  void* user;  ///< passed on
  /// Brings every message to its place; those of two ranks come in the order in which they were sent. Called by one
  /// thread at a time. 0: done; anything else: it could not, for which this rank answers.
  int32_t (*exchange)(void* user, const mla_exchange* messages);
  /// Makes the exchanges of all ranks fail, those under way too, as far as it can. Any thread, at any time; once.
  void (*abort)(void* user, int32_t rank, const char* reason);
  void (*release)(void* user);  ///< when the communicator has ended; NULL: nothing to do
} mla_transport;

/// Rank `rank` of `ranks` over the caller's transport. On failure nothing of it is called.
MLA_API mla_status mla_communicator_create(int32_t rank, int32_t ranks, const mla_transport* transport,
                                           mla_communicator** communicator);
enum { MLA_LINK_PEER = 0, MLA_LINK_NCCL = 1 };
/// Makes mla_forward and mla_attend on streams of this GPU possible; called by all ranks, each for a GPU of its own,
/// with the same link and staging_bytes. MLA_LINK_PEER: stores into each other's memory, GPUs of one machine, at most
/// 16; MLA_LINK_NCCL: by libnccl.so.2, which is looked for now. staging_bytes of the device's memory, 0: 64 MiB; longer
/// messages go in several rounds. seconds: how long to wait for the others, 0: 60. MLA_ERROR_DEVICE where the GPUs do
/// not reach each other, or there is no NCCL.
MLA_API mla_status mla_communicator_connect(mla_communicator* communicator, DLDevice device, int32_t link,
                                            size_t staging_bytes, double seconds);
/// The group ends: the others' calls, those that wait too, fail with this rank and the reason. Any thread, at any time.
MLA_API mla_status mla_communicator_abort(mla_communicator* communicator, const char* reason);
/// Leaves the group: who waits for this rank fails at once.
MLA_API mla_status mla_communicator_destroy(mla_communicator* communicator);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_RANKS_H
