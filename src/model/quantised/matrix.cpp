// Which form a matrix has: its tensors' names and dtypes say, and the config where these leave it open.
#include "mla/error.hpp"
#include "model/quantised/formats.hpp"
#include "model/text.hpp"

namespace mla {
namespace {

HostTensor plain(const StoredMatrix& m) {
  const Safetensors& file = m.file("weight");
  HostTensor t = file.outline(m.name("weight"));  // names a dtype that is none of the plain ones
  m.take("weight", {"F32", "BF16", "F16"}, {{m.rows, m.cols}}, "");
  t.shape = {m.wanted.rows, m.wanted.cols};
  if (!m.data) return t;
  const auto values = m.bytes("weight", m.wanted);
  t.data = values->data();
  t.owner = values;
  return t;
}

// What a quantised weight's inputs and outputs were to be quantised by. Ours are not.
void pass_activations(const StoredMatrix& m) {
  for (const char* part : {"input_scale", "input_global_scale", "input_zero_point"})
    if (m.has(part)) m.pass(part);
}

HostTensor packed(const StoredMatrix& m) {
  const std::string& dtype = m.entry("weight_packed")->dtype;
  if (dtype == "U8") return read_fp4(m, "weight_packed");
  if (dtype == "I32") return read_packed_integers(m);
  m.fail("weight_packed", "has dtype " + dtype + ", expected U8 or I32");
}

HostTensor columns_of_words(const StoredMatrix& m) {
  const std::string& method = m.model.quantisation.method;
  if (method == "awq") return read_awq(m);
  if (method == "gptq") return read_gptq(m);
  m.unsupported("qweight", "is there with quant_method '" + method +
                               "' in the config, which says not how it is packed: "
                               "awq or gptq is needed");
}

}  // namespace

HostTensor read_matrix(const StoredMatrix& m) {
  const SafetensorsEntry* weight = m.entry("weight");
  const bool packed_there = m.has("weight_packed"), words_there = m.has("qweight");
  if (!weight && !packed_there && !words_there) m.missing("weight", "expected shape " + shape_text({m.rows, m.cols}));
  const std::string dtype = weight ? weight->dtype : "";
  if (weight && dtype != "F8_E4M3" && dtype != "U8" && dtype != "I8") return plain(m);
  pass_activations(m);
  if (dtype == "F8_E4M3") return read_fp8(m);
  if (dtype == "U8") return read_fp4(m, "weight");
  if (dtype == "I8") return read_int8(m);
  return packed_there ? packed(m) : columns_of_words(m);
}

}  // namespace mla
