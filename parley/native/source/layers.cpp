// All layers of a decoder in one call: the computation that `model/networks/decoder.py` defines kernel by kernel,
// without Python in between. It calls the same kernels with the same numbers, so the bits are the same. `Workspace`
// holds what one kernel passes to the next, `ForwardPass` the steps of a layer, and `layers` at the end of the file
// calls them in order.
#include <algorithm>

#include "experts.h"
#include "kernels.h"

namespace {

constexpr long SPAN_FIELDS = 4;  // numbers of a span, as in `attend`
// Linear layers of a layer that adapters may change, numbered as LINEAR_SITES in model/networks/layer_linears.py
constexpr long LORA_SITES = 5;

// Fields as in LayerShape and DecoderLayer of native/. Norms that are null change nothing.
struct Layer {
  const Norm *attention_norm, *attention_after_norm, *mlp_norm, *mlp_after_norm, *head_norm;
  const Norm *query_latent_norm, *latent_norm;
  const float *sinks, *slopes;  // or null
  int64_t window, chunk, rope;  // 0: no window, no chunks; -1: no rotation
  int64_t activation, gated, parallel, whole_qk_norm, late_qk_norm, scaled_queries;
  float score_scale, softcap, residual_scale;  // softcap 0: none
  float activation_factors[3];
  Linear qkv, output, gate_up, down;           // the last two of a shared expert, or none, if there is a mixture
  Linear query_up, key_up, value_up;           // of latent attention, or none; the last two have a weight of each head
  const Mixture* mixture;                      // or null

  // The layer that reads the norm of the residual before the MLP; null for several
  const Linear* mlp_reader() const { return mixture ? nullptr : &gate_up; }
};

struct Stack {
  const Layer* layers;
  int64_t count;
  const bf16* embedding;  // [vocab_size][hidden_size]
  const Norm* norm;       // after the last layer
  const float* angles;    // [ropes][positions][2][rotary / 2]: cosines and sines
  int64_t vocab_size, ropes, positions, heads, kv_heads, dim, rotary, interleaved;
  int64_t plain;  // numbers of a query that latents replace; 0: there are no latents
  float embedding_scale;

  long hidden_size() const { return layers->output.out_features; }
};

// The data passed from kernel to kernel, in one allocation.
struct Workspace {
  uintptr_t end;
  bf16* residual;           // [M][hidden]
  bf16* outputs;            // of the last linear layer
  bf16* plain;              // the input of the next one
  bf16* sorted;             // the same for a weight with a permutation
  int8_t* values;           // the same for an int8 weight, with the next two
  float* scales;            // [M]
  int32_t* excess;          // [M]
  float *cos, *sin;         // [ropes][M][rotary], as rope_write takes them
  bf16* inner;              // of adapters
  bf16* rows;               // the input of a mixture, whose shared expert overwrites plain
  float *logits, *weights;  // of a router
  int64_t* ids;             // of the experts that it chose
  char* experts;            // the memory of `experts`
  bf16* active;  // between the linear layers of an MLP, where its first is a gated product
  // Of latent attention: a row of each head, [heads][M], as input and output of linear_heads; queries for latents
  bf16 *head_inputs, *head_outputs, *queries;

