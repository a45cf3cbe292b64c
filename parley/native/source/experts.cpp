// The experts of a mixture: out[m] = the sum of weight * MLP(x[m]) over the experts that the router chose for row m.
//
// Only the chosen experts' weights are read. Rows are copied into the order of their experts, so that an expert with
// several rows reads its weights once, and all experts' panels are divided evenly among the threads: with one row, each
// core reads half of the bytes. An MLP computes a row as a dense layer does, and the sum over a row's experts runs in
// fp32 in the order in which they were chosen. So neither the other rows nor the number of threads can change a bit.
#include "experts.h"

#include "kernels.h"
#include "threads.h"

namespace {

constexpr long MAX_PAIRS = 4096;        // of rows and chosen experts computed at once, which bounds the memory
constexpr long SERIAL_NUMBERS = 32768;  // numbers below which a second thread costs more than it gains

// Calls f(i) for 0 <= i < count, by a team if each i stands for many `numbers`.
template <class F> void for_each(long count, long numbers, long threads, F f) {
  run_parallel(count * numbers < SERIAL_NUMBERS ? 1 : threads, [=] {
#pragma omp for
    for (long i = 0; i < count; i++) f(i);
  });
}

// The data passed from kernel to kernel, for at most MAX_PAIRS pairs, in one allocation.
struct Workspace {
  uintptr_t end;
  LinearInput x, pairs;  // the batch's rows; these in the order of experts
  LinearInput active;    // the rows between the layers of an MLP
  bf16* gate_up;
  float* outputs;    // of the MLPs
  int64_t* place;    // the pair of each row and chosen expert
  RowSlice* slices;  // the pairs of each chosen expert

  Workspace(const Experts& e, long rows, long chosen, void* memory) : end((uintptr_t)memory) {
    long count = rows * chosen;
    allocate_rows(x, e.gate_up.form == INT8 ? rows : 0, e.gate_up.in_features);
    allocate_rows(pairs, count, e.gate_up.in_features);
    allocate_rows(active, count, e.down.in_features);
    allocate(gate_up, count * e.gate_up.out_features);
    allocate(outputs, count * e.down.out_features);
    allocate(place, count);
    allocate(slices, e.count);
  }

  void allocate_rows(LinearInput& rows, long count, long width) {
    allocate(rows.plain, count * width);
    rows.values = (int8_t*)rows.plain;  // a layer reads one of them
    allocate(rows.scales, count);
    allocate(rows.excess, count);
  }

  template <class T> void allocate(T*& place, long numbers) {
    place = (T*)end;
    end += (numbers * sizeof(T) + 63) / 64 * 64;
  }
};

long rows_at_once(long M, long chosen) { return std::min(M, std::max(1L, MAX_PAIRS / std::max(1L, chosen))); }

// Sorts the pairs of rows and chosen experts by expert. Returns the pairs of each expert that has any.
Slices sort_pairs(const Experts& e, const int64_t* ids, long count, const Workspace& workspace) {
  std::vector<long> ends(e.count + 1);
  for (long i = 0; i < count; i++) ends[ids[i] + 1]++;
  long touched = 0;
  for (long expert = 0; expert < e.count; expert++) {
    if (ends[expert + 1]) workspace.slices[touched++] = {ends[expert], ends[expert + 1], expert};
    ends[expert + 1] += ends[expert];
  }
  for (long i = 0; i < count; i++) workspace.place[i] = ends[ids[i]]++;
  return {workspace.slices, touched};
}

// Copies `rows` rows into the order of pairs, times the weights of their pairs unless these are null. Rows of weights
// are `stride` numbers apart.
void gather(const Linear& layer, const LinearInput& from, const Workspace& workspace, const float* weights, long stride,
            long rows, long chosen, long threads) {
  long width = layer.in_features;
  for_each(rows * chosen, width, threads, [&](long i) {
    long pair = workspace.place[i], row = i / chosen;
    float weight = weights ? weights[row * stride + i % chosen] : 1;
    if (layer.form == INT8) {
      memcpy(workspace.pairs.values + pair * width, from.values + row * width, width);
      workspace.pairs.scales[pair] = from.scales[row] * weight;
      workspace.pairs.excess[pair] = from.excess[row];
    } else if (weights) {
      const bf16* x = from.plain + row * width;
      bf16* to = workspace.pairs.plain + pair * width;
      for (long k = 0; k < width; k += LANES) store(to + k, load(x + k, width - k) * weight, width - k);
    } else {
      memcpy(workspace.pairs.plain + pair * width, from.plain + row * width, width * sizeof(bf16));
    }
  });
}

// Limits rows [count, 2 width] of gates and ups, in place. NaN stays NaN.
void limit_gates(bf16* rows, long count, long width, float gate_limit, float up_limit, long threads) {
  for_each(count, width, threads, [=](long i) {
    bf16 *gate = rows + 2 * i * width, *up = gate + width;
    Vec most = broadcast(gate_limit), above = broadcast(up_limit), below = broadcast(-up_limit);
    for (long k = 0; k < width; k += LANES) {
      Vec g = load(gate + k, width - k), u = load(up + k, width - k);
      store(gate + k, g > most ? most : g, width - k);
      store(up + k, u > above ? above : u < below ? below : u, width - k);
    }
  });
}

void multiply(const Linear& layer, const LinearInput& rows, Slices slices, void* y, bool as_fp32, long threads) {
  if (layer.form == INT8)
    int8_linear_slices(rows.values, rows.scales, rows.excess, (const uint8_t*)layer.weight, layer.scales, layer.bias, y,
                       slices, layer.out_features, layer.in_features, as_fp32, threads);
  else if (layer.form == GROUPED)
    grouped_linear_slices(layer.code, rows.plain, (const uint32_t*)layer.weight, layer.scales, layer.bias, y, slices,
                          layer.out_features, layer.in_features, layer.group, as_fp32, threads);
  else
    linear_slices(rows.plain, (const bf16*)layer.weight, layer.bias, y, slices, layer.out_features, layer.in_features,
                  as_fp32, threads);
}

}  // namespace

