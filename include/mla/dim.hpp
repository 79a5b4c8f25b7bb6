// Names of dimensions. A View carries them in its type, so a wrong dimension does not compile.
#pragma once

#include <string_view>

namespace mla {

#define MLA_DIM(Name)                               \
  struct Name {                                     \
    static constexpr std::string_view name = #Name; \
  }

MLA_DIM(Token);        // a row of the step: the flattened query tokens of all requests
MLA_DIM(Key);          // a row of keys or values laid out flat (new tokens, or a context chunk)
MLA_DIM(Head);         // attention heads on this rank
MLA_DIM(Nope);         // unrotated part of a head's query/key
MLA_DIM(Rope);         // rotated part, shared by all heads on the key side
MLA_DIM(QueryKey);     // [nope | rope] of one head
MLA_DIM(Latent);       // compressed KV (kv_lora_rank)
MLA_DIM(Entry);        // a dequantised cache row: [latent | rope]
MLA_DIM(Value);        // a head's value; for latent attention the value width of the cache format
MLA_DIM(Hidden);       // model width
MLA_DIM(QueryLatent);  // compressed query (q_lora_rank)
MLA_DIM(Request);      // a sequence of the batch
MLA_DIM(Page);         // a page (block) of the cache, or a column of the block table
MLA_DIM(Partial);      // a row of split-KV partial results
MLA_DIM(In);           // input features of a linear map
MLA_DIM(Out);          // output features of a linear map
MLA_DIM(HeadValue);    // all heads' values of a token, [Head * Value] flat
MLA_DIM(IndexHead);    // heads of the sparse indexer
MLA_DIM(IndexDim);     // width of an indexer query or key
MLA_DIM(Topk);         // selected keys of a query row, unused ones -1
MLA_DIM(Word);         // 32 columns of a row's mask of keys
MLA_DIM(Group);        // a group of output elements that share a quantisation scale

#undef MLA_DIM

}  // namespace mla