  Workspace(const Stack& stack, long M, long columns, void* memory) : end((uintptr_t)memory) {
    long max_outputs = 0, max_inputs = 0, max_sorted = 0, max_shared = 0, max_logits = 0, max_chosen = 0,
         max_experts = 0;
    for (const Layer* layer = stack.layers; layer < stack.layers + stack.count; layer++)
      for (const Linear* each : {&layer->qkv, &layer->output, &layer->gate_up, &layer->down, &layer->query_up}) {
        max_outputs = std::max(max_outputs, each->out_features);
        max_inputs = std::max(max_inputs, each->in_features);
        max_sorted = std::max(max_sorted, each->form == INT8 ? each->in_features / 2
                                          : each->order      ? each->in_features
                                                             : 0);
      }
    long max_active = 0;
    for (const Layer* layer = stack.layers; layer < stack.layers + stack.count; layer++)
      if (is_gate_fused(layer->gate_up, layer->activation, layer->gated, M))
        max_active = std::max(max_active, layer->down.in_features);
    for (const Layer* layer = stack.layers; layer < stack.layers + stack.count; layer++)
      if (const Mixture* mixture = layer->mixture) {
        if (layer->gate_up.out_features) max_shared = stack.hidden_size();
        max_logits = std::max(max_logits, mixture->router.out_features);
        max_chosen = std::max(max_chosen, mixture->routing.experts_per_token + 1);
        max_experts =
            std::max(max_experts, experts_workspace(&mixture->experts, M, mixture->routing.experts_per_token));
      }
    long max_head_inputs = 0, max_head_outputs = 0;
    if (stack.plain)
      for (const Layer* layer = stack.layers; layer < stack.layers + stack.count; layer++) {
        const Linear &key_up = layer->key_up, &value_up = layer->value_up;
        max_head_inputs = std::max({max_head_inputs, stack.heads * std::max(key_up.in_features, value_up.in_features),
                                    layer->query_up.in_features});
        max_head_outputs =
            std::max(max_head_outputs, stack.heads * std::max(key_up.out_features, value_up.out_features));
      }
    allocate(head_inputs, M * max_head_inputs);
    allocate(head_outputs, M * max_head_outputs);
    allocate(queries, stack.plain ? M * stack.heads * stack.dim : 0);
    allocate(residual, M * stack.hidden_size());
    allocate(outputs, M * max_outputs);
    allocate(plain, M * max_inputs);
    allocate(sorted, M * max_sorted);
    values = (int8_t*)sorted;  // no layer has both int8 and a permutation
    allocate(scales, M);
    allocate(excess, M);
    allocate(cos, stack.ropes * M * stack.rotary);
    allocate(sin, stack.ropes * M * stack.rotary);
    allocate(inner, M * columns);
    allocate(active, M * max_active);
    allocate(rows, M * max_shared);
    allocate(logits, M * max_logits);
    allocate(weights, M * max_chosen);
    allocate(ids, M * max_chosen);
    allocate(experts, max_experts);
  }

  template <class T> void allocate(T*& place, long numbers) {
    place = (T*)end;
    end += (numbers * sizeof(T) + 63) / 64 * 64;
  }
};

struct ForwardPass {
  const Stack& stack;
  const Adapted& adapted;
  Workspace workspace;
  long M, threads;

  // outputs = plain times the weight, plus bias, plus adapters; linear layers are numbered from first to last
  void linear(const Linear& layer, long site) {
    multiply(layer, workspace.plain);
    if (adapted.count)
      lora(workspace.plain, workspace.outputs, layer.in_features, layer.out_features, &adapted, site, workspace.inner,
           threads);
  }

  // outputs = rows times the weight, plus bias; int8 layers read workspace.values instead of rows
  void multiply(const Linear& layer, const bf16* rows) {
    if (layer.form == INT8)
      return int8_linear(workspace.values, workspace.scales, workspace.excess, (const uint8_t*)layer.weight,
                         layer.scales, layer.bias, workspace.outputs, M, layer.out_features, layer.in_features, false,
                         threads);
    if (layer.order) {
      for (long m = 0; m < M; m++)
        for (long k = 0; k < layer.in_features; k++)
          workspace.sorted[m * layer.in_features + k] = rows[m * layer.in_features + layer.order[k]];
      rows = workspace.sorted;
    }
    if (layer.form == GROUPED)
      grouped_linear(layer.code, rows, (const uint32_t*)layer.weight, layer.scales, layer.bias, workspace.outputs, M,
                     layer.out_features, layer.in_features, layer.group, false, threads);
    else
      ::linear(rows, (const bf16*)layer.weight, layer.bias, workspace.outputs, M, layer.out_features, layer.in_features,
               false, threads);
  }

  // residual += layer.residual_scale * after(x), unless x is null; its norm goes to plain, or to int8 if the reader
  // takes int8
  void norm(const bf16* x, const Norm* after, const Layer& layer, const Norm* norm, const Linear* reader, bf16* plain) {
    add_norm(x, workspace.residual, workspace.residual, after, layer.residual_scale, 1.f, norm,
             bf16_target(reader, plain), int8_target(reader), workspace.scales, workspace.excess, M,
             stack.hidden_size(), threads);
  }

