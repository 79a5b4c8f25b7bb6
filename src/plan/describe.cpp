#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <variant>

#include "core/counted.hpp"
#include "plan/internal.hpp"

namespace mla {
namespace {

[[gnu::format(printf, 2, 3)]] void line(std::string& out, const char* format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  out += text;
  out += '\n';
}

template <class T>
std::string count_of(const T& things, const char* thing) {
  return counted(static_cast<int64_t>(things.size()), thing);
}

struct PathTotals {
  int64_t requests = 0, tokens = 0, shortest_query = 0, longest_query = 0, longest_context = 0;
};

void describe_workspace(std::string& out, const Plan& p) {
  line(out, "  workspace: %s", readable_bytes(p.workspace_bytes).c_str());
  for (const Region& r : p.regions)
    if (r.bytes > 0) line(out, "    %-16s %s", std::string(r.name).c_str(), readable_bytes(r.bytes).c_str());
}

}  // namespace

std::string Plan::describe() const {
  std::string out;
  line(out, "plan: %s, %s, %s in %s on %s with %s", model.name.c_str(), counted(model.heads, "head").c_str(),
       counted(tokens, "token").c_str(), count_of(requests, "request").c_str(), to_string(device.device).c_str(),
       counted(device.threads, "thread").c_str());
  const std::string up =
      options.up == WeightFormat::plain ? "" : ", W_UK and W_UV in " + std::string(to_string(options.up));
  const std::string activations =
      options.activations == Activations::plain ? "" : ", activations " + std::string(to_string(options.activations));
  const std::string calls = options.activation_dtype == ActivationDtype::native
                                ? ""
                                : ", rows of calls in " + std::string(to_string(options.activation_dtype));
  const ContextParallel& shared = options.context_parallel;
  const int64_t members = shared.sharding.ranks();
  const std::string held =
      !shared.shared() ? ""
                       : ", rank " + std::to_string(shared.rank) + " of " + std::to_string(options.tensor_parallel) +
                             (members < options.tensor_parallel ? " in groups of " + std::to_string(members) : "") +
                             " that hold " + counted(shared.sharding.interleave(), "token") + " in turn" +
                             (exchanges_heads() ? " and exchange heads" : "");
  const std::string sums = sums_own() ? ", rows " + std::to_string(own_rows().begin) + " to " +
                                            std::to_string(own_rows().begin + own_rows().count) + " of the sums"
                                      : "";
  line(out, "  cache: %s, pages of %lld, %.0f B a token%s; compute %s%s%s%s%s%s%s%s%s; split %s",
       std::string(to_string(cache.format)).c_str(), static_cast<long long>(cache.page_size), cache.token_bytes(),
       held.c_str(), std::string(to_string(options.compute)).c_str(),
       !options.fp8_query                          ? ""
       : options.decode == DecodeOperands::compute ? ", fp8 queries"
                                                   : ", fp8 queries and products of codes",
       options.absorbed ? ", fully absorbed weights" : "", up.c_str(), activations.c_str(), calls.c_str(), sums.c_str(),
       options.form == LayerForm::attention ? ", attention form" : "",
       options.cache_use == CacheUse::append ? ""
       : options.cache_use == CacheUse::read ? ", the step's rows are in the cache"
                                             : ", no cache",
       std::string(to_string(options.split)).c_str());

  if (options.dummy) {
    line(out, "  dummy: calls write zeros, and do nothing else");
    describe_workspace(out, *this);
    return out;
  }
  if (options.maxima)
    line(out, "  of maxima: %s, %s, %s of a request, sequences of %lld; %lld of the tokens are the batch's",
         counted(options.maxima->requests, "request").c_str(), counted(options.maxima->tokens, "token").c_str(),
         counted(options.maxima->query_len, "new token").c_str(), static_cast<long long>(options.maxima->seq_len),
         static_cast<long long>(batch_tokens));
  PathTotals groups[3];
  for (const RequestPlan& r : requests) {
    PathTotals& g = groups[static_cast<size_t>(r.path)];
    g.shortest_query = g.requests ? std::min<int64_t>(g.shortest_query, r.query_len) : r.query_len;
    g.longest_query = std::max<int64_t>(g.longest_query, r.query_len);
    g.longest_context = std::max<int64_t>(g.longest_context, r.context);
    ++g.requests;
    g.tokens += r.query_len;
  }
  const bool one_path = planning::invariant(*this) && uses_cache() && !planning::selects(*this, 0);
  line(out, "  paths by policy %s%s:", std::string(to_string(options.path)).c_str(),
       one_path && (options.path == PathPolicy::automatic || options.path == PathPolicy::by_length)
           ? ", which is latent under batch_invariant"
           : "");
  for (const Path path : {Path::latent, Path::expanded, Path::sparse}) {
    const PathTotals& g = groups[static_cast<size_t>(path)];
    if (path == Path::sparse && !model.indexer) continue;
    if (g.requests == 0) line(out, "    %-8s  none", std::string(to_string(path)).c_str());
    else
      line(out, "    %-8s  %s, %s; %lld to %s, contexts up to %lld", std::string(to_string(path)).c_str(),
           counted(g.requests, "request").c_str(), counted(g.tokens, "token").c_str(),
           static_cast<long long>(g.shortest_query), counted(g.longest_query, "new token").c_str(),
           static_cast<long long>(g.longest_context));
  }

  if (!latent_items.empty()) {
    int64_t longest = 0, partials = 0;  // partial_rows is the most of the latent path's and any sparse launch's
    for (const SplitRows& s : splits) partials += int64_t{s.rows} * s.splits;
    for (const LatentItem& i : latent_items) longest = std::max<int64_t>(longest, i.kv_end - i.kv_begin);
    line(out, "  latent: %s of at most %s; %zu split, %s", count_of(latent_items, "item").c_str(),
         counted(longest, "position").c_str(), splits.size(), counted(partials, "partial row").c_str());
  }
  if (expands()) {
    line(
        out, "  expanded%s: %s; %s of at most %s",
        prefills_codes() ? (" as " + std::string(to_string(options.prefill))).c_str() : "",
        suffix_items.empty() ? "new tokens read back from the cache" : count_of(suffix_items, "new-token item").c_str(),
        count_of(chunks, "context chunk").c_str(), counted(context_rows, "row").c_str());
    constexpr size_t kShown = 6;
    for (size_t c = 0; c < std::min(chunks.size(), kShown); ++c)
      line(out, "    chunk %zu: %s of %s, first request %d from %d", c, counted(chunks[c].rows, "row").c_str(),
           count_of(chunks[c].pieces, "request").c_str(), chunks[c].pieces[0].request, chunks[c].pieces[0].start);
    if (chunks.size() > kShown) line(out, "    ... %zu more", chunks.size() - kShown);
  }
  if (options.output.kind != OutputKind::none) {
    const std::string name = to_string(options.output);
    if (fused_output)
      line(out, "  output: %s, fused: %s; %s", name.c_str(),
           planning::value_up_quantises(*this) ? "heads are quantised where they are finished"
           : latent_tokens.empty()
               ? "heads are quantised where attention finishes them"
               : "the expanded path's heads are quantised where attention finishes them, the others "
                 "by one quantize",
           counted(head_rows, "f32 row").c_str());
    else
      line(out, "  output: %s, not fused: %s; f32 heads, then one quantize", name.c_str(),
           planning::why_not_fused(*this).c_str());
  }
  if (topk > 0) {
    line(out, "  sparse by policy %s: topk %lld; index cache %s, %.0f B a token%s%s",
         std::string(to_string(options.sparse)).c_str(), static_cast<long long>(topk),
         std::string(to_string(index_cache.format)).c_str(), index_cache.token_bytes(),
         options.index_hadamard ? ", rotated" : "",
         options.index_arithmetic == IndexArithmetic::fp8 ? ", scored by fp8 products" : "");
    if (sparse_rows() > 0 && !serves_block()) line(out, "    chosen by the caller: attention form, nothing is scored");
    else if (sparse_rows() > 0)
      line(out, "    scored in %s of at most %s x %s (%s of scores, %s of candidates)",
           count_of(index_schedule.selected, "tile").c_str(), counted(index_schedule.tiles.rows, "row").c_str(),
           counted(index_schedule.tiles.keys, "position").c_str(),
           readable_bytes(index_schedule.tiles.score_bytes).c_str(),
           readable_bytes(index_schedule.tiles.state_bytes).c_str());
    if (sparse_rows() > 0 && serves_block() && shared.shared())
      line(out, "    of the rank's own keys; the best of %s of each of %lld ranks are selected",
           counted(index_schedule.candidates, "candidate").c_str(), static_cast<long long>(members));
    for (const SparseGroup& g : sparse_groups)
      line(out, "    launch: %s %s; %s, %s", counted(g.count, "row").c_str(),
           g.rows == 0
               ? "read in place"
               : ("through a workspace of " + counted(g.rows, "row") + ", " + count_of(g.pieces, "sequence")).c_str(),
           count_of(g.work.items, "item").c_str(), counted(g.work.partial_rows, "partial row").c_str());
    if (masked_rows() > 0)
      line(out, "    masked: %s on the expanded path, masks of %s", counted(masked_rows(), "row").c_str(),
           counted(mask_words, "word").c_str());
    line(out, "    selection, kept by layers that share it: %s", readable_bytes(selection_bytes).c_str());
  } else if (model.indexer) {
    line(out, "  sparse: off, everything is attended; index cache %s is filled",
         std::string(to_string(index_cache.format)).c_str());
  }
  const auto name_steps = [&](const std::string& what, const auto& is) {
    std::string names;
    for (const Step& step : steps)
      if (is(step)) names += " " + std::string(step.name);
    if (!names.empty()) out += "  " + what + ":" + names + "\n";
  };
  for (int8_t lane = 1; lane < kLanes; ++lane)
    name_steps("lane " + std::to_string(lane) + ", at once with others", [&](const Step& step) {
      return step.lane == lane && step.calls.any_of(kForward | kIndexer) &&
             !std::holds_alternative<steps::Wait>(step.work);
    });
  name_steps("for all layers, when the step is staged", [](const Step& step) { return step.calls.any_of(kStaging); });
  describe_workspace(out, *this);
  return out;
}

}  // namespace mla