extern "C" {

// Bytes that `experts` needs for M rows.
int64_t experts_workspace(const Experts* experts, int64_t M, int64_t chosen) {
  return Workspace(*experts, rows_at_once(M, chosen), chosen, nullptr).end;
}

// out [M, hidden] = the weighted sum of the MLPs of experts ids [M, chosen] for rows x [M, hidden]. If there is
// `shared` [M, hidden], the outputs of an MLP that computes all rows, a row of weights has one more, which is its.
void experts(const Experts* experts, const bf16* x, const int64_t* ids, const float* weights, const bf16* shared,
             bf16* out, int64_t M, int64_t chosen, void* memory, int64_t threads) {
  const Experts& e = *experts;
  long hidden = e.down.out_features, stride = chosen + !!shared, most = rows_at_once(M, chosen);
  Workspace workspace(e, most, chosen, memory);
  for (long start = 0; start < M; start += most) {
    long rows = std::min(most, M - start), count = rows * chosen;
    LinearInput from = workspace.x;
    if (e.gate_up.form == INT8)
      quantize_rows(x + start * hidden, from.values, from.scales, from.excess, rows, hidden, threads);
    else from.plain = (bf16*)x + start * hidden;
    Slices slices = sort_pairs(e, ids + start * chosen, count, workspace);
    gather(e.gate_up, from, workspace, e.weighs_inputs ? weights + start * stride : nullptr, stride, rows, chosen,
           threads);
    bool int8 = e.down.form == INT8;
    const LinearInput& active = workspace.active;
    if (!e.up_limit && is_gate_fused(e.gate_up, e.activation, e.gated, count / std::max(1L, slices.count))) {
      bf16* plain = int8 ? workspace.gate_up : active.plain;
      linear_gated(e.gate_up, workspace.pairs, plain, slices, e.activation, threads);
      if (int8) quantize_rows(plain, active.values, active.scales, active.excess, count, e.down.in_features, threads);
    } else {
      multiply(e.gate_up, workspace.pairs, slices, workspace.gate_up, false, threads);
      if (e.up_limit) limit_gates(workspace.gate_up, count, e.down.in_features, e.gate_limit, e.up_limit, threads);
      activate(workspace.gate_up, e.activation, e.gated, nullptr, int8 ? nullptr : active.plain,
               int8 ? active.values : nullptr, active.scales, active.excess, count, e.down.in_features, threads);
    }
    multiply(e.down, active, slices, workspace.outputs, true, threads);
    for_each(rows, stride * hidden, threads, [&](long m) {
      const float* weight = weights + (start + m) * stride;
      for (long i = 0; i < hidden; i += LANES) {
        Vec total = {};
        for (long slot = 0; slot < chosen; slot++)
          total = fma(load(workspace.outputs + workspace.place[m * chosen + slot] * hidden + i, hidden - i),
                      broadcast(e.weighs_inputs ? 1.f : weight[slot]), total);
        if (shared) total = fma(load(shared + (start + m) * hidden + i, hidden - i), broadcast(weight[chosen]), total);
        store(out + (start + m) * hidden + i, total, hidden - i);
      }
    });
  }
}

}  // extern "C"