  // residual += layer.residual_scale * after(outputs); plain gets the input of the MLP
  void finish_attention(const Layer& layer) {
    const Norm* after = layer.attention_after_norm;
    if (!layer.parallel)
      return norm(workspace.outputs, after, layer, layer.mlp_norm, layer.mlp_reader(), workspace.plain);
    norm(nullptr, nullptr, layer, layer.mlp_norm, layer.mlp_reader(), workspace.plain);
    add_norm(workspace.outputs, workspace.residual, workspace.residual, after, layer.residual_scale, 1.f, nullptr,
             nullptr, nullptr, nullptr, nullptr, M, stack.hidden_size(), threads);
  }

  // Writes the latents of all rows to the pages. Returns the queries that latents are multiplied by, times
  // query_scales [M], unless that is null.
  const bf16* write_latents(const Layer& layer, const float* cos, const float* sin, const float* query_scales,
                            char* pages, const int64_t* slots, int64_t int8, long site) {
    long rank = layer.key_up.out_features, stride = layer.qkv.out_features, size = stack.plain + stack.rotary,
         heads = stack.heads;
    const bf16* latents = workspace.outputs + stride - rank - stack.rotary;
    ::write_latents(latents, stride, layer.latent_norm, cos, sin, pages, slots, M, rank, stack.rotary,
                    stack.interleaved, int8, threads);
    if (layer.query_up.out_features) {
      gather_heads(workspace.outputs, stride, 0, workspace.head_inputs, M, 1, layer.query_up.in_features, threads);
      add_norm(nullptr, workspace.head_inputs, nullptr, nullptr, 1.f, 1.f, layer.query_latent_norm,
               bf16_target(&layer.query_up, workspace.plain), int8_target(&layer.query_up), workspace.scales,
               workspace.excess, M, layer.query_up.in_features, threads);
      linear(layer.query_up, site);
      stride = heads * size;
    }
    multiply_heads(layer.key_up, workspace.outputs, stride, size);
    join_queries(workspace.head_outputs, workspace.outputs, stride, cos, sin, workspace.queries, M, heads, rank,
                 stack.plain, stack.rotary, stack.interleaved, threads);
    if (query_scales) scale_rows(workspace.queries, query_scales, M, heads * (rank + stack.rotary), threads);
    return workspace.queries;
  }

  // head_outputs = the first numbers of each head of rows, times the weight of the head
  void multiply_heads(const Linear& layer, const bf16* rows, long stride, long size) {
    gather_heads(rows, stride, size, workspace.head_inputs, M, stack.heads, layer.in_features, threads);
    linear_heads(workspace.head_inputs, (const bf16*)layer.weight, workspace.head_outputs, M, stack.heads,
                 layer.out_features, layer.in_features, threads);
  }

  void activate(const Layer& layer) {
    const Linear& reader = layer.down;
    ::activate(workspace.outputs, layer.activation, layer.gated, layer.activation_factors,
               bf16_target(&reader, workspace.plain), int8_target(&reader), workspace.scales, workspace.excess, M,
               reader.in_features, threads);
  }

  // outputs = the MLP of plain, or of int8 if it takes that. `site` is the number of its first linear layer.
  void dense(const Layer& layer, long site) {
    if (!adapted.count && is_gate_fused(layer.gate_up, layer.activation, layer.gated, M)) {
      RowSlice all{0, M, 0};
      linear_gated(layer.gate_up, {workspace.plain, workspace.values, workspace.scales, workspace.excess},
                   workspace.active, {&all, 1}, layer.activation, threads);
      if (layer.down.form == INT8)
        quantize_rows(workspace.active, workspace.values, workspace.scales, workspace.excess, M, layer.down.in_features,
                      threads);
      return multiply(layer.down, workspace.active);
    }
    linear(layer.gate_up, site);
    activate(layer);
    linear(layer.down, site + 1);
  }

  // outputs = the mixture of plain
  void mix(const Layer& layer, long site) {
    const Mixture& mixture = *layer.mixture;
    const Linear &router = mixture.router, &gate_up = layer.gate_up;
    const bf16 *rows = workspace.plain, *shared = nullptr;
    ::linear(rows, (const bf16*)router.weight, router.bias, workspace.logits, M, router.out_features,
             router.in_features, true, threads);
    route(workspace.logits, mixture.bias, workspace.ids, workspace.weights, &mixture.routing, M, threads);
    if (mixture.routing.shared) {
      memcpy(workspace.rows, rows, M * stack.hidden_size() * sizeof(bf16));
      rows = workspace.rows;
      if (gate_up.form == INT8)
        quantize_rows(rows, workspace.values, workspace.scales, workspace.excess, M, gate_up.in_features, threads);
      dense(layer, site);
      shared = workspace.outputs;
    }
    experts(&mixture.experts, rows, workspace.ids, workspace.weights, shared, workspace.outputs, M,
            mixture.routing.experts_per_token, workspace.experts, threads);
  }

  // From here on, only the rows of these spans are computed: they move to the front of `attended` [M][width], which is
  // the attention's result, and of the residual.
  void keep_rows(const int64_t* spans, int64_t count, bf16* attended, long width) {
    long kept = 0, hidden = stack.hidden_size();
    for (const int64_t* span = spans; span < spans + SPAN_FIELDS * count; span += SPAN_FIELDS) {
      memmove(attended + kept * width, attended + span[0] * width, span[1] * width * sizeof(bf16));
      memmove(workspace.residual + kept * hidden, workspace.residual + span[0] * hidden,
              span[1] * hidden * sizeof(bf16));
      kept += span[1];
    }
    M = kept;
  }

  // Moves the rows that `keep_rows` kept back to their places in `out` [M][hidden].
  void restore_rows(const int64_t* spans, int64_t count, bf16* out) const {
    long kept = M, hidden = stack.hidden_size();
    for (const int64_t* span = spans + SPAN_FIELDS * (count - 1); span >= spans; span -= SPAN_FIELDS) {
      kept -= span[1];
      memmove(out + span[0] * hidden, out + kept * hidden, span[1] * hidden * sizeof(bf16));
    }
  }

  // The embeddings of all tokens, times their scale, become the residual.
  void embed(const int64_t* tokens) {
    long hidden = stack.hidden_size();
    for (long m = 0; m < M; m++) {
      const bf16* from = stack.embedding + tokens[m] * hidden;
      bf16* to = workspace.residual + m * hidden;
      memcpy(to, from, hidden * sizeof(bf16));
      if (stack.embedding_scale == 1) continue;
      for (long i = 0; i < hidden; i += LANES)
        store(to + i, load(from + i, hidden - i) * stack.embedding_scale, hidden - i);
    }
  }

  // Spreads the angles of each rotary embedding as rope_write takes them.
  void spread_angles(const int64_t* positions) {
    long half = stack.rotary / 2;
    for (long rope = 0; rope < stack.ropes; rope++)
      for (long m = 0; m < M; m++) {
        const float* angles = stack.angles + (rope * stack.positions + positions[m]) * 2 * half;
        float *cos = workspace.cos + (rope * M + m) * stack.rotary,
              *sin = workspace.sin + (rope * M + m) * stack.rotary;
        for (long i = 0; i < half; i++) {
          long one = stack.interleaved ? 2 * i : i, other = stack.interleaved ? 2 * i + 1 : half + i;
          cos[one] = cos[other] = angles[i];
          sin[one] = -(sin[other] = angles[half + i]);
        }
      }
  }

  // Where the reader's input is put. Adapters need bf16 rows in addition to int8.
  bf16* bf16_target(const Linear* reader, bf16* plain) const {
    return reader && reader->form == INT8 && !adapted.count ? nullptr : plain;
  }
  int8_t* int8_target(const Linear* reader) const {
    return reader && reader->form == INT8 ? workspace.values : nullptr;
  }
};

}  // namespace

extern "C" {

// Bytes that `layers` needs for M rows, with adapters of at most `columns` inner numbers.
int64_t layers_workspace(const Stack* stack, int64_t M, int64_t columns) {
  return Workspace(*stack, M, columns, nullptr).end;
}

// out [M, hidden] = the normed result of all layers for M tokens. Their keys and values are written to the pages;
// `pages` has the address of each layer's. tokens, positions, slots [M]; spans, table: as in `attend`; adapted: the
// rows with adapters; query_scales [M] of layers with scaled queries, or null. `result_spans`: the parts of the spans
// whose rows of `out` are wanted, at least one and in order, or null for all; the last layer computes only these, and
// the other rows of `out` stay as they are. Returns false, without computing anything, if a token has no embedding or a
// position no angles.
int64_t layers(const Stack* stack, const int64_t* tokens, bf16* out, const int64_t* positions, const int64_t* slots,
               int64_t M, const float* query_scales, const int64_t* spans, int64_t count, const int64_t* result_spans,
               int64_t result_count, const int64_t* table, char* const* pages, int64_t int8, const Adapted* adapted,
               void* memory, int64_t threads) {
  const Stack& s = *stack;
  for (long m = 0; m < M; m++)
    if (tokens[m] < 0 || tokens[m] >= s.vocab_size || positions[m] < 0 || positions[m] >= s.positions) return false;
  ForwardPass pass{s, *adapted, Workspace(s, M, adapted->columns, memory), M, threads};
  Workspace& workspace = pass.workspace;
  pass.embed(tokens);
  pass.spread_angles(positions);
  pass.norm(nullptr, nullptr, *s.layers, s.layers->attention_norm, &s.layers->qkv, workspace.plain);
  for (long i = 0; i < s.count; i++) {
    const Layer &layer = s.layers[i], *next = i + 1 < s.count ? &layer + 1 : nullptr;
    pass.linear(layer.qkv, LORA_SITES * i);
    long rope = std::max<long>(layer.rope, 0) * M * s.rotary, rotary = layer.rope < 0 ? 0 : s.rotary;
    const float *cos = workspace.cos + rope, *sin = workspace.sin + rope;
    bool keeps_results = !next && result_spans;
    const int64_t* attended_spans = keeps_results ? result_spans : spans;
    long attended_count = keeps_results ? result_count : count;
    if (s.plain) {
      const bf16* queries = pass.write_latents(layer, cos, sin, layer.scaled_queries ? query_scales : nullptr, pages[i],
                                               slots, int8, LORA_SITES * i + 4);
      long rank = layer.value_up.in_features;
      attend(queries, s.heads * s.dim, pages[i], workspace.head_outputs, attended_spans, attended_count, table,
             layer.sinks, layer.slopes, nullptr, s.heads, 1, s.dim, rank, int8, true, layer.window, layer.chunk,
             layer.score_scale, layer.softcap, threads);
      if (keeps_results) pass.keep_rows(result_spans, result_count, workspace.head_outputs, s.heads * rank);
      pass.multiply_heads(layer.value_up, workspace.head_outputs, s.heads * rank, rank);
      scatter_heads(workspace.head_outputs, workspace.plain, pass.M, s.heads, layer.value_up.out_features, threads);
    } else {
      rope_write(workspace.outputs, cos, sin, pages[i], slots, layer.head_norm, layer.whole_qk_norm, layer.late_qk_norm,
                 false, layer.scaled_queries ? query_scales : nullptr, M, s.heads, s.kv_heads, s.dim, rotary,
                 s.interleaved, int8, threads);
      attend(workspace.outputs, layer.qkv.out_features, pages[i], workspace.plain, attended_spans, attended_count,
             table, layer.sinks, layer.slopes, nullptr, s.heads, s.kv_heads, s.dim, s.dim, int8, false, layer.window,
             layer.chunk, layer.score_scale, layer.softcap, threads);
      if (keeps_results) pass.keep_rows(result_spans, result_count, workspace.plain, s.heads * s.dim);
    }
    if (layer.output.form == INT8)
      quantize_rows(workspace.plain, workspace.values, workspace.scales, workspace.excess, pass.M,
                    layer.output.in_features, threads);
    pass.linear(layer.output, LORA_SITES * i + 1);
    pass.finish_attention(layer);
    if (layer.mixture) pass.mix(layer, LORA_SITES * i + 2);
    else pass.dense(layer, LORA_SITES * i + 2);
    if (next)
      pass.norm(workspace.outputs, layer.mlp_after_norm, layer, next->attention_norm, &next->qkv, workspace.plain);
    else pass.norm(workspace.outputs, layer.mlp_after_norm, layer, s.norm, nullptr, out);
  }
  if (result_spans) pass.restore_rows(result_spans, result_count, out);
  return true;
}

}  // extern "C"
